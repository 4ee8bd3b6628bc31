"""Where a rank may choose: exclusive partitions, rotated over ranks and re-balanced by what was selected in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpisparse import partition
from mpisparse.threshold import CONTROLLERS, Controller

Ints = NDArray[np.int64]

PARTITIONERS = ("best", "paper")


@dataclass(frozen=True)
class Region:
    """Elements [lo, hi) of the flat vector, exclusive to one rank in this step."""

    rank: int
    lo: int
    hi: int


class ExclusiveSelector:
    """Partitions and threshold of one run; equal on all ranks, because it sees only what all ranks saw."""

    SMOOTHING = 2  # work moves by 2^-2 of the difference at each step

    def __init__(self, n: int, size: int, *, controller: str, partitioner: str, blocks: int | None, longest: int | None):
        self.size = size
        self.partitioner = partitioner
        self.longest = longest
        if partitioner == "paper":
            self.blocks = blocks or partition.PAPER_BLOCKS
            self.edges = partition.paper_edges(n, self.blocks)
        else:
            self.blocks = blocks or partition.default_blocks(size)
            self.edges = partition.even_edges(n, self.blocks)
        self.borders = partition.even_borders(len(self.edges) - 1, size)
        self.work: Ints = np.zeros(len(self.edges) - 1, dtype=np.int64)
        self.controller: Controller = CONTROLLERS[controller]()
        self.step = 0

    def regions(self) -> list[Region]:
        """The regions of this step in ascending order."""
        bounds = self.edges[self.borders].tolist()
        return [Region(partition.owner(p, self.step, self.size), bounds[p], bounds[p + 1]) for p in range(self.size)]

    def adapt(self, union: Ints, controller: Controller) -> None:
        """Re-balance by the indices that all ranks selected, and go on to the next step."""
        self.controller = controller
        counts = partition.block_counts(union, self.edges)
        if self.partitioner == "paper":
            loads = np.add.reduceat(np.append(counts, 0), self.borders[:-1]) * (np.diff(self.borders) > 0)
            self.borders = partition.paper_borders(self.borders, loads, self.edges, self.blocks)
        elif self.size > 1:
            self._smooth(counts)
            self.borders = partition.best_borders(self.work, self.edges, self.size, self.longest)
        self.step += 1

    def _smooth(self, counts: Ints) -> None:
        """Average the work over recent steps in fixed point: the same integers on any machine."""
        scaled = counts << 8
        if self.step == 0:
            self.work = scaled
        else:
            self.work = self.work + ((scaled - self.work) >> self.SMOOTHING)

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        controller = {f"controller.{key}": value for key, value in self.controller.state().items()}
        return {"step": self.step, "borders": self.borders.copy(), "work": self.work.copy(), **controller}

    def load(self, state: dict[str, Any]) -> None:
        """Take what state() gave."""
        self.step = int(state["step"])
        self.borders = np.array(state["borders"], dtype=np.int64)
        self.work = np.array(state["work"], dtype=np.int64)
        fields = {key.removeprefix("controller."): value for key, value in state.items() if key.startswith("controller.")}
        known = self.controller.state()
        self.controller = type(self.controller)(**{key: type(known[key])(fields[key]) for key in known})
