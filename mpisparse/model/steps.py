"""The steps of a model: what of it goes through the aggregator, and what becomes of a step that is refused.

core/step.py has the order of a step on one flat vector. This is the order around it: gradients or weights are taken from the
model, the ranks agree that all can go on, the aggregator does its step, and the mean goes back into the model.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch._compile import _disable_dynamo

from mpisparse.arrays import Bools
from mpisparse.comm.agreement import FINE, NONFINITE, Notice, Overflow, Refusal, ReplicasDiffer, StepRefused
from mpisparse.comm.roll_call import Apart, Call
from mpisparse.core.records import Stats
from mpisparse.core.refusals import explain
from mpisparse.core.step import Clock, Peek, details_of, peeking
from mpisparse.errors import CollectiveError, GradientError
from mpisparse.model.collectives import Collectives
from mpisparse.model.construction import Assembly, Ground, gradients_of
from mpisparse.model.digests import Equality, Sameness
from mpisparse.model.grad_hooks import take_over
from mpisparse.model.gradients import GradientsBefore
from mpisparse.model.joining import joined_k, with_zeros
from mpisparse.model.set_density import SetDensity
from mpisparse.model.shards import local_of
from mpisparse.model.statistics import of_idle_step, of_the_rest
from mpisparse.model.unexchanged import Unexchanged
from mpisparse.model.weights_after import WeightsAfter

if TYPE_CHECKING:
    from mpisparse.backends.flat import Pieces
    from mpisparse.core.records import Delivered
    from mpisparse.model.survivors import Survivors


class Steps(SetDensity, Collectives):
    """Takes a model through the steps of an aggregator, on ground that all ranks have checked. GradientSync adds the rest.

    What is exchanged may change between steps, if the scheme says so: gradients before the optimizer's step, or weights
    after it.
    """

    def __init__(self, ground: Ground, assembly: Assembly) -> None:
        parts, options = assembly.parts, ground.options
        self._exchange, self._backend, self._layout = ground.exchange, ground.backend, ground.layout
        self.scheme, self._options, self._model = ground.scheme, options, ground.model
        self._hindrance: Callable[[], str] = getattr(self._backend, "hindrance", str)  # on the host there is none
        self._nodes, self._residual = assembly.nodes, parts.residual
        self._aggregator, self._companion = assembly.scheme
        weights = self._companion.subject is not None
        self._of_model = None if weights else gradients_of(ground, assembly, weakref.proxy(self))
        self._early = None if self._of_model is None else self._of_model.early
        self._hooks = self._gradients.watch
        take_over(self._hooks, self._layout.params)
        self._before, self._after = GradientsBefore(self), WeightsAfter(self)
        self._density = float(options.density)
        self._falls = getattr(options, "density_warmup", 0) > 0
        self._stats: Stats | None = None
        self._made: Callable[[], Stats] | None = None  # makes the statistics of the last step
        self._share = self._layout.size  # the elements that it exchanged
        self._syncing = True
        self._attached = assembly.attached  # what attach() returned, until it is removed
        self._call: Call | None = None  # the roll call of the coming step, where this rank takes part with zeros
        self._equality = Equality(self._layout.slots, self._replicated, self._rates, ground.care.check_every, self._turn)
        self._sameness = Sameness()
        self._unexchanged = Unexchanged(self)
        self._survivors: Survivors | None = None
        self._damaged: str | None = None

    # What a training loop calls

    @_disable_dynamo  # a compiled training step must not compile the exchange
    def step(self) -> None:
        """Exchange the gradients since the last step and publish their mean as p.grad; collective.

        Where a scheme exchanges weights (drift), call it after optimizer.step(). With overlap=True it may be called between
        backward and an attached optimizer's step, to clip what it published: that step then exchanges nothing.
        """
        self._exchanged.step()

    def begin(self, trouble: str | None = None, optimizer: torch.optim.Optimizer | None = None) -> None:
        """What step() does, for attach, which also calls finish() when the optimizer is done; collective.

        trouble: why this rank cannot go on, for all ranks to raise. optimizer: the attached one, whose step follows. Where
        weights are exchanged, that is left to finish(), and only the gradients of a dense start are exchanged here.
        """
        self._exchanged.begin(trouble, optimizer)

    def finish(self) -> None:
        """The attached optimizer has done its step; local, unless weights are exchanged now or have arrived."""
        self._exchanged.finish()
        self.turn()

    def turn(self) -> None:
        """Exchange something else from the next step on, if the scheme wants to: weights or gradients; collective then."""
        if self._companion.turning:
            try:
                self._companion = self._companion.turned()
            except (Refusal, GradientError) as error:
                self._fail(error)
            self._gradients.restart()

    # One step

    def _exchange_now(self, trouble: str | None) -> None:
        """Do one step of the aggregator; collective."""
        self._check_ready()
        if not self._companion.idle:
            self._companion.begin()
        aggregator, works, gradients, clock = self._aggregator, self._aggregator.works, self._gradients, Clock()
        self._backend.use_threads(torch.get_num_threads())
        number, pieces, notice = self._taken(trouble, clock)
        try:
            if self._survivors is None:
                used = self._agreed(notice, clock, self._peek(pieces))
            else:
                notice = self._survivors.measured(notice)
                used = self._survivors.met(lambda told: self._agreed(told, clock), notice)
        except Refusal as refusal:
            self._take_back(refusal)
            self._refuse(refusal, added=False)
            return
        works = aggregator.works  # what all ranks agreed on may have changed them
        if self._exchange.size > 1:
            self._equality.done(notice.step)
        if gradients.holds:
            self._hold()
        try:
            delivered = self._delivered(pieces, notice, clock)
        except (Refusal, GradientError) as error:
            self._fail(error)
            return
        details = details_of(works)
        if self._survivors is not None:
            used = self._survivors.ended(used, details)
        self._note(functools.partial(aggregator.stats, number, notice, delivered, clock.seconds, details))
        if not self._companion.idle:
            self._stats = self._companion.published(delivered, self.stats, sound=notice.status == FINE)
        gradients.publish(self._used_late(delivered) if works.flight is not None else used)
        self._exchange.place.steps = number + 1

    def _taken(self, trouble: str | None, clock: Clock) -> tuple[int, Pieces | None, Notice]:
        """The step's number, what the model gives to it, and what to tell the ranks; collective in the first exchanges."""
        call, self._call = self._call, None
        aggregator, works, gradients = self._aggregator, self._aggregator.works, self._gradients
        found = aggregator.ready(clock.lap) if works.scorer.asks else ""  # asked even in trouble: it begins a new step
        found = found or self._hindrance()
        gradients.look()  # k counts what is not frozen
        pieces, notice = gradients.take(self.k if call is None else joined_k(call, self.k), trouble or found)
        number = self._coming
        notice = notice._replace(step=self._counted(number))
        if self._exchange.size > 1:
            notice = self._compared(notice, pieces, call)
        if self._unexchanged.since:
            self._unexchanged.exchanged()
        return number, pieces, notice

    @property
    def _coming(self) -> int:
        """The number of the coming step of the aggregator."""
        works = self._aggregator.works
        return works.selection.step + (len(works.flight) if works.flight is not None else 0)

    def _counted(self, number: int) -> int:
        """The number of a step of the aggregator among all steps."""
        return number if self._companion.idle else self._companion.counted(number)

    def hold_weights(self) -> None:
        """The attached optimizer begins to evaluate a closure, maybe with other weights on each rank; local."""
        if self._exchange.size > 1 and not self._hindrance():
            self._equality.hold(self._counted(self._coming))

    def _compared(self, notice: Notice, pieces: Pieces | None, call: Call | None) -> Notice:
        """Add what the ranks compare to a notice; collective in the first exchanges. A rank alone compares nothing."""
        if self._hindrance():  # nothing can be read
            return notice
        notice = notice._replace(digest=self._equality.number(notice.step))
        if call is not None:
            notice = with_zeros(notice, call)
        elif self._sameness.looks:
            try:
                self._sameness.compare(self._exchange, notice.step, self._exchanged.sample(pieces))
            except CollectiveError:
                if self._exchange.gone:
                    self._aggregator.recall(self._exchange.gone)
                raise
        self._sameness.done += 1
        return notice

    def _peek(self, pieces: Pieces | None) -> Peek | None:
        """What tells what this step's pass will find before anything is added; None where that cannot be told. Local."""
        known = self._exchange.size > 1 and not self._gradients.holds and self._options.nonfinite == "raise"
        return peeking(self._aggregator.works, pieces) if known else None

    def _agreed(self, notice: Notice, clock: Clock, peek: Peek | None = None) -> Bools | None:
        """Agree that all ranks can go on, also if their weights differ by no more than rounding; collective."""
        works = self._aggregator.works
        try:
            return self._aggregator.agreement(works, notice, clock, peek)
        except ReplicasDiffer as differ:
            try:
                self._equality.judge(self._exchange)
            except GradientError:
                self._take_back(differ)
                raise
            return differ.used

    def _delivered(self, pieces: Pieces | None, notice: Notice, clock: Clock) -> Delivered | None:
        """Have the aggregator do its step with what is not frozen; collective."""
        aggregator, works = self._aggregator, self._aggregator.works
        held = self._layout.held.stretches
        with self._gradients.out_of_sight(aggregator.memories) if held else nullcontext():
            delivered = aggregator.one_step(works, pieces, notice, clock)
        if works.differ and self._equality.every:  # in flight: when what was sent with it is applied
            self._together(lambda: self._equality.judge(self._exchange))
        works.differ = False
        return delivered

    def _used_late(self, delivered: Any) -> Bools | None:
        """Which parameters had a gradient in the step whose mean is published; none before the first delivery."""
        if delivered is None:
            return np.zeros(len(self._layout.slots), dtype=bool)
        used: Bools | None = delivered.used
        return used

    def _note(self, made: Callable[[], Stats]) -> None:
        """Keep what the last step did; its statistics are made when they are asked for."""
        self._made, self._share = made, self._layout.held.remaining

    def _check_ready(self) -> None:
        if self._hooks.removed:
            raise RuntimeError(f"r{self.rank} | this GradientSync was closed, or another was made for the same model")
        if not self._syncing:
            raise RuntimeError(f"r{self.rank} | step() inside no_sync(): leave the block before the step that exchanges")
        self._check_undamaged()

    def _check_undamaged(self) -> None:
        if self._damaged is not None:
            raise GradientError(
                f"r{self.rank} | the residual is damaged since an earlier error ({self._damaged}); load a saved state"
            )

    def _hold(self) -> None:
        """What is frozen now moves no more: nothing of it stays on its way, and what came of its gradient waits."""
        frozen = self._gradients.frozen
        if frozen.changed:
            self._aggregator.hold()
            self._companion.hold(frozen.mask.tolist())
            frozen.changed = False
        self._gradients.hold_late()

    # A step that is refused

    def _take_back(self, refusal: Refusal) -> None:
        """The step is refused before the ranks agreed: gradients are still p.grad. Collective, unless ranks are apart.

        Where they are only apart, what has set out stays out: all ranks have sent the same, and a later step() takes it.
        """
        self._gradients.refused()
        if not isinstance(refusal, Apart):
            self._aggregator.recall()
        elif self._exchange.gone:
            self._aggregator.recall(self._exchange.gone)

    def _fail(self, error: Exception) -> None:
        """Raise what a step found wrong as an error with the parameters' names, or skip the step.

        What was added or sent by then is lost, unless the aggregator has undone it.
        """
        if isinstance(error, Refusal):
            self._refuse(error, added=not self._aggregator.undoes)
            return
        self._damaged = str(error).split(" | ", 1)[-1]
        raise error

    def _refuse(self, refusal: Refusal, *, added: bool) -> None:
        """Raise a refusal as an error, on all ranks alike; or skip the step. `added`: gradients were added before it."""
        statuses = {status for status, _ in refusal.statuses} if isinstance(refusal, StepRefused) else set()
        if self._options.nonfinite == "skip" and NONFINITE in statuses and not added:
            self._skip()
            return
        late_step = self._aggregator.applied if self._aggregator.staleness else None
        frozen = self._gradients.frozen.names()
        words = self._exchanged.words
        tell = functools.partial(explain, refusal, self._exchange, self._layout.name_at, frozen, late_step, **words)
        error, damage = self._together(tell)
        if isinstance(refusal, Overflow):
            self._gradients.drop()
        if self._exchanged.lost(statuses, added=added, late=late_step is not None):
            self._damaged = damage or "a step was refused after its gradients were added"
        raise error from (refusal.__cause__ or self._aggregator.cause)

    def _skip(self) -> None:
        """Some rank has a non-finite gradient: drop all gradients and change nothing else."""
        self._gradients.drop()
        self._stats = self._idle_stats(self._exchange.nbytes_sent, self._exchange.nbytes_received, skipped=True)

    def _idle_stats(self, sent: int, received: int, *, skipped: bool = False) -> Stats:
        """The statistics of a step in which nothing was exchanged."""
        seen = self._made is not None or self._stats is not None
        share, threshold = self.k / max(1, self._layout.held.remaining), self.stats.threshold if seen else 0.0
        return of_idle_step(self._aggregator.number, share, threshold, sent, received, skipped=skipped)

    # What it tells

    @property
    def averages_gradients(self) -> bool:
        """Whether the coming step exchanges gradients before optimizer.step(), not weights after it."""
        return not self.exchanges_weights or self._companion.starting

    @property
    def exchanges_weights(self) -> bool:
        """Whether ranks train on weights of their own now, which are exchanged after optimizer.step()."""
        return self._companion.subject is not None

    @property
    def syncing(self) -> bool:
        """Whether a backward is one that step() follows: not inside no_sync()."""
        return self._syncing

    @property
    def scaler(self) -> Any:
        """The GradScaler of an attached optimizer, if there is one."""
        return next((one.scaler for one in self._attached if one.scaler is not None), None)

    @property
    def rank(self) -> int:
        """This process's rank among those that exchange."""
        return self._exchange.rank

    @property
    def size(self) -> int:
        """The number of ranks that exchange."""
        return self._exchange.size

    @property
    def stats(self) -> Stats:
        """What the last step did."""
        if self._made is not None:
            stats, self._made = self._made(), None
            whole = self._share == self._layout.size
            self._stats = stats if whole else of_the_rest(stats, self._layout.size, self._share)
        if self._stats is None:
            raise RuntimeError(f"r{self.rank} | there are no statistics before the first step()")
        return self._stats

    @property
    def k(self) -> int:
        """The number of elements that the set density, or what a scheme makes of it, asks for."""
        density = self._density
        if self._falls:
            density = self._options.density_of(self._aggregator.number, density)
        share = min(1.0, density * self._aggregator.works.k_scale)
        return max(1, math.floor(share * self._layout.held.remaining + 1e-6))

    @property
    def _gradients(self) -> Any:
        """What of the model is exchanged: gradients, or weights."""
        return self._companion.subject or self._of_model

    @property
    def _exchanged(self) -> GradientsBefore | WeightsAfter:
        """What of the model is exchanged, and when."""
        return self._after if self.exchanges_weights else self._before

    def _replicated(self) -> Sequence[torch.Tensor]:
        """The weights that must be equal on all ranks, one tensor for each parameter."""
        return self._companion.replicated() or [local_of(getattr(p, "param", p)) for p in self._layout.params]

    def _rates(self) -> tuple[float, ...]:
        """The learning rates that must be equal on all ranks."""
        return self._exchanged.rates()

    def _turn(self) -> int:
        """Which of several attached optimizers steps; it must be the same on all ranks."""
        return self._exchanged.turn
