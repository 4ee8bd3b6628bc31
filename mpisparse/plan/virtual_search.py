"""The search for a threshold as all ranks of a simulation do it, and the accumulators that they read."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from mpisparse.arrays import Floats, Ints
from mpisparse.backends.device import load_backend
from mpisparse.comm.regions import Region
from mpisparse.plan.costs import Log
from mpisparse.plan.synthetic import Source, worker_gradient
from mpisparse.select import riders, tallies
from mpisparse.select.able import harmonic
from mpisparse.select.candidates import Candidates, certain, count_ties, drop_ties, largest, merge
from mpisparse.select.ladders import Ladder, late_sizes
from mpisparse.select.search import BINS, Search, block_count_type
from mpisparse.select.threshold import Controller, Rungs
from mpisparse.select.view import VectorKeys

Scopes = list[tuple[int, int]]

HEADER, COUNT = 16, 4  # bytes of a rank's status before counts, and of a count below 2^32


class Accumulators:
    """Every worker's accumulator: gradients added up since the first step, zero where they were sent."""

    def __init__(self, source: Source, size: int) -> None:
        self.source = source
        self.size = size
        self.n = sum(source.sizes)
        self.unions: list[Ints] = []
        self.whole: list[Floats] | None = None

    def keep(self) -> None:
        """Keep all of them in memory from now on, before the first step: for few workers that read them whole."""
        self.whole = [np.zeros(self.n, dtype=np.float32) for _ in range(self.size)]

    def begin(self) -> None:
        """Add a step's gradients to what is kept."""
        for worker, acc in enumerate(self.whole or []):
            acc += worker_gradient(self.source, worker, len(self.unions))

    def read(self, worker: int, lo: int, hi: int) -> Floats:
        """A worker's elements [lo, hi) in the step that is being done."""
        if self.whole is not None:
            return self.whole[worker][lo:hi]
        acc = np.zeros(hi - lo, dtype=np.float32)
        for step in range(len(self.unions) + 1):
            acc += worker_gradient(self.source, worker, step)[lo:hi]
            if step < len(self.unions):
                union = self.unions[step]
                a, b = np.searchsorted(union, (lo, hi))
                acc[union[a:b] - lo] = 0.0
        return acc

    def sent(self, union: Ints) -> None:
        """These elements were sent by all; the next step begins."""
        for acc in self.whole or []:
            acc[union] = 0.0
        self.unions.append(union)


