"""Select a different part of the vector in each step, so that all of it is sent every few steps."""

from __future__ import annotations

from dataclasses import dataclass

from mpisparse.arrays import State
from mpisparse.comm.regions import Part
from mpisparse.select.everything import Everything, EverythingPlan, everything
from mpisparse.select.plans import Agreed


@dataclass(frozen=True)
class Pace:
    """How many steps it takes to send everything, by step: pairs (first step, every), ascending, starting at step 0."""

    changes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, every: object) -> Pace:
        """Parse a number, or a text such as "5, 200:40": every 5, and from step 200 on every 40. Raises ValueError."""
        if isinstance(every, bool) or not isinstance(every, int | str):
            raise ValueError(f"got {every!r}")
        first, *later = str(every).split(",")
        pairs = [(0, int(first)), *((int(start), int(count)) for start, count in (text.split(":") for text in later))]
        starts = [start for start, _ in pairs]
        if sorted(set(starts)) != starts or min(count for _, count in pairs) < 1:
            raise ValueError(f"got {every!r}")
        return cls(tuple(pairs))

    def at(self, step: int) -> tuple[int, int]:
        """The period at a step, and how many steps with this period came before."""
        start, every = [change for change in self.changes if change[0] <= step][-1]
        return every, step - start


class Rotating(Everything):
    """Plans steps that each send every n-th block, n being the pace. late: deliver gets a copy of the values."""

    def __init__(self, n: int, pace: Pace, *, late: bool = False) -> None:
        super().__init__(n, late=late)
        self.pace = pace

    def plan(self, k: int) -> EverythingPlan:
        """The coming step."""
        every, done = self.pace.at(self.step)
        return EverythingPlan(self.n, Part(self.n, every, done % every), own=self.late)

    def packed(self, agreed: Agreed) -> State:
        """An agreement in flight as plain values."""
        return {"every": agreed.union.every, "phase": agreed.union.phase}

    def unpacked(self, state: State) -> Agreed:
        """The agreement that packed() packed."""
        every, phase = int(state["every"]), int(state["phase"])
        if not 0 <= phase < every:
            raise ValueError(f"there is no part {phase} of {every}")
        return everything(self.n, Part(self.n, every, phase))
