"""The search for the threshold that gives k over all ranks. All ranks decide alike, on the same integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from mpisparse.arrays import Ints
from mpisparse.comm.agreement import Notice, refuse
from mpisparse.comm.regions import Region
from mpisparse.select.candidates import Candidates, certain, count_ties, drop_ties, merge
from mpisparse.select.threshold import Controller, Rungs

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.exchange import Exchange
    from mpisparse.select.view import View

Scope = TypeVar("Scope")
Collected = TypeVar("Collected")

GATHERED_RANKS = 16  # up to so many ranks counts are gathered with their owners; beyond, summed
REACH = 16  # bins of a histogram, two octaves: so far may the threshold be lowered to give a poor rank its share
POOR = 32  # beyond 16 ranks: a rank with so many times less than the mean is poor


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


def harmonic(rows: Ints) -> Ints:
    """Predict how many elements are selected once borders are drawn, from what each rank would select everywhere.

    A rank that selects little gets a longer partition, so balance depends on the harmonic mean of the ranks' counts.
    """
    mean: Ints = np.rint(len(rows) / (1.0 / np.maximum(rows, 0.5)).sum(axis=0)).astype(np.int64)
    return mean


def able_ranks(histograms: Ints, k: int) -> Ints:
    """The ranks that share the selection, by a histogram of each rank's magnitudes.

    A rank whose gradient is zero, or far smaller than the others', selects nothing at a threshold that suits them: balanced
    borders would give it nearly the whole vector. The poorest ranks are left out until the rest together select k at most
    two octaves below the threshold at which a rank selects k on average. If no choice of ranks does, all take part.
    """
    tails: Ints = np.cumsum(histograms[:, ::-1], axis=1)[:, ::-1]
    reached = np.flatnonzero(tails.sum(axis=0) >= k * len(tails))
    at = max(1, int(reached[-1]) if len(reached) else 0)  # bin 0 holds the zeros
    floor = max(1, at - REACH)
    richest_last = np.argsort(tails[:, at], kind="stable")
    for poor in range(len(tails)):
        able = np.sort(richest_last[poor:])
        if harmonic(tails[able, floor : floor + 1])[0] >= k:
            return able
    return np.arange(len(tails))


class Search(Generic[Scope, Collected]):
    """The search for the rung that gives k over all ranks; subclasses say how ranks count and select.

    A scope is where candidates are collected. A subclass is one rank among others, or all ranks in one process. `able` are
    the ranks that get a partition where borders are drawn in the step.
    """

    def __init__(self, controller: Controller, k: int, n: int, size: int) -> None:
        self.controller = controller
        self.k = k
        self.n = n
        self.size = size
        self.able: Ints = np.arange(size)

    @property
    def gathers(self) -> bool:
        """Whether ranks are few enough to tell each other their own counts."""
        return self.size <= GATHERED_RANKS

    def ladder(self, found: Collected, rungs: Rungs, everywhere: bool) -> tuple[Ints, Callable[[int], Ints]]:
        """Count over all ranks what reaches each rung; also return a function that gives the count per rank at one rung."""
        raise NotImplementedError

    def histogram(self, scope: Scope) -> Ints:
        """The histogram of all ranks' magnitudes in their scopes, by exponent and the first bits of the mantissa."""
        raise NotImplementedError

    def histograms(self, scope: Scope) -> Ints:
        """The same, one row per rank."""
        raise NotImplementedError

    def select(self, scope: Scope, floor: float) -> Collected:
        """What reaches the floor in the scope."""
        raise NotImplementedError

    def block_counts(self, found: Collected, threshold: float, edges: Ints) -> list[Ints]:
        """Every rank's count in every block above the threshold, in rank order; for many ranks all have the sum of all."""
        raise NotImplementedError

    def inside(self, found: Collected, regions: list[Region]) -> tuple[Scope, Collected]:
        """The part of a scope, and of the candidates in it, that lies in the region of its rank."""
        raise NotImplementedError

    def tied(self, found: Collected, threshold: float) -> Ints:
        """For every rank, how many candidates lie above the threshold and how many equal it."""
        raise NotImplementedError

    def cut(self, found: Collected, threshold: float, shares: Ints, turn: int) -> Collected:
        """What lies above the threshold, and of what equals it as many as each rank's share."""
        raise NotImplementedError

    def nominate(self, found: Collected, threshold: float, regions: list[Region]) -> Collected:
        """What each region's owner selected, marked as certain, and what is among other ranks' k largest there."""
        raise NotImplementedError

    def add_poor(self, found: Collected, threshold: float, able: Ints, regions: list[Region]) -> Collected:
        """The owners' candidates, and what ranks that are not able have in their regions from the threshold on."""
        raise NotImplementedError

    def settle(self, scope: Scope, rungs: Rungs, found: Collected, *, everywhere: bool = False) -> Settled[Collected]:
        """Find the rung for the candidates that the ranks collected in their scopes (`everywhere`: in the whole vector).

        Where k lies between two rungs, count a finer ladder; where it lies below all, place a new ladder by a histogram and
        select again. With `everywhere`, leave poor ranks out first: without them the ladder may do.
        """
        k = self.k
        everything = k >= self.n
        reselected = refined = attempts = 0
        counted: Ints | None = None
        while True:
            total, workload_at = self.ladder(found, rungs, everywhere)
            choice = None if everything else self.controller.choose(rungs, total, k)
            if choice is None or choice.rung is not None:
                rung = 0 if choice is None or choice.rung is None else choice.rung
                return Settled(found, rungs, rung, total, workload_at(rung), reselected, refined)
            if choice.finer is not None:
                refined += 1
                rungs = choice.finer
                continue
            if counted is None:
                counted = self._count(scope, everywhere)
                if len(self.able) < self.size and everywhere and len(rungs):
                    continue
            reselected += len(rungs) > 0
            wanted = (k << attempts) * (len(self.able) if everywhere else 1)
            attempts += 1
            rungs = self.controller.locate(counted, wanted)
            found = self.select(scope, float(rungs[0]))

    def _count(self, scope: Scope, everywhere: bool) -> Ints:
        """The histogram to place a ladder by; everywhere, that of the able ranks, which it finds."""
        if not (everywhere and self.gathers):
            return self.histogram(scope)
        rows = self.histograms(scope)
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
    kind = np.uint32 if most < 2**32 else np.uint64
    header = np.array([notice.status, notice.detail], dtype=np.int64)
    rows = exchange.allgather(np.concatenate([header.view(np.uint8), counts.astype(kind).view(np.uint8)]))
    statuses = np.ascontiguousarray(rows[:, : header.nbytes]).view(np.int64)
    if statuses[:, 0].any():
        refuse(statuses, notice)
    gathered = np.ascontiguousarray(rows[:, header.nbytes :]).view(kind).astype(np.int64)
    return gathered.reshape(exchange.size, len(counts))


