"""Where a rank may choose: exclusive partitions, rotated over ranks and re-balanced by what is selected in them.

What a rank selects depends on its own batch, so last step's counts foretell this step's balance badly (on four ranks
the busiest was half as busy again as the mean). Where the pass covers the whole vector anyway, the counts of this step
decide instead: `in_step`. Each rank then collects candidates everywhere, and the borders are drawn when all ranks'
block counts, or for many ranks their sum, are known. Elsewhere the borders follow a moving average of past counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpisparse.arrays import Ints
from mpisparse.backends import host_arrays
from mpisparse.core.records import Region
from mpisparse.errors import ConfigurationError
from mpisparse.select import partition
from mpisparse.select.threshold import CONTROLLERS, Controller

PARTITIONERS = ("best", "paper", "static")
FRACTION = 8  # bits behind the point of the moving average
SMOOTHING = 2  # it moves by 2^-2 of the difference at each step
SWEEP = 64  # every so many steps partitions are held ones, so that each rank selects everywhere in turn
DUE = 16  # every so many steps scores give way to magnitude
ROTATION = 16  # up to so many ranks, borders that are not drawn in the step stay for a whole rotation
READS_PER_SELECTED = 128  # elements that one can read in the time that handling a selected one takes


class ExclusiveSelector:
    """Partitions and threshold of one run; equal on all ranks, because it sees only what all ranks saw.

    `reads_region`: a rank selects by reading its own region only, so that a region's length costs too. `prior` is how much
    scores are expected to grow after the first step, as a logarithm.
    """

    def __init__(
        self, n: int, size: int, *, controller: str, partitioner: str, blocks: int | None, reads_region: bool, prior: float
    ) -> None:
        self.size = size
        self.partitioner = partitioner
        self.reads_region = reads_region
        self.draws = partitioner == "best" and not reads_region and size > 1
        if partitioner == "paper":
            self.blocks = blocks or partition.PAPER_BLOCKS
            self.edges = partition.paper_edges(n, self.blocks)
        else:
            self.blocks = blocks or partition.default_blocks(size)
            self.edges = partition.even_edges(n, self.blocks)
        self.borders = partition.even_borders(len(self.edges) - 1, size)
        self.work: Ints = np.zeros(len(self.edges) - 1, dtype=np.int64)
        self.controller: Controller = CONTROLLERS[controller](prior=prior)
        self.step = 0
        self.backend: Any = host_arrays  # of the indices that adapt() is given

    @property
    def is_due(self) -> bool:
        """Tell whether it is time to look after elements whose scores would let them wait for ever."""
        return self.partitioner == "best" and self.step % DUE == DUE - 1

    @property
    def sweeps(self) -> bool:
        """Tell whether this step's partitions are those that are held while each rank selects in each of them once.

        Balanced borders depend on what ranks have, and may keep a rank away from elements that no other has for ever.
        Borders that stay for a whole rotation cannot.
        """
        due = self.partitioner == "best" and self.step % SWEEP == SWEEP - 1
        return due and self.size > 1 and not self.stays

    @property
    def stays(self) -> bool:
        """Tell whether borders stay the same while partitions go once around the ranks."""
        return self.partitioner == "best" and not self.draws and self.size <= ROTATION

    @property
    def in_step(self) -> bool:
        """Tell whether this step's borders are drawn in it."""
        return self.draws and not self.sweeps

    @property
    def turn(self) -> int:
        """How far the partitions have rotated over ranks; those of sweeps among themselves."""
        return self.step // SWEEP if self.sweeps else self.step

    def regions(self) -> list[Region]:
        """The regions of this step in ascending order."""
        bounds = self.edges[self.borders].tolist()
        return [Region(partition.owner(p, self.turn, self.size), bounds[p], bounds[p + 1]) for p in range(self.size)]

    def scope(self, rank: int) -> tuple[int, int]:
        """Where a rank collects candidates: everywhere if borders are still to be drawn, else in its own region."""
        if self.in_step:
            return 0, int(self.edges[-1])
        mine = partition.partition_of(rank, self.turn, self.size)
        lo, hi = self.edges[self.borders[mine : mine + 2]].tolist()
        return lo, hi

    def draw(self, counts: Sequence[Ints], able: Ints, loads: Ints | None = None) -> None:
        """Set this step's borders by every rank's block counts (in rank order); only able ranks get a part.

        Where the counts are only what all have together, `loads` are what each would select everywhere.
        """
        owners = [partition.owner(p, self.turn, self.size) for p in range(self.size)]
        chosen = np.isin(owners, able)
        sharing = [owner for owner, takes_part in zip(owners, chosen, strict=True) if takes_part]
        weights = None if loads is None else [int(loads[owner]) for owner in sharing]
        borders = partition.best_borders([counts[owner] for owner in sharing], self.edges, weights=weights)
        self.borders = borders[np.cumsum([0, *chosen])]

    def adapt(self, union: Ints, controller: Controller) -> None:
        """Go on to the next step, with borders by the indices that all ranks selected unless they are drawn in it."""
        self.controller = controller
        if self.partitioner == "paper":
            loads = partition.block_counts(union, self.edges[self.borders], self.backend.search)
            self.borders = partition.paper_borders(self.borders, loads, self.edges, self.blocks)
        elif self.partitioner == "best" and self.size > 1 and not self.draws:
            self._smooth(partition.block_counts(union, self.edges, self.backend.search))
        self.step += 1
        if self.partitioner == "best" and self.size > 1:
            self._prepare(union)

    def _prepare(self, union: Ints) -> None:
        """Set the coming step's borders; where they are drawn in it, its blocks."""
        n = int(self.edges[-1])
        if self.sweeps:
            self.edges = partition.even_edges(n, self.blocks)
            self.borders = self._held(union) if self.draws else partition.even_borders(len(self.edges) - 1, self.size)
        elif self.draws:
            self.edges = partition.worked_edges(n, self.blocks, union, self.backend.pick)
            self.borders = partition.even_borders(len(self.edges) - 1, self.size)
        elif not self.stays or self.step % self.size == 0:
            self.borders = self._balanced()

    def _held(self, union: Ints) -> Ints:
        """Borders that balance what was selected last, and stay until sweeps have gone once around the ranks."""
        if self.turn % self.size == 0:
            self.work = partition.block_counts(union, self.edges, self.backend.search) << FRACTION
        return partition.best_borders([self._cost()] * self.size, self.edges)

    def _smooth(self, counts: Ints) -> None:
        """Average the work over recent steps in fixed point: the same integers on any machine."""
        scaled = counts << FRACTION
        self.work = scaled if self.step == 0 else self.work + ((scaled - self.work) >> SMOOTHING)

    def _balanced(self) -> Ints:
        """The best borders by the averaged work of selecting, and of reading."""
        longest = -(-2 * int(self.edges[-1]) // self.size)
        return partition.best_borders([self._cost()] * self.size, self.edges, longest)

    def _cost(self) -> Ints:
        """What selecting in every block costs, and reading it."""
        return self.work * READS_PER_SELECTED + (np.diff(self.edges) << FRACTION)

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        controller = {f"controller.{key}": value for key, value in self.controller.state().items()}
        return {"step": self.step, "edges": self.edges, "borders": self.borders, "work": self.work, **controller}

    def check(self, state: dict[str, Any]) -> None:
        """Raise ConfigurationError unless edges and borders in a state cut this vector."""
        known = self.controller.state()
        for key, value in known.items():
            if not math.isfinite(type(value)(state[f"controller.{key}"])):
                raise ConfigurationError(f"the controller's {key} in the state is {state[f'controller.{key}']!r}")
        int(state["step"])
        self._try_controller({key: type(value)(state[f"controller.{key}"]) for key, value in known.items()})
        edges, borders = np.asarray(state["edges"]), np.asarray(state["borders"])
        n = int(self.edges[-1])
        if len(edges) < 2 or edges[0] != 0 or edges[-1] != n or (np.diff(edges) < 0).any():
            raise ConfigurationError(f"the edges in the state do not cut {n} elements into blocks")
        if len(borders) < 2 or borders[0] != 0 or borders[-1] != len(edges) - 1 or (np.diff(borders) < 0).any():
            raise ConfigurationError(f"the borders in the state do not share out {len(edges) - 1} blocks")
        work = np.asarray(state["work"])
        blocks = len(self.work) if self.draws else len(edges) - 1
        taken = len(borders) == self.size + 1
        if taken and (work.shape != (blocks,) or (work < 0).any() or (work > n << FRACTION).any()):
            raise ConfigurationError(f"the work in the state is not that of {blocks} blocks")

    def _try_controller(self, fields: dict[str, Any]) -> None:
        """Raise ConfigurationError unless a controller with these numbers finds thresholds for any number of elements."""
        try:
            tried = type(self.controller)(**fields)
            with np.errstate(all="ignore"):
                ladders = [tried.ladder(k) for k in (1, int(self.edges[-1]))]
        except (ArithmeticError, ValueError) as error:
            raise ConfigurationError(f"the controller in the state cannot go on: {error}") from error
        if fields["threshold"] < 0.0 or not all(np.isfinite(rungs).all() for rungs in ladders):
            raise ConfigurationError(f"the controller in the state leads to no threshold: {fields}")

    def load(self, state: dict[str, Any]) -> None:
        """Take what state() gave, also on another number of ranks."""
        self.step = int(state["step"])
        known = self.controller.state()
        fields = {key: type(value)(state[f"controller.{key}"]) for key, value in known.items()}
        self.controller = type(self.controller)(**fields)
        if len(state["borders"]) != self.size + 1:  # saved on another number of ranks: begin with even shares
            return
        self.edges = np.array(state["edges"], dtype=np.int64)
        self.borders = np.array(state["borders"], dtype=np.int64)
        self.work = np.array(state["work"], dtype=np.int64)