class VirtualSearch(Search[Scopes, list[Candidates]]):
    """The search for a threshold as all ranks do it; what they would send is noted in the log."""

    def __init__(self, controller: Controller, k: int, acc: Accumulators, log: Log) -> None:
        super().__init__(controller, k, acc.n, acc.size)
        self.backend = load_backend()
        self.least = self.backend.least_borders
        self.acc = acc
        self.log = log
        self.told = False  # the roll call told the counts on the first ladder

    def fits(self, found: Candidates, rungs: Rungs) -> bool:
        """Tell whether a worker's counts have room in the roll call."""
        return riders.fits(self.backend.tail_counts(found.magnitude, rungs))

    def ladder(
        self, found: list[Candidates], rungs: Rungs, everywhere: bool, finer: bool
    ) -> tuple[Ints, Callable[[int], Ints]]:
        rows = np.stack([self.backend.tail_counts(f.magnitude, rungs) for f in found])
        if self.gathers:
            if not self.told:
                self._log_ladder(rows, self.message(rungs, everywhere, finer))
            self.told = False
            self.note(rungs, rows, everywhere)
            return harmonic(rows[self.able]) if everywhere else rows.sum(axis=0), lambda rung: rows[:, rung]
        self.log.add("allgather", HEADER)
        self.log.add("allreduce", 8 * len(rungs))

        def workload_at(rung: int) -> Ints:
            self.log.add("allgather", 8)
            share: Ints = rows[:, rung]
            return share

        return rows.sum(axis=0) // (self.size if everywhere else 1), workload_at

    def _log_ladder(self, rows: Ints, message: Ladder) -> None:
        if message.above is not None:
            self.log.add("allgatherv", tallies.rooms(rows.shape[1], message.totals))
            return
        slots = max(0, rows.shape[1] - 1)
        spaces = tallies.rooms(slots, message.totals)
        header = HEADER * (not message.told) + 2 * COUNT * (rows.shape[1] > 0)
        self.log.add("allgatherv", [header + space for space in spaces])
        late = late_sizes(slots, (rows[:, 0] - rows[:, -1]).tolist(), spaces) if slots else []
        if any(late):
            self.log.add("allgatherv", late)

    def histogram(self, scope: Scopes, most: int) -> Ints:
        if self.gathers:
            reads = ((self.acc.read(worker, lo, hi), hi - lo) for worker, (lo, hi) in enumerate(scope))
            counted = [self.backend.histogram(values, 0, count) for values, count in reads]
            if not len(self.rungs):
                rows = np.stack([tallies.clipped(each, most) for each in counted])
            else:
                rows = np.stack([self.below(each, worker, most) for worker, each in enumerate(counted)])
            self._log_sized(rows)
            return self.with_ladder(rows) if len(self.rungs) else np.asarray(rows.sum(axis=0))
        self.log.add("allreduce", 8 * BINS)
        total = np.zeros(BINS, dtype=np.int64)
        for worker, (lo, hi) in enumerate(scope):
            total += self.backend.histogram(self.acc.read(worker, lo, hi), 0, hi - lo)
        return total

    def histograms(self, scope: Scopes, most: int) -> Ints:
        reads = ((self.acc.read(worker, lo, hi), hi - lo) for worker, (lo, hi) in enumerate(scope))
        rows = np.stack([tallies.clipped(self.backend.histogram(values, 0, count), most) for values, count in reads])
        self._log_sized(rows)
        return rows

    def _log_sized(self, rows: Iterable[Ints]) -> None:
        self.log.add("allgather", 16)
        self.log.add("allgatherv", [len(tallies.encode(self.backend, row)) for row in rows])

    def select(self, scope: Scopes, floor: float) -> list[Candidates]:
        return [self._select(worker, lo, hi, floor) for worker, (lo, hi) in enumerate(scope)]

    def _select(self, worker: int, lo: int, hi: int, floor: float) -> Candidates:
        index, magnitude, _ = self.backend.select(self.acc.read(worker, lo, hi), 0, hi - lo, floor)
        return Candidates(index + lo, magnitude)

    def block_counts(self, found: list[Candidates], threshold: float, edges: Ints, totals: Ints | None) -> list[Ints]:
        counts = [self.backend.block_counts(f.index, f.magnitude, threshold, edges).astype(np.int64) for f in found]
        if self.gathers:
            if totals is None:
                self._log_sized(counts)
            else:
                self.log.add("allgatherv", tallies.rooms(len(edges) - 1, totals.tolist()))
            return counts
        self.log.add("allreduce", (len(edges) - 1) * block_count_type(edges, self.size)().itemsize)
        return [np.sum(counts, axis=0)] * self.size

    def inside(self, found: list[Candidates], regions: list[Region]) -> tuple[Scopes, list[Candidates]]:
        mine = sorted(regions)
        return [(r.lo, r.hi) for r in mine], [
            f.within(np.searchsorted, r.lo, r.hi) for f, r in zip(found, mine, strict=True)
        ]

    def tied(self, found: list[Candidates], threshold: float) -> Ints:
        self.log.add("allgather", 16)
        return np.stack([count_ties(f, threshold) for f in found])

    def cut(self, found: list[Candidates], threshold: float, shares: Ints, turn: int) -> list[Candidates]:
        return [drop_ties(f, threshold, int(share), turn) for f, share in zip(found, shares, strict=True)]

    def nominate(self, found: list[Candidates], threshold: float, regions: list[Region]) -> list[Candidates]:
        vectors = (VectorKeys(self.backend, self.acc.read(worker, 0, self.n)) for worker in range(self.size))
        every = (largest(self.backend, keys, self.n, self.k) for keys in vectors)
        own = [certain(f.reaching(threshold)) for f in found]
        return [merge(*pair) for pair in zip(own, self._route(every, regions), strict=True)]

    def add_poor(self, found: list[Candidates], threshold: float, able: Ints, regions: list[Region]) -> list[Candidates]:
        scopes = ((worker, 0 if worker in able else self.n) for worker in range(self.size))
        every = (self._select(worker, 0, hi, threshold) for worker, hi in scopes)
        return [merge(*pair) for pair in zip(found, self._route(every, regions), strict=True)]

    def _route(self, every: Iterable[Candidates], regions: list[Region]) -> list[Candidates]:
        """Send every worker's candidates to the owners of their regions."""
        owners = sorted(regions)
        rows = [[nominated.within(np.searchsorted, r.lo, r.hi) for r in owners] for nominated in every]
        table = np.array([[len(part.index) for part in row] for row in rows], dtype=np.int64)
        self.log.add("allgather", 8 * self.size)
        self.log.add_route(8 * table)
        self.log.add_route(4 * table)
        joined = []
        for parts in zip(*rows, strict=True):
            index, magnitude = (np.concatenate([getattr(part, key) for part in parts]) for key in ("index", "magnitude"))
            joined.append(Candidates(index, magnitude))
        return joined
