"""What a GradientSync that exchanges weights does, after the optimizer's step; see GradientsBefore."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np

from mpisparse.backends.digest import digest
from mpisparse.comm.agreement import BROKEN, Notice, Refusal
from mpisparse.core.step import Clock, details_of
from mpisparse.errors import GradientError

DIVERGED = "nothing was exchanged: lower the learning rate or clip, and load a saved state"


class WeightsAfter:
    """Weights: every rank has its own, which the optimizer moves before they are exchanged.

    trouble: a problem found before the attached optimizer's step, which all ranks raise in the exchange. turn: there is one
    such optimizer.
    """

    words: ClassVar[Mapping[str, str]] = {"advice": DIVERGED, "what": "weight"}
    turn = 0

    def __init__(self, sync: Any) -> None:
        self.sync: Any = weakref.proxy(sync)
        self.trouble: str | None = None

    def step(self) -> None:
        """What GradientSync.step() does; collective."""
        self.sync._check_ready()
        if not self.sync._companion.idle:
            self.sync._companion.check_by_hand()
        self.finish()

    def begin(self, trouble: str | None, optimizer: Any = None) -> None:
        """Exchange gradients during a dense start, otherwise nothing yet; collective during such a start."""
        sync, self.trouble = self.sync, trouble
        sync._check_ready()
        sync._companion.begin()
        if sync._companion.starting:
            call, sync._call = sync._call, None
            sync._companion.average(trouble, call)

    def finish(self) -> None:
        """After the optimizer has moved the weights, exchange them if an exchange is due; collective then."""
        trouble, self.trouble = self.trouble, None
        self.sync._companion.begin()
        if self.sync._companion.is_due():
            self.sync._exchange_now(trouble)
        else:
            self.rest()

    def rest(self) -> None:
        """Called when no exchange follows the optimizer's step: apply deliveries in flight."""
        sync = self.sync
        sync._check_ready()
        sync._unexchanged.exchanged()
        sync._made, sync._stats = None, sync._companion.rested(sync._idle_stats(0, 0))
        aggregator, clock = sync._aggregator, Clock()
        number = aggregator.number
        try:
            for delivered in aggregator.arrivals():
                sync._gradients.publish(delivered.used)
                clock.lap("wait")
                notice = Notice(sync.k, np.zeros(len(sync._layout.slots), dtype=bool))
                details = details_of(aggregator.works)
                sync._note(functools.partial(aggregator.stats, number, notice, delivered, clock.seconds, details))
        except (Refusal, GradientError) as error:
            sync._fail(error)

    def rates(self) -> tuple[float, ...]:
        """Learning rates may differ."""
        return ()

    def sample(self, pieces: Any) -> int:
        """A number that differs between ranks with different batches; 0: there is none."""
        drift = self.sync._companion.sample()
        return 0 if drift is None else digest([drift])

    def lost(self, statuses: Collection[int], *, added: bool, late: bool) -> bool:
        """Whether weights have changed: only if a rank could not add what arrived."""
        return late and BROKEN in statuses
