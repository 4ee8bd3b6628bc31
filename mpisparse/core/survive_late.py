"""Deliveries in flight that survive the death of a rank: either all living ranks take a result, or none does.

Values that left the accumulator are kept until the ranks have agreed that all of them have the result. If a rank dies
before, all others drop the deliveries in flight, return these values to the accumulator, and send them again.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mpisparse.comm.inflight import InFlight
from mpisparse.comm.roll_call import STEP, meet
from mpisparse.core import flights
from mpisparse.core.records import Arrived, Outgoing, Refused
from mpisparse.errors import CollectiveError
from mpisparse.wire.reduction import NO_VALUES

if TYPE_CHECKING:
    from mpisparse.arrays import Floats, Ints, State
    from mpisparse.comm.survival import Survival
    from mpisparse.core.records import Works
    from mpisparse.core.stages import Stage
    from mpisparse.select.plans import Agreed, Selection
    from mpisparse.wire.reduction import Reducer


class Departed(NamedTuple):
    """What a delivery took from this rank: values at an index, and the stages as they were.

    agreed: the agreement to send these values, if an earlier delivery made it.
    """

    index: Ints  # type: ignore[assignment]  # hides tuple.index
    values: Floats
    stages: tuple[Stage, ...]
    agreed: Agreed | None

    @classmethod
    def of(cls, out: Outgoing) -> Departed:
        """Copy it before departure, because deliver may overwrite the values."""
        if out.ahead is not None:
            return cls(out.ahead.sent.index, out.ahead.sent.values.copy(), out.stages, out.ahead.agreed)
        leaving = out.view.leaving
        return cls(leaving, out.view.take(leaving) if len(leaving) else NO_VALUES, out.stages, None)


class CommittedFlight(InFlight[Outgoing, Arrived]):
    """Deliveries in flight among ranks that may die. departed: what each one took; None for one loaded from a state."""

    def __init__(
        self, carry: Callable[[Outgoing], Arrived], staleness: int, survival: Survival, *, threaded: bool = True
    ) -> None:
        super().__init__(survival.carrying(carry), staleness, threaded=threaded)
        self.survival = survival
        self.departed: deque[Departed | None] = deque()

    def send(self, outgoing: Outgoing) -> None:
        self.departed.append(Departed.of(outgoing))
        super().send(outgoing)

    def due(self) -> Arrived | None:
        """As InFlight.due(); collective. Also None if a rank has died and nothing is in flight any more."""
        return self._taken() if len(self.waiting) >= self.staleness else None

    def oldest(self) -> Arrived | None:
        """As InFlight.oldest(); collective."""
        return self._taken() if self.waiting else None

    def results(self) -> list[Arrived]:
        try:
            return super().results()
        except Exception as error:
            raise CollectiveError(
                f"r{self.survival.exchange.rank} | what is in flight did not arrive, probably because a rank has died: call "
                "state_dict() after the next step, or checkpoint.save(), which tries again"
            ) from error

    def replace(self, results: Sequence[Arrived]) -> None:
        super().replace(results)
        self.departed = deque([None] * len(results))

    def _taken(self) -> Arrived | None:
        """The oldest result, if all living ranks have it; collective.

        The roll call is for ranks that are ending: they answer it, but take part in no agreement.
        """

        def attempt() -> Arrived | None:
            arrived = self.waiting[0].result() if self.waiting else None
            if isinstance(arrived, Refused):
                raise arrived.refusal
            meet(self.survival.exchange, STEP)
            return arrived

        try:
            return self.survival.surely(attempt)
        finally:
            if self.waiting:
                self.waiting.popleft()
                self.departed.popleft()


def drop(works: Works, selection: Selection, reducer: Reducer) -> list[State]:
    """Return what the deliveries in flight took to the accumulator; local, while no thread delivers.

    Deliveries loaded from a state stay in flight, because all ranks have their results. Returns them, packed.
    """
    flight, backend, n, size = works.flight, works.backend, len(works.acc), works.exchange.size
    assert isinstance(flight, CommittedFlight)
    known, lost = flight.departed.count(None), [one for one in flight.departed if one is not None]
    packed = [flights.pack(works.selection, works.reducer, future.result()) for future in list(flight.waiting)[:known]]
    with on_host(works) as acc:
        home = _at_rest(works, packed, acc)
    agreed = None if home["waiting"] is None else works.selection.unpacked(home["waiting"])
    for one in lost:
        works.scorer.give_back(backend, backend.from_host(one.index), backend.from_host(one.values))
        pairs = zip(works.stages, one.stages, strict=True)
        works.stages = tuple([stage.returned(theirs) for stage, theirs in pairs])
        agreed = agreed or one.agreed
    works.waiting = None if agreed is None else flights.reshared(agreed, n, size)
    flight.replace([flights.unpack(selection, reducer, each, n, size) for each in home["flight"]])
    return list(home["flight"])


@contextlib.contextmanager
def on_host(works: Works) -> Iterator[Floats]:
    """The accumulator in the memory of the host, for what is done once after a death; local."""
    acc = works.backend.to_host(works.acc)
    yield acc
    if acc is not works.acc:
        works.acc[:] = works.backend.from_host(acc)


def _at_rest(works: Works, packed: list[State], acc: Floats) -> State:
    """Move to the accumulator what deliveries loaded from a state still hold of this rank alone; the common mean stays."""
    state: State = {"flight": packed, "waiting": None}
    for stage in works.stages if packed else ():
        state = stage.at_rest({**state, **stage.state()}, acc)
    works.stages = tuple([stage.loaded(state) for stage in works.stages]) if packed else works.stages
    return flights.bring_home(state, works.reducer, acc)
