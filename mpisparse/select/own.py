"""Every rank chooses in the whole vector, by its own values, and sends its elements to the owners of regions to be added.

The chosen elements are on the host, even if the vector is on a device.

Regions only say which rank adds what. They follow what was sent last, so that the sums are balanced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from mpisparse.arrays import Floats, Ints, State
from mpisparse.comm.agreement import FINE, Notice
from mpisparse.comm.regions import Region, cut_at, even_regions, shared_out
from mpisparse.errors import ConfigurationError
from mpisparse.select.candidates import NONE, Candidates, keep_largest, largest
from mpisparse.select.pickers import Picked, Picker
from mpisparse.select.plans import Agreed, Outcome, pack_agreed, unpack_agreed
from mpisparse.select.search import share_counts
from mpisparse.select.threshold import TINY
from mpisparse.select.view import Live, Snapshot, View

if TYPE_CHECKING:
    from mpisparse.backends.flat import Held
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.exchange import Exchange

DUE = 16  # every so many steps it chooses by magnitude, if scores could let elements wait for ever


class Chooser:
    """How a rank chooses among all elements. By default it remembers nothing."""

    def choose(self, live: Live, k: int, step: int) -> Picked:
        """Choose about k elements; local."""
        raise NotImplementedError

    def learn(self, step: int, lesson: Any, outcome: Outcome) -> None:
        """Learn from a step that is done: from the choice's lesson (None if a state was saved meanwhile) and the outcome."""

    def state(self) -> State:
        """What the next choice depends on."""
        return {}

    def check(self, state: State) -> None:
        """Raise ConfigurationError unless load() could take the state."""

    def load(self, state: State) -> None:
        """Load a state that state() returned."""


class Largest(Chooser):
    """The k elements with the largest keys among those with a nonzero value to send.

    masked: instead of them, all whose accumulator reaches the k-th largest key. turns: every 16th step goes by magnitude,
    because keys that do not grow with the unsent values could let some elements wait for ever.
    """

    def __init__(self, *, masked: bool = False, turns: bool = False) -> None:
        self.masked = masked
        self.turns = turns

    def choose(self, live: Live, k: int, step: int) -> Picked:
        view = live.by_magnitude() if self.turns and step % DUE == DUE - 1 else live
        if self.masked and not view.plain:
            found = largest(live.backend, live.keys, len(live.acc), k)
            threshold = float(found.magnitude.min()) if len(found.index) == k else TINY
            return Picked(live.by_magnitude().select(0, len(live.acc), threshold).index, threshold)
        found = self._with_something(view, k)
        return Picked(found.index, float(found.magnitude.min()) if len(found.index) else 0.0)

    @staticmethod
    def _with_something(view: Live, k: int) -> Candidates:
        """The k largest keys where the accumulator is not zero; looks at more and more keys until there are k."""
        n, wanted = len(view.acc), k
        while True:
            found = largest(view.backend, view.keys, n, wanted)
            held = view.holds(found.index)
            kept = Candidates(found.index[held], found.magnitude[held])
            if len(kept.index) >= k or len(found.index) < wanted or wanted == n:
                return keep_largest(kept, k)
            wanted = min(n, 2 * wanted)


class ByPicker(Chooser):
    """Chooses as a picker does."""

    def __init__(self, picker: Picker, held: Held) -> None:
        self.picker = picker
        self.held = held

    def choose(self, live: Live, k: int, step: int) -> Picked:
        vector = live.keys.vector
        return self.picker.pick(vector, self.picker.wanted(min(k, len(vector)), self.held.remaining, step), step)

    def learn(self, step: int, lesson: Any, outcome: Outcome) -> None:
        self.picker.learn(lesson)

    def state(self) -> State:
        return self.picker.state()

    def check(self, state: State) -> None:
        self.picker.check(state)

    def load(self, state: State) -> None:
        self.picker.load(state)


class Chosen(NamedTuple):
    """What this rank sends in a step, and what its chooser learns from it."""

    index: Ints  # type: ignore[assignment]  # hides tuple.index
    values: Floats
    lesson: Any = None


