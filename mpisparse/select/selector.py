"""Where a rank may select: exclusive partitions, rotated over ranks and re-balanced by what is selected in them.

What a rank selects depends on its own batch, so the counts of the last step predict the balance of this one badly (on four
ranks the busiest selected half as much again as the mean). If the pass covers the whole vector anyway, the counts of this
step decide instead: `in_step`. Every rank then collects candidates in the whole vector, and the borders are drawn once all
ranks' block counts are known, or their sum if there are many ranks. Otherwise the borders follow a moving average of past
counts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from mpisparse.arrays import Ints
from mpisparse.comm.regions import Region
from mpisparse.errors import ConfigurationError
from mpisparse.select import partition
from mpisparse.select.threshold import CONTROLLERS, Controller

PARTITIONERS = ("best", "paper", "static")
FRACTION = 8  # fractional bits of the moving average
SMOOTHING = 2  # the average moves by 2^-2 of the difference in each step
SWEEP = 64  # period in steps of sweeps, in which partitions are held so that each rank selects everywhere in turn
DUE = 16  # period in steps of selecting by magnitude instead of scores
ROTATION = 16  # up to this many ranks, borders that are not drawn in the step stay for a whole rotation
BALANCED, STAYS = 0.1, 0.15  # imbalance, beyond what chance explains, up to which borders fit; STAYS: up to which they stay
LEAST_CALM, MOST_CALM = 2, 64  # how many steps borders must fit before they stay; grows each time that was wrong
READS_PER_SELECTED = 128  # elements read in the time that it takes to handle one selected element

SearchSorted = Callable[[Any, Ints], Ints]


@dataclass(frozen=True, eq=False)
class ExclusiveSelector:
    """Partitions and threshold of one step; equal on all ranks, because they depend only on what all ranks know.

    `reads_region`: a rank reads only its own region, so the length of a region costs time, too. `calm`: consecutive steps
    that the previous step's borders balanced; judged() adds this one. `needed`: how many such steps it takes for borders
    to stay.
    """

    size: int
    partitioner: str
    reads_region: bool
    blocks: int
    edges: Ints
    borders: Ints
    work: Ints
    controller: Controller
    step: int = 0
    calm: int = 0
    needed: int = LEAST_CALM
    n: int = field(init=False)  # the length of the vector
    draws: bool = field(init=False)  # borders are drawn in the step, sweeps aside
    is_due: bool = field(init=False)  # this step selects by magnitude, so that low scores let no element wait for ever
    keeps: bool = field(init=False)  # the borders of the last step stay, although they could be drawn anew
    in_step: bool = field(init=False)  # the borders of this step are drawn in it
    cut: list[Region] = field(init=False)  # the regions of this step in ascending order
    region_of: dict[int, tuple[int, int]] = field(init=False)  # by rank

    def __post_init__(self) -> None:
        best, keep = self.partitioner == "best", functools.partial(object.__setattr__, self)
        keep("n", int(self.edges[-1]))
        keep("draws", best and not self.reads_region and self.size > 1)
        keep("is_due", best and self.step % DUE == DUE - 1)
        keep("keeps", self.draws and self.calm >= self.needed)
        keep("in_step", self.draws and not self.sweeps and not self.keeps)
        bounds, turn, size = self.edges[self.borders].tolist(), self.turn, self.size
        keep("cut", [Region((p - turn) % size, bounds[p], bounds[p + 1]) for p in range(size)])
        keep("region_of", {rank: (lo, hi) for rank, lo, hi in self.cut})

    @classmethod
    def first(
        cls, n: int, size: int, *, controller: str, partitioner: str, blocks: int | None, reads_region: bool, prior: float
    ) -> ExclusiveSelector:
        """The selector of the first step. `prior`: the logarithm of how much keys are expected to grow after it."""
        if partitioner == "paper":
            count = blocks or partition.PAPER_BLOCKS
            edges = partition.paper_edges(n, count)
        else:
            count = blocks or partition.default_blocks(size)
            edges = partition.even_edges(n, count)
        return cls(
            size=size,
            partitioner=partitioner,
            reads_region=reads_region,
            blocks=count,
            edges=edges,
            borders=partition.even_borders(len(edges) - 1, size),
            work=np.zeros(len(edges) - 1, dtype=np.int64),
            controller=CONTROLLERS[controller](prior=prior),
        )

    @property
    def sweeps(self) -> bool:
        """Whether this step's partitions are held until each rank has selected in each of them once.

        Balanced borders depend on the ranks' values, and may for ever keep a rank away from elements that no other rank has.
        Borders that stay for a whole rotation cannot.
        """
        due = self.partitioner == "best" and self.step % SWEEP == SWEEP - 1
        return due and self.size > 1 and not self.stays

    @property
    def stays(self) -> bool:
        """Whether borders stay the same while partitions go once around the ranks."""
        return self.partitioner == "best" and not self.draws and self.size <= ROTATION

    @property
    def turn(self) -> int:
        """How far the partitions have rotated over ranks; partitions of sweeps have a rotation of their own."""
        return self.step // SWEEP if self.sweeps else self.step

    def regions(self) -> list[Region]:
        """The regions of this step in ascending order."""
        return self.cut

    def scope(self, rank: int) -> tuple[int, int]:
        """Where a rank collects candidates: everywhere if borders are still to be drawn, else in its own region."""
        return (0, self.n) if self.in_step else self.region_of[rank]

    def drawn(
        self, counts: Sequence[Ints], able: Ints, least: partition.LeastBorders, loads: Ints | None = None
    ) -> ExclusiveSelector:
        """This step with borders from every rank's block counts (in rank order); only able ranks get a partition.

        If the counts are only the sum over ranks, `loads` are what each rank would select in the whole vector.
        """
        owners, chosen = [partition.owner(p, self.turn, self.size) for p in range(self.size)], set(able.tolist())
        sharing = [owner for owner in owners if owner in chosen]
        weights = None if loads is None else [int(loads[owner]) for owner in sharing]
        borders = partition.best_borders([counts[owner] for owner in sharing], self.edges, weights=weights, least=least)
        if len(sharing) < self.size:  # the others get an empty partition each
            borders = borders[np.cumsum([0, *(owner in chosen for owner in owners)])]
        return replace(self, borders=borders)

    def loads(self, counts: Sequence[Ints]) -> Ints:
        """What each rank selects within the borders, from every rank's block counts; in rank order."""
        ends = dict(zip((r.rank for r in self.cut), pairwise(self.borders.tolist()), strict=True))
        return np.array([int(row[slice(*ends[rank])].sum()) for rank, row in enumerate(counts)])

    def judged(self, loads: Ints) -> ExclusiveSelector:
        """This step, updated by how well its loads are balanced within the last step's borders.

        If borders that stayed turn out unbalanced, the next ones must fit for twice as many steps before they stay.
        """
        total = int(loads.sum())
        chance = math.sqrt(self.size / total) if total else math.inf  # a count's deviation is about its square root
        bound = STAYS + 2 * chance if self.keeps else BALANCED + chance
        fits = bool(total > 0 and partition.imbalance(loads) <= bound)
        if not self.keeps:
            return replace(self, calm=self.calm + 1 if fits else 0)
        needed = max(LEAST_CALM, self.needed - 1) if fits else min(MOST_CALM, 2 * self.needed)
        return replace(self, calm=self.needed if fits else 0, needed=needed)

    def after(self, union: Ints, controller: Controller, search: SearchSorted, pick: SearchSorted) -> ExclusiveSelector:
        """The selector of the next step, by what all ranks selected; `search` and `pick` are the backend's."""
        borders, work = self.borders, self.work
        if self.partitioner == "paper":
            loads = partition.block_counts(union, self.edges[self.borders], search)
            borders = partition.paper_borders(self.borders, loads, self.edges, self.blocks)
        elif self.partitioner == "best" and self.size > 1 and not self.draws:
            work = self._smoothed(partition.block_counts(union, self.edges, search))
        coming = replace(self, controller=controller, borders=borders, work=work, step=self.step + 1)
        return coming._prepared(union, search, pick) if self.partitioner == "best" and self.size > 1 else coming

    def _prepared(self, union: Ints, search: SearchSorted, pick: SearchSorted) -> ExclusiveSelector:
        """This step with its borders or, if they are drawn in the step, its blocks."""
        n = self.n
        if self.sweeps:
            edges = partition.even_edges(n, self.blocks)
            borders = partition.even_borders(len(edges) - 1, self.size)
            even = replace(self, edges=edges, borders=borders, calm=0)
            return even._held(union, search) if self.draws else even
        if self.draws and self.keeps:
            return self
        if self.draws:
            blocks, bounds = partition.enough_blocks(self.blocks, self.size, len(union)), self.edges[self.borders]
            edges = partition.worked_edges(n, blocks, union, bounds, pick)
            return replace(self, edges=edges, borders=np.searchsorted(edges, bounds))
        if not self.stays or self.step % self.size == 0:
            longest = -(-2 * n // self.size)
            return replace(self, borders=partition.best_borders([self._cost()] * self.size, self.edges, longest))
        return self

    def _held(self, union: Ints, search: SearchSorted) -> ExclusiveSelector:
        """Borders that balance the last selection, and stay until sweeps have gone once around the ranks."""
        work = self.work
        if self.turn % self.size == 0:
            work = partition.block_counts(union, self.edges, search) << FRACTION
        held = replace(self, work=work)
        return replace(held, borders=partition.best_borders([held._cost()] * self.size, self.edges))

    def _smoothed(self, counts: Ints) -> Ints:
        """Average the work over recent steps in fixed point: the same integers on any machine."""
        scaled = counts << FRACTION
        return scaled if self.step == 0 else self.work + ((scaled - self.work) >> SMOOTHING)

    def _cost(self) -> Ints:
        """The cost of reading every block and of selecting in it."""
        return self.work * READS_PER_SELECTED + (np.diff(self.edges) << FRACTION)

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        controller = {f"controller.{key}": value for key, value in self.controller.state().items()}
        cut = {"edges": self.edges, "borders": self.borders, "work": self.work, "calm": self.calm, "needed": self.needed}
        return {"step": self.step, **cut, **controller}

    def check(self, state: dict[str, Any]) -> None:
        """Raise ConfigurationError unless edges and borders in a state cut this vector."""
        known = self.controller.state()
        for key, value in known.items():
            if not math.isfinite(type(value)(state[f"controller.{key}"])):
                raise ConfigurationError(f"the controller's {key} in the state is {state[f'controller.{key}']!r}")
        int(state["step"])
        calm, needed = _fitted(state)
        if not (calm >= 0 and LEAST_CALM <= needed <= MOST_CALM):
            raise ConfigurationError(f"the steps in the state for which borders fitted are {calm} of {needed}")
        self._try_controller({key: type(value)(state[f"controller.{key}"]) for key, value in known.items()})
        edges, borders = np.asarray(state["edges"]), np.asarray(state["borders"])
        n = self.n
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
        """Raise ConfigurationError unless a controller with these values finds a threshold for any number of elements."""
        try:
            tried = type(self.controller)(**fields)
            with np.errstate(all="ignore"):
                ladders = [tried.ladder(k) for k in (1, self.n)]
        except (ArithmeticError, ValueError) as error:
            raise ConfigurationError(f"the controller in the state cannot go on: {error}") from error
        if fields["threshold"] < 0.0 or not all(np.isfinite(rungs).all() for rungs in ladders):
            raise ConfigurationError(f"the controller in the state leads to no threshold: {fields}")

    def loaded(self, state: dict[str, Any]) -> ExclusiveSelector:
        """The selector that a state describes; on another number of ranks it starts with even partitions."""
        known = self.controller.state()
        fields = {key: type(value)(state[f"controller.{key}"]) for key, value in known.items()}
        taken = replace(self, step=int(state["step"]), controller=type(self.controller)(**fields), calm=0)
        if len(state["borders"]) != self.size + 1:
            return taken
        edges, borders, work = (np.array(state[key], dtype=np.int64) for key in ("edges", "borders", "work"))
        calm, needed = _fitted(state)
        return replace(taken, edges=edges, borders=borders, work=work, calm=calm, needed=needed)


def _fitted(state: dict[str, Any]) -> tuple[int, int]:
    """For how many steps borders fitted, and for how many they must; states of earlier versions lack both."""
    return int(state.get("calm", 0)), int(state.get("needed", LEAST_CALM))
