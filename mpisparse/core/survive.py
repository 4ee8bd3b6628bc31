"""Steps that survive the death of a rank: until all living ranks have delivered a step, only the accumulator changes.

One agreement ends the collective part of a step and commits it. If a rank dies before it, the others form a smaller
group, repeat the roll call and deliver again from their accumulators. If a rank dies after it, all living ranks have
done the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from mpisparse.core.step import deliver, prepared, share_readiness
from mpisparse.core.survive_late import drop, on_host
from mpisparse.select.candidates import NONE

if TYPE_CHECKING:
    from mpisparse.arrays import Bools, Floats
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.agreement import Notice
    from mpisparse.comm.exchange import Exchange
    from mpisparse.comm.survival import Survival
    from mpisparse.core.mirror import Mirror
    from mpisparse.core.records import Delivered, Outgoing, Works
    from mpisparse.core.step import Clock
    from mpisparse.select.plans import Selection
    from mpisparse.wire.reduction import Reducer

T = TypeVar("T")
PARTS = 32  # parts of the residual; each step measures one of them


class CommittedDelivery:
    """Delivers a step and commits it, and delivers it again if a rank dies meanwhile; step.run calls it instead of deliver.

    owing: returns this rank's residual in [lo, hi). mirror: the copy of another rank's residual, if ranks keep copies.
    """

    def __init__(
        self, works: Works, survival: Survival, owing: Callable[[int, int], Floats], mirror: Mirror | None = None
    ) -> None:
        self.works, self.survival, self.owing, self.mirror = works, survival, owing, mirror
        self.forget_damage: Callable[[], None] = getattr(works.backend, "forget_damage", lambda: None)
        self.mirrored = 0  # bytes of copies that the last step received
        self.squares = np.zeros(PARTS)
        self.again: tuple[Bools | None] | None = None  # the result of a repeated roll call in this step

    def __call__(self, exchange: Exchange, backend: Backend, out: Outgoing, clock: Clock) -> Delivered:
        """Deliver; collective."""

        def attempt(again: bool) -> Delivered:
            return deliver(exchange, backend, collect_again(self.works, out) if again else out, clock)

        return self._mirrored(self.commit(out.notice, attempt))

    def commit(self, notice: Notice, attempt: Callable[[bool], T]) -> T:
        """Do the part of a step after its roll call; if a rank dies before all have done it, repeat both. Collective.

        The argument of `attempt` says whether it is a repetition.
        """
        again, self.again = False, None

        def called() -> T:
            nonlocal again
            now, again = again, True
            if now:  # ranks that did not know of the death are still at the roll call
                self.forget_damage()  # a device reports late that a message came without its values
                if self.mirror is not None:
                    self.mirror.arrive()
                self.again = (share_readiness(self.survival.exchange, notice._replace(digest=0)),)
            return attempt(now)

        return self.survival.surely(called)

    def _mirrored(self, delivered: Delivered) -> Delivered:
        """Clear what was delivered in the copy, and count the copy's bytes. Local."""
        if self.mirror is None:
            return delivered
        self.mirror.delivered(delivered.due.union)
        self.mirrored = self.mirror.settled()
        sent, received = delivered.nbytes_sent + self.mirrored, delivered.nbytes_received + self.mirrored
        return delivered._replace(nbytes_sent=sent, nbytes_received=received)

    def used(self, before: Bools | None) -> Bools | None:
        """Which parameters had a gradient on some living rank, by the last roll call of the step; local.

        before: the result of the first roll call.
        """
        return before if self.again is None else self.again[0]

    def norm(self) -> int:
        """The norm of the residual as the bits of a float64; each part was measured within the last 32 steps. Local.

        Reading the whole residual in each step would take a tenth of the step's time.
        """
        n, part = len(self.works.acc), self.works.selection.step % PARTS
        values = self.works.backend.to_host(self.owing(part * n // PARTS, (part + 1) * n // PARTS))
        self.squares[part] = float(np.dot(values, values))
        return int(np.float64(math.sqrt(float(self.squares.sum()))).view(np.int64))


def collect_again(works: Works, out: Outgoing) -> Outgoing:
    """Plan a step among fewer ranks and collect its candidates; the accumulator already holds the gradient. Local."""
    plan = works.selection.plan(out.notice.k)
    found = works.scorer.keys.select(*plan.scope, plan.floor) if plan.scope[1] > plan.scope[0] else NONE
    return prepared(works, plan, found, out.notice)


def reform(works: Works, selection: Selection, reducer: Reducer, rank: int, size: int) -> Callable[[], None]:
    """Prepare to go on with a selection and a reducer made for fewer ranks; collective. Returns the function that does it.

    rank, size: this rank and the number of ranks before the death. The accumulator, the scorer and the stages belong to
    this rank alone and stay. Deliveries in flight are dropped, and what they took returns to the accumulator.
    """
    moved = works.reducer.moved(reducer, works.exchange, works.backend, rank, size)

    def finish() -> None:
        state, done = works.selection.state(), works.selection.step
        if works.flight is not None:
            done += len(works.flight)
            state["flight"] = drop(works, selection, reducer)
            done -= len(works.flight)
        selection.load(state)
        if selection.step < done:  # nothing is learnt from dropped deliveries, but their steps count
            selection.load({**state, "step": done})
        with on_host(works) as acc:
            moved(acc)
        works.selection, works.reducer = selection, reducer

    return finish
