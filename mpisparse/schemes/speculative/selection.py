"""What a rank sends: its own influential weights, whole layers or single ones, by a policy that learns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpisparse.arrays import Floats, Ints, State
from mpisparse.comm.agreement import FINE, Notice
from mpisparse.comm.regions import Region, cut_at, even_regions, shared_out
from mpisparse.errors import ConfigurationError
from mpisparse.schemes.speculative.granularity import Filter, Filtered
from mpisparse.schemes.speculative.policy import Policy, Seen
from mpisparse.select.candidates import NONE, Candidates
from mpisparse.select.plans import Agreed, Outcome, pack_agreed, unpack_agreed
from mpisparse.select.search import share_counts
from mpisparse.select.view import Live, Snapshot, View

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.exchange import Exchange

NOTHING = Filtered(NONE.index, 0.0, (True,), ())


class SentAhead(NamedTuple):
    """What this rank sends in a step, and how it was filtered."""

    index: Ints  # type: ignore[assignment]  # hides tuple.index
    values: Floats
    filtered: Filtered


class GranularPlan(NamedTuple):
    """One step in which each rank sends its own elements. note: is told what was picked."""

    filter: Filter
    share: float
    k: int
    step: int
    n: int
    regions: list[Region]
    note: Callable[[SentAhead], None]
    own: bool = True
    looks: bool = True
    scope: tuple[int, int] = (0, 0)  # no candidates are collected in the pass
    floor: float = 0.0

    def look(self, live: Live, notice: Notice) -> View:
        """Filter by influence, and take a snapshot of what passed; nothing passes where a rank cannot go on."""
        fine = notice.status == FINE
        filtered = self.filter.run(live.keys.vector, self.k, self.share, self.step) if fine else NOTHING
        values = live.take(filtered.index)
        self.note(SentAhead(filtered.index, values, filtered))
        return Snapshot(live.backend, Candidates(filtered.index, np.abs(values)), values, leaving=filtered.index)

    def agree(self, exchange: Exchange, backend: Backend, notice: Notice, view: View) -> Agreed:
        """Tell each other how many each sends; collective."""
        found = view.found
        loads = share_counts(exchange, notice, np.array([len(found.index)], dtype=np.int64), self.n)[:, 0]
        return Agreed(found, 0.0, loads, self.regions, union=found.index, own=True)

    def united(self, agreed: Agreed, union: Ints) -> Agreed:
        """There is nothing to unite."""
        return agreed


class GranularSelection:
    """Filter, policy and regions, from step to step. one_server: rank 0 makes all sums.

    step: deliveries learnt from; begun: steps begun.
    """

    def __init__(self, filter_: Filter, policy: Policy, n: int, size: int, *, one_server: bool) -> None:
        self.filter = filter_
        self.policy = policy
        self.n = n
        self.size = size
        self.one_server = one_server
        self.step = self.begun = 0
        self.picked = SentAhead(NONE.index, NONE.magnitude, NOTHING)
        self.regions = self._first_regions()

    def _first_regions(self) -> list[Region]:
        """Who sums what before anything is known of where it lies: all ranks alike, or rank 0 everything."""
        return cut_at([self.n] * (self.size - 1), self.n) if self.one_server else even_regions(self.n, self.size)

    def plan(self, k: int) -> GranularPlan:
        """The coming step."""
        share, step = self.policy.share(self.begun), self.begun
        self.begun += 1
        return GranularPlan(self.filter, share, k, step, self.n, self.regions, self._note)

    def _note(self, picked: SentAhead) -> None:
        self.picked = picked

    def learn(self, agreed: Agreed, outcome: Outcome) -> None:
        """Balance the regions by what was sent, and let the policy learn."""
        if not self.one_server:
            self.regions = shared_out(outcome.index, self.n, self.size)
        loss, confidence, seconds = outcome.figures
        known = [None if math.isnan(x) else x for x in (loss, confidence)]
        step, self.step = self.step, self.step + 1
        self.policy.learn(Seen(step, known[0], known[1], outcome.nbytes, seconds))

    def state(self) -> State:
        """What the next step depends on."""
        return {"step": self.begun, "borders": [region.lo for region in self.regions], "policy": self.policy.state()}

    def check(self, state: State) -> None:
        """Raise ConfigurationError unless load() could take the state."""
        if int(state["step"]) < len(state.get("flight", ())):
            raise ConfigurationError("the state has more deliveries in flight than steps")
        borders = [int(lo) for lo in state["borders"]]
        if borders != sorted(borders) or (borders and not 0 <= borders[0] <= borders[-1] <= self.n):
            raise ConfigurationError(f"the borders in the state do not cut {self.n} elements")
        self.policy.check(state["policy"])

    def load(self, state: State) -> None:
        """Take what state() gave."""
        self.begun = int(state["step"])
        self.step = self.begun - len(state.get("flight", ()))
        self.policy.load(state["policy"])
        borders = [int(lo) for lo in state["borders"]]
        self.regions = cut_at(borders[1:], self.n) if len(borders) == self.size else self._first_regions()

    def resize(self, states: Sequence[State]) -> State:
        """All ranks have the same state; other numbers of ranks begin with even regions."""
        return {key: states[0][key] for key in self.state()}

    def packed(self, agreed: Agreed) -> State:
        """An agreement in flight as plain values."""
        return pack_agreed(agreed)

    def unpacked(self, state: State) -> Agreed:
        """What packed() was given."""
        return unpack_agreed(state, own=True)
