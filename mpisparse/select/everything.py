"""Select everything: in every step the whole vector, or a part of it that all ranks know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from mpisparse.arrays import Floats, Ints, State
from mpisparse.comm.agreement import FINE, Notice
from mpisparse.comm.regions import Subset, index_on
from mpisparse.select.candidates import NONE
from mpisparse.select.plans import Agreed, Outcome
from mpisparse.select.search import share_counts
from mpisparse.select.view import Live, View

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.exchange import Exchange

NO_VALUES: Floats = np.empty(0, dtype=np.float32)


def everything(n: int, part: Subset | None = None) -> Agreed:
    """The agreement to send all elements, or all of a part; no rank selects."""
    nobody = np.zeros(1, dtype=np.int64)
    if part is None:
        return Agreed(NONE, 0.0, nobody, [], union=range(n))
    return Agreed(NONE, 0.0, nobody, [], union=part, k=len(part))


@dataclass(frozen=True)
class PartValues:
    """A part of a vector as a vector of its own, which is read slice by slice."""

    vector: Any
    part: Subset

    def __getitem__(self, at: Any) -> Floats:
        start, stop, _ = at.indices(len(self.part))
        values: Floats = self.vector.at(index_on(self.vector.backend, self.part, start, stop))
        return values

    def copy(self) -> Floats:
        """All values."""
        return self[0 : len(self.part)]


class EverythingPlan(NamedTuple):
    """One step that sends everything, or all of a part; `own` in flight."""

    n: int
    part: Subset | None = None
    own: bool = False
    looks: bool = True
    scope: tuple[int, int] = (0, 0)  # no candidates are collected in the pass
    floor: float = 0.0

    def look(self, live: Live, notice: Notice) -> View:
        """The scorer's keys, of the whole vector or the part; a copy in flight."""
        values: Any = live.keys.vector if self.part is None else PartValues(live.keys.vector, self.part)
        if self.own:
            if notice.status != FINE:  # the step is refused before anything is read
                return live._replace(take=lambda _: NO_VALUES)
            values = values.copy() if hasattr(values, "copy") else values
            if hasattr(live.backend, "copied"):  # a device copies in stream order; the reader waits for it
                arrived = live.backend.copied(values)
                return live._replace(take=lambda _: arrived())
        return live._replace(take=lambda _: values)

    def agree(self, exchange: Exchange, backend: Backend, notice: Notice, view: View) -> Agreed:
        """Agree that all values are finite; collective."""
        share_counts(exchange, notice, NONE.index, self.n)
        return everything(self.n, self.part)

    def united(self, agreed: Agreed, union: Ints) -> Agreed:
        """Nothing to unite."""
        return agreed


class Everything:
    """Plans each step's sending of the whole vector. late: deliver gets a copy of it."""

    added: ClassVar[State] = {}

    def __init__(self, n: int, *, late: bool = False) -> None:
        self.n = n
        self.late = late
        self.step = 0

    def plan(self, k: int) -> EverythingPlan:
        """The coming step."""
        return EverythingPlan(self.n, own=self.late)

    def learn(self, agreed: Agreed, outcome: Outcome) -> None:
        """Go on to the next step."""
        self.step += 1

    def state(self) -> State:
        """What the next step depends on."""
        return {"step": self.step}

    def check(self, state: State) -> None:
        """Raise unless load() could take the state."""
        int(state["step"])

    def load(self, state: State) -> None:
        """Load a state that state() returned."""
        self.step = int(state["step"])

    def resize(self, states: Sequence[State]) -> State:
        """All ranks have done the same steps."""
        return {"step": states[0]["step"]}

    def packed(self, agreed: Agreed) -> State:
        """An agreement in flight as plain values; here it is empty."""
        return {}

    def unpacked(self, state: State) -> Agreed:
        """The agreement that packed() packed."""
        return everything(self.n)