class OwnPlan(NamedTuple):
    """One step in which each rank sends its own elements. note: called with the choice. late: deliver gets a snapshot."""

    chooser: Chooser
    k: int
    step: int
    n: int
    regions: list[Region]
    note: Callable[[Chosen], None]
    late: bool
    own: bool = True
    looks: bool = True
    scope: tuple[int, int] = (0, 0)  # no candidates are collected in the pass
    floor: float = 0.0

    def look(self, live: Live, notice: Notice) -> View:
        """Choose; nothing if this rank cannot go on."""
        picked = self.chooser.choose(live, self.k, self.step) if notice.status == FINE else Picked(NONE.index, 0.0)
        picked = picked._replace(index=live.backend.to_host(picked.index))
        values = live.backend.to_host(live.take(live.backend.from_host(picked.index)))
        self.note(Chosen(picked.index, values, picked.lesson))
        found = Candidates(picked.index, np.abs(values))
        if not self.late:
            return live._replace(found=found, picked=picked)
        return Snapshot(live.backend, found, values, leaving=picked.index, picked=picked)

    def agree(self, exchange: Exchange, backend: Backend, notice: Notice, view: View) -> Agreed:
        """Share how many elements each rank sends, and its threshold; the largest is the step's. Collective."""
        found, picked = view.found, view.picked
        bits = int(np.float32(picked.threshold).view(np.uint32))
        counts = share_counts(exchange, notice, np.array([len(found.index), bits], dtype=np.int64), self.n)
        threshold = float(counts[:, 1].max().astype(np.uint32).view(np.float32))
        union = backend.from_host(found.index)
        return Agreed(found, threshold, counts[:, 0], self.regions, union=union, own=True, lesson=picked.lesson)

    def united(self, agreed: Agreed, union: Ints) -> Agreed:
        """There is nothing to unite."""
        return agreed


class OwnSelection:
    """Plans steps in which each rank sends its own elements. one_server: rank 0 makes all sums.

    fixed: regions never change, because their owners keep an error for them.
    step: deliveries learnt from; begun: steps begun. chosen: what the last step sends.
    """

    added: ClassVar[State] = {}

    def __init__(
        self, chooser: Chooser, backend: Backend, n: int, size: int, *, late: bool, one_server: bool = False,
        fixed: bool = False,
    ) -> None:  # fmt: skip
        self.chooser = chooser
        self.backend = backend
        self.n = n
        self.size = size
        self.late = late
        self.one_server = one_server
        self.fixed = fixed or one_server
        self.step = self.begun = 0
        self.chosen = Chosen(NONE.index, NONE.magnitude)
        self.regions = self._first_regions()

    def _first_regions(self) -> list[Region]:
        """The regions before any selection is known: even ones, or everything at rank 0."""
        return cut_at([self.n] * (self.size - 1), self.n) if self.one_server else even_regions(self.n, self.size)

    def plan(self, k: int) -> OwnPlan:
        """The coming step."""
        plan = OwnPlan(self.chooser, k, self.begun, self.n, self.regions, self._note, self.late)
        if self.late:  # in flight a step has begun for good; at staleness 0 a refused step begins again
            self.begun += 1
        return plan

    def _note(self, chosen: Chosen) -> None:
        self.chosen = chosen

    def learn(self, agreed: Agreed, outcome: Outcome) -> None:
        """Balance the regions by what was sent, and let the chooser learn."""
        if not self.fixed:
            self.regions = shared_out(self.backend.to_host(outcome.index), self.n, self.size)
        step, self.step = self.step, self.step + 1
        if not self.late:
            self.begun = self.step
        self.chooser.learn(step, agreed.lesson, outcome)

    def state(self) -> State:
        """What the next step depends on."""
        return {"step": self.begun, "borders": [region.lo for region in self.regions], **self.chooser.state()}

    def check(self, state: State) -> None:
        """Raise ConfigurationError unless load() could take the state."""
        if int(state["step"]) < len(state.get("flight", ())):
            raise ConfigurationError("the state has more deliveries in flight than steps")
        borders = [int(lo) for lo in state["borders"]]
        if borders != sorted(borders) or (borders and not 0 <= borders[0] <= borders[-1] <= self.n):
            raise ConfigurationError(f"the borders in the state do not cut {self.n} elements")
        self.chooser.check(state)

    def load(self, state: State) -> None:
        """Load a state that state() returned."""
        self.begun = int(state["step"])
        self.step = self.begun - len(state.get("flight", ()))
        self.chooser.load(state)
        borders = [int(lo) for lo in state["borders"]]
        self.regions = cut_at(borders[1:], self.n) if len(borders) == self.size else self._first_regions()

    def resize(self, states: Sequence[State]) -> State:
        """All ranks have the same state; another number of ranks starts with even regions."""
        return {key: states[0][key] for key in self.state()}

    def packed(self, agreed: Agreed) -> State:
        """An agreement in flight as plain values."""
        return pack_agreed(agreed)

    def unpacked(self, state: State) -> Agreed:
        """The agreement that packed() packed."""
        return unpack_agreed(state, own=True)
