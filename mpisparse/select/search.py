"""The search for the threshold that gives k over all ranks. All ranks take the same decisions, on the same integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from mpisparse.arrays import Ints
from mpisparse.backends.numpy_tallies import least_borders
from mpisparse.comm.agreement import Notice, refuse
from mpisparse.comm.regions import Region
from mpisparse.select import tallies
from mpisparse.select.able import able_ranks, harmonic
from mpisparse.select.candidates import Candidates, certain, count_ties, drop_ties, merge
from mpisparse.select.ladders import Ladder, share_ladder
from mpisparse.select.partition import LeastBorders
from mpisparse.select.threshold import Controller, Rungs, bin_of

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.exchange import Exchange
    from mpisparse.select.selector import ExclusiveSelector
    from mpisparse.select.view import View

Scope = TypeVar("Scope")
Collected = TypeVar("Collected")

GATHERED_RANKS = 16  # up to this many ranks, counts are gathered per rank; beyond, summed
LADDER, LEAST, MOST_REACH = 2, 16, 8  # room in a ladder's message: LADDER times the likely count, plus LEAST
HISTOGRAM = 2  # in the whole vector, a histogram counts up to this multiple of the wanted count
BINS = 2048


@dataclass(frozen=True)
class Settled(Generic[Collected]):
    """A threshold that all ranks know: its rung, the counts at every rung, and how it was found."""

    found: Collected
    rungs: Rungs
    rung: int
    total: Ints
    workloads: Ints
    reselected: int = 0
    refined: int = 0

    @property
    def threshold(self) -> float:
        return float(self.rungs[self.rung])


class Search(Generic[Scope, Collected]):
    """The search for the rung that gives k over all ranks; subclasses define how ranks count and select.

    A scope is where candidates are collected. A subclass is one rank among others, or all ranks in one process. able: the
    ranks that get a partition if borders are drawn in the step. Up to 16 ranks, rungs and rows are the last ladder and all
    ranks' counts on it, and spread_out is the last ladder over the whole vector with its counts. inner and outer: how many
    elements each rank is likely to select in its region, and in the whole vector. `least` draws borders.
    """

    def __init__(self, controller: Controller, k: int, n: int, size: int) -> None:
        self.controller = controller
        self.k = k
        self.n = n
        self.size = size
        self.able: Ints = np.arange(size)
        self.rungs: Rungs = np.empty(0, dtype=np.float32)
        self.rows: Ints | None = None
        self.spread_out: tuple[Rungs, Ints] | None = None
        self.inner, self.outer = [1] * size, [size] * size
        self.least: LeastBorders = least_borders

    @property
    def gathers(self) -> bool:
        """Whether ranks are few enough to tell each other their own counts."""
        return self.size <= GATHERED_RANKS

    def ladder(self, found: Collected, rungs: Rungs, everywhere: bool, finer: bool) -> tuple[Ints, Callable[[int], Ints]]:
        """Count over all ranks what reaches each rung; also return a function that gives the count per rank at one rung.

        finer: the rungs lie between two of the last ladder.
        """
        raise NotImplementedError

    def message(self, rungs: Rungs, everywhere: bool, finer: bool) -> Ladder:
        """What the ranks know of a ladder's message beforehand; up to 16 ranks."""
        if self.rows is None:
            return Ladder(None, [self._room_for(rungs)] * self.size, False)
        if finer:
            below = int(np.searchsorted(self.rungs, rungs[0]))
            past = below + 1 == len(self.rungs)
            above = [0] * self.size if past else self.rows[:, below + 1].tolist()
            return Ladder(above, [at - end for at, end in zip(self.rows[:, below].tolist(), above, strict=True)], True)
        if everywhere:
            return Ladder(None, [self._room_for(rungs)] * self.size, True)
        if self.spread_out is not None and (self.spread_out[0] is rungs or np.array_equal(self.spread_out[0], rungs)):
            rows = self.spread_out[1]
            between = zip(rows[:, 0].tolist(), rows[:, -1].tolist(), self.inner, self.outer, strict=True)
            return Ladder(None, [min(a - b, LADDER * (a - b) * i // o + LEAST) for a, b, i, o in between], True)
        return Ladder(None, [LADDER * self.k * i // max(1, sum(self.inner)) + LEAST for i in self.inner], True)

    def _room_for(self, rungs: Rungs) -> int:
        """How many elements a rank is likely to have on a ladder around the threshold that gives k."""
        slope = getattr(self.controller, "slope", 1.0)
        reach = (float(rungs[-1]) / float(rungs[0])) ** (slope / 2) if len(rungs) > 1 else 1.0
        return int(self.k * min(reach, MOST_REACH)) + LEAST

    def note(self, rungs: Rungs, rows: Ints, everywhere: bool) -> None:
        """Keep all ranks' counts on a ladder."""
        self.rungs, self.rows = rungs, rows
        if everywhere:
            self.spread_out = rungs, rows

    def drawn(self, counts: Sequence[Ints], selector: ExclusiveSelector) -> None:
        """Keep each rank's count in its region and in the whole vector, from all ranks' block counts."""
        self.inner = selector.loads(counts).tolist()
        self.outer = [max(1, int(row.sum())) for row in counts]

    def histogram(self, scope: Scope, most: int) -> Ints:
        """The histogram of all ranks' magnitudes in their scopes, by exponent and the first bits of the mantissa.

        Up to 16 ranks, only the `most` largest of each rank below the last ladder count; those on the ladder are in one bin.
        """
        raise NotImplementedError

    def histograms(self, scope: Scope, most: int) -> Ints:
        """The histogram of each rank's `most` largest magnitudes, one row per rank."""
        raise NotImplementedError

    def below(self, counted: Ints, rank: int, most: int) -> Ints:
        """The part of a rank's histogram that lies below the last ladder, from bin 0 to the rung's.

        `most` elements are wanted; all that the ladder lacks of them might be this rank's.
        """
        reached = np.zeros(self.size, dtype=np.int64) if self.rows is None else self.rows[:, 0]
        at = bin_of(self.rungs[0])
        part = counted[: at + 1].copy()
        part[at] = max(0, int(part[at]) - int(reached[rank]) + int(counted[at + 1 :].sum()))
        return tallies.clipped(part, max(1, most - int(reached.sum())))

    def with_ladder(self, parts: Ints) -> Ints:
        """The sum of histograms below the last ladder, and all that lies on the ladder in one bin above."""
        reached = 0 if self.rows is None else int(self.rows[:, 0].sum())
        total = np.zeros(BINS, dtype=np.int64)
        total[: parts.shape[1]] = parts.sum(axis=0)
        total[parts.shape[1]] = reached
        return total

    def select(self, scope: Scope, floor: float) -> Collected:
        """What reaches the floor in the scope."""
        raise NotImplementedError

    def block_counts(self, found: Collected, threshold: float, edges: Ints, totals: Ints | None) -> list[Ints]:
        """Every rank's count above the threshold per block, in rank order; with many ranks, only the sum over ranks.

        totals: every rank's count over all blocks, if it is known.
        """
        raise NotImplementedError

    def inside(self, found: Collected, regions: list[Region]) -> tuple[Scope, Collected]:
        """The part of a scope, and of its candidates, that lies in the rank's region."""
        raise NotImplementedError

    def tied(self, found: Collected, threshold: float) -> Ints:
        """For every rank, how many candidates lie above the threshold and how many equal it."""
        raise NotImplementedError

    def cut(self, found: Collected, threshold: float, shares: Ints, turn: int) -> Collected:
        """The candidates above the threshold, and of those equal to it as many as each rank's share."""
        raise NotImplementedError

    def nominate(self, found: Collected, threshold: float, regions: list[Region]) -> Collected:
        """What each region's owner selected, marked as certain, and those of the other ranks' k largest that lie there."""
        raise NotImplementedError

    def add_poor(self, found: Collected, threshold: float, able: Ints, regions: list[Region]) -> Collected:
        """The owners' candidates, and what ranks without a partition have in these regions that reaches the threshold."""
        raise NotImplementedError

    def settle(self, scope: Scope, rungs: Rungs, found: Collected, *, everywhere: bool = False) -> Settled[Collected]:
        """Find the rung for the candidates that the ranks collected in their scopes (`everywhere`: in the whole vector).

        If k lies between two rungs, count a finer ladder. If it lies below all, place a new ladder by a histogram and select
        again. With `everywhere`, leave poor ranks out first: without them the ladder may be enough.
        """
        k = self.k
        everything = k >= self.n
        reselected = refined = attempts = limit = 0
        counted: Ints | None = None
        finer = False
        while True:
            total, workload_at = self.ladder(found, rungs, everywhere, finer)
            choice = None if everything else self.controller.choose(rungs, total, k)
            if choice is None or choice.rung is not None:
                rung = 0 if choice is None or choice.rung is None else choice.rung
                return Settled(found, rungs, rung, total, workload_at(rung), reselected, refined)
            finer = choice.finer is not None
            if choice.finer is not None:
                refined += 1
                rungs = choice.finer
                continue
            share = k << attempts
            if counted is None or (share > limit and self.gathers):
                first, limit = counted is None, share * (HISTOGRAM if everywhere else 1)
                counted = self._count(scope, everywhere and self.gathers, limit, first=first)
                if first and len(self.able) < self.size and everywhere and len(rungs):
                    continue
            reselected += len(rungs) > 0
            attempts += 1
            rungs = self.controller.locate(counted, share * (len(self.able) if everywhere else 1))
            found = self.select(scope, float(rungs[0]))

    def _count(self, scope: Scope, by_rank: bool, most: int, *, first: bool) -> Ints:
        """The histogram to place a ladder by; with by_rank, over the able ranks, which the first histogram determines."""
        if not by_rank:
            return self.histogram(scope, most)
        rows = self.histograms(scope, most * self.size)
        if first:
            self.able = able_ranks(rows, self.k)
        total: Ints = rows[self.able].sum(axis=0)
        return total


def share_counts(exchange: Exchange, notice: Notice, counts: Ints, most: int) -> Ints:
    """Gather counts, one row per rank; raise on all ranks if any has seen a non-finite value. Collective.

    No count exceeds `most`.
    """
    if exchange.size == 1:
        if notice.status:
            refuse(np.array([[notice.status, notice.detail]]), notice)
        return counts[None].astype(np.int64)
    kind = count_type(most)
    header = np.array([notice.status, notice.detail], dtype=np.int64)
    rows = exchange.allgather(np.concatenate([header.view(np.uint8), counts.astype(kind).view(np.uint8)]))
    statuses = np.ascontiguousarray(rows[:, : header.nbytes]).view(np.int64)
    if statuses[:, 0].any():
        refuse(statuses, notice)
    gathered = np.ascontiguousarray(rows[:, header.nbytes :]).view(kind).astype(np.int64)
    return gathered.reshape(exchange.size, len(counts))


def count_type(most: int) -> type[np.unsignedinteger[Any]]:
    """The type that counts travel as."""
    return np.uint32 if most < 2**32 else np.uint64


class Settlement(Search[tuple[int, int], Candidates]):
    """The search on one rank among others: one message per ladder. Reads only the rank's view; collective."""

    def __init__(
        self, exchange: Exchange, backend: Backend, view: View, controller: Controller, notice: Notice, n: int,
        told: Ints | None = None,
    ) -> None:  # fmt: skip
        super().__init__(controller, notice.k, n, exchange.size)
        self.told = told  # every rank's counts on the first ladder, if they came with the roll call
        self.exchange = exchange
        self.backend = backend
        self.least = backend.least_borders
        self.view = view
        self.notice = notice

    def ladder(self, found: Candidates, rungs: Rungs, everywhere: bool, finer: bool) -> tuple[Ints, Callable[[int], Ints]]:
        """Combine the ladders over ranks; beyond 16 ranks by a sum, then one more message for the counts at the rung."""
        rows, self.told = self.told, None
        if rows is None and self.gathers:
            counts = self.backend.tail_counts(found.magnitude, rungs)
            if self.size == 1:
                rows = share_counts(self.exchange, self.notice, counts, self.n)
            else:
                message = self.message(rungs, everywhere, finer)
                rows = share_ladder(self.exchange, self.backend, self.notice, counts, message, self.n)
        if rows is not None:
            at_rungs: Ints = rows
            self.note(rungs, at_rungs, everywhere)
            total = harmonic(at_rungs[self.able]) if everywhere else at_rungs.sum(axis=0)
            return total, lambda rung: at_rungs[:, rung]
        counts = self.backend.tail_counts(found.magnitude, rungs)
        share_counts(self.exchange, self.notice, counts[:0], self.n)
        total = self.exchange.allreduce_(counts.copy()) // (self.size if everywhere else 1)
        return total, lambda rung: self.exchange.allgather(counts[rung : rung + 1])[:, 0]

    def histogram(self, scope: tuple[int, int], most: int) -> Ints:
        counted: Ints = self.view.histogram(*scope)
        if not self.gathers or self.size == 1:
            return self.exchange.allreduce_(counted)
        if not len(self.rungs):
            total: Ints = tallies.gather(self.exchange, self.backend, tallies.clipped(counted, most)).sum(axis=0)
            return total
        return self.with_ladder(tallies.gather(self.exchange, self.backend, self.below(counted, self.exchange.rank, most)))

    def histograms(self, scope: tuple[int, int], most: int) -> Ints:
        return tallies.gather(self.exchange, self.backend, tallies.clipped(self.view.histogram(*scope), most))

    def select(self, scope: tuple[int, int], floor: float) -> Candidates:
        return self.view.select(*scope, floor)

    def block_counts(self, found: Candidates, threshold: float, edges: Ints, totals: Ints | None) -> list[Ints]:
        counts = self.backend.block_counts(found.index, found.magnitude, threshold, edges)
        if self.gathers:
            return list(tallies.gather(self.exchange, self.backend, counts, totals))
        return [self.exchange.allreduce_(counts.astype(block_count_type(edges, self.size))).astype(np.int64)] * self.size

    def inside(self, found: Candidates, regions: list[Region]) -> tuple[tuple[int, int], Candidates]:
        mine = next((r.lo, r.hi) for r in regions if r.rank == self.exchange.rank)
        return mine, found.within(self.backend.search, *mine)

    def tied(self, found: Candidates, threshold: float) -> Ints:
        return self.exchange.allgather(count_ties(found.on_host(self.backend), threshold))

    def cut(self, found: Candidates, threshold: float, shares: Ints, turn: int) -> Candidates:
        kept = drop_ties(found.on_host(self.backend), threshold, int(shares[self.exchange.rank]), turn)
        return kept.on_device(self.backend)

    def nominate(self, found: Candidates, threshold: float, regions: list[Region]) -> Candidates:
        nominated = self._route(self.view.largest(self.k), regions)
        own = certain(found.on_host(self.backend).reaching(threshold))
        return merge(own, nominated).on_device(self.backend)

    def add_poor(self, found: Candidates, threshold: float, able: Ints, regions: list[Region]) -> Candidates:
        scope = (0, 0) if self.exchange.rank in able else (0, self.n)
        nominated = self._route(self.select(scope, threshold).on_host(self.backend), regions)
        return merge(found.on_host(self.backend), nominated).on_device(self.backend)

    def _route(self, mine: Candidates, regions: list[Region]) -> Candidates:
        """Send candidates to the owners of their regions; return what other ranks sent here. On the host."""
        owners = sorted(regions, key=lambda region: region.rank)
        parts = [mine.within(np.searchsorted, r.lo, r.hi) for r in owners]
        counts = np.array([len(part.index) for part in parts], dtype=np.int64)
        table = self.exchange.allgather(counts)
        order = np.concatenate([part.index for part in parts])
        index = self.exchange.route(order.view(np.uint8), 8 * table).view(np.int64)
        values = np.concatenate([part.magnitude for part in parts])
        magnitude = self.exchange.route(values.view(np.uint8), 4 * table).view(np.float32)
        return Candidates(index, magnitude)


def block_count_type(edges: Ints, ranks: int = 1) -> type[np.unsignedinteger[Any]]:
    """The smallest type that holds the count of any block, summed over `ranks` ranks."""
    longest = ranks * int(np.diff(edges).max())
    if longest >= 2**32:
        return np.uint64
    return np.uint8 if longest < 2**8 else np.uint16 if longest < 2**16 else np.uint32


def both(first: Settled[Collected], second: Settled[Collected]) -> Settled[Collected]:
    """The second result, with the first's effort added."""
    return replace(second, reselected=first.reselected + second.reselected, refined=first.refined + second.refined)