class Settlement(Search[tuple[int, int], Candidates]):
    """The search as one rank among others does it: one message per ladder. Reads the rank's view only; collective."""

    def __init__(
        self, exchange: Exchange, backend: Backend, view: View, controller: Controller, notice: Notice, n: int
    ) -> None:
        super().__init__(controller, notice.k, n, exchange.size)
        self.exchange = exchange
        self.backend = backend
        self.view = view
        self.notice = notice

    def ladder(self, found: Candidates, rungs: Rungs, everywhere: bool) -> tuple[Ints, Callable[[int], Ints]]:
        """Combine the ladders over ranks; beyond 16 ranks by a sum, and each rank's share at the rung by another message."""
        counts = self.backend.tail_counts(found.magnitude, rungs)
        if self.gathers:
            rows = share_counts(self.exchange, self.notice, counts, self.n)
            return harmonic(rows[self.able]) if everywhere else rows.sum(axis=0), lambda rung: rows[:, rung]
        share_counts(self.exchange, self.notice, counts[:0], self.n)
        total = self.exchange.allreduce_(counts.copy()) // (self.size if everywhere else 1)
        return total, lambda rung: self.exchange.allgather(counts[rung : rung + 1])[:, 0]

    def histogram(self, scope: tuple[int, int]) -> Ints:
        counted: Ints = self.exchange.allreduce_(self.view.histogram(*scope))
        return counted

    def histograms(self, scope: tuple[int, int]) -> Ints:
        return self.exchange.allgather(self.view.histogram(*scope))

    def select(self, scope: tuple[int, int], floor: float) -> Candidates:
        return self.view.select(*scope, floor)

    def block_counts(self, found: Candidates, threshold: float, edges: Ints) -> list[Ints]:
        counts = self.backend.block_counts(found.index, found.magnitude, threshold, edges)
        if self.gathers:
            return list(self.exchange.allgather(counts.astype(block_count_type(edges))).astype(np.int64))
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
        """Send candidates to the owners of their regions; what other ranks send here. On the host."""
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
    """The smallest type that holds the count of any block, summed over so many ranks."""
    longest = ranks * int(np.diff(edges).max())
    if longest >= 2**32:
        return np.uint64
    return np.uint8 if longest < 2**8 else np.uint16 if longest < 2**16 else np.uint32


def not_poor(loads: Ints) -> Ints:
    """The ranks that select at least a small part of the mean."""
    return np.flatnonzero(loads * POOR * len(loads) >= loads.sum())


def both(first: Settled[Collected], second: Settled[Collected]) -> Settled[Collected]:
    """The second, with the first's effort added."""
    return replace(second, reselected=first.reselected + second.reselected, refined=first.refined + second.refined)
