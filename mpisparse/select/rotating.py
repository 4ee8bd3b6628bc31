"""Select a different part of the vector in each step, so that all of it is sent in every so many steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpisparse.arrays import Floats, Ints, State
from mpisparse.comm.agreement import FINE, Notice
from mpisparse.comm.regions import Part, Subset
from mpisparse.select.candidates import NONE
from mpisparse.select.everything import NO_VALUES, Everything
from mpisparse.select.plans import Agreed
from mpisparse.select.search import share_counts
from mpisparse.select.view import Live, View

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.exchange import Exchange


@dataclass(frozen=True)
class Pace:
    """In how many steps everything is sent, from which step on: (first step, every), ascending, the first from step 0."""

    changes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, every: object) -> Pace:
        """Read a number, or a text such as "5, 200:40": every 5, and from step 200 on every 40. Raises ValueError."""
        if isinstance(every, bool) or not isinstance(every, int | str):
            raise ValueError(f"got {every!r}")
        first, *later = str(every).split(",")
        pairs = [(0, int(first)), *((int(start), int(count)) for start, count in (text.split(":") for text in later))]
        starts = [start for start, _ in pairs]
        if sorted(set(starts)) != starts or min(count for _, count in pairs) < 1:
            raise ValueError(f"got {every!r}")
        return cls(tuple(pairs))

    def at(self, step: int) -> tuple[int, int]:
        """How many steps it takes at a step, and how many such steps there were before."""
        start, every = [change for change in self.changes if change[0] <= step][-1]
        return every, step - start


@dataclass(frozen=True)
class PartValues:
    """A part of a vector as a vector of its own, which is read slice by slice."""

    vector: Any
    part: Subset

    def __getitem__(self, at: Any) -> Floats:
        start, stop, _ = at.indices(len(self.part))
        values: Floats = self.vector.at(self.part.index(start, stop))
        return values

    def copy(self) -> Floats:
        """All values."""
        return self[0 : len(self.part)]


class RotatingPlan(NamedTuple):
    """One step in which a part is sent; `own` in flight."""

    part: Part
    own: bool = False
    looks: bool = True
    scope: tuple[int, int] = (0, 0)  # no candidates are collected in the pass
    floor: float = 0.0

    def look(self, live: Live, notice: Notice) -> View:
        """The part's values; a copy in flight."""
        values: Any = PartValues(live.keys.vector, self.part)
        if self.own:
            values = values.copy() if notice.status == FINE else NO_VALUES  # which is refused before it is read
        return live._replace(take=lambda _: values)

    def agree(self, exchange: Exchange, backend: Backend, notice: Notice, view: View) -> Agreed:
        """Agree that all values are finite; collective."""
        share_counts(exchange, notice, NONE.index, self.part.n)
        return _agreement(self.part)

    def united(self, agreed: Agreed, union: Ints) -> Agreed:
        """There is nothing to unite."""
        return agreed


class Rotating(Everything):
    """Every so-many-th block, from step to step. late: deliver gets a copy of their values."""

    def __init__(self, n: int, pace: Pace, *, late: bool = False) -> None:
        super().__init__(n, late=late)
        self.pace = pace

    def plan(self, k: int) -> RotatingPlan:  # type: ignore[override]  # another kind of plan
        """The coming step."""
        every, done = self.pace.at(self.step)
        return RotatingPlan(Part(self.n, every, done % every), own=self.late)

    def packed(self, agreed: Agreed) -> State:
        """An agreement in flight as plain values."""
        return {"every": agreed.union.every, "phase": agreed.union.phase}

    def unpacked(self, state: State) -> Agreed:
        """What packed() was given."""
        every, phase = int(state["every"]), int(state["phase"])
        if not 0 <= phase < every:
            raise ValueError(f"there is no part {phase} of {every}")
        return _agreement(Part(self.n, every, phase))


def _agreement(part: Part) -> Agreed:
    return Agreed(NONE, 0.0, np.zeros(1, dtype=np.int64), [], union=part, k=len(part))
