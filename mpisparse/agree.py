"""What all ranks must know before anything is sent: that each can go on, and the threshold that gives k."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpisparse.threshold import Controller, Rungs

if TYPE_CHECKING:
    from mpisparse.backend import Backend
    from mpisparse.exchange import Exchange
    from mpisparse.flat import Gradients
    from mpisparse.parts import Region
    from mpisparse.score import Magnitude

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Scope = TypeVar("Scope")
Candidates = TypeVar("Candidates")

FINE, NONFINITE, NO_BACKWARD, STALE, BROKEN = range(5)
GATHERED_RANKS = 16  # up to so many ranks counts are gathered with their owners; beyond, summed


class StepRefused(Exception):  # noqa: N818 - not an error yet: sync.py turns it into one with the parameters' names
    """Some rank cannot go on; known to all ranks. `statuses` holds (status, detail) of every rank."""

    def __init__(self, statuses: Sequence[tuple[int, int]]) -> None:
        super().__init__(statuses)
        self.statuses = statuses


class DensityDiffers(Exception):  # noqa: N818 - as above
    """The ranks were set to different densities; carries each rank's k."""


class FrozenDiffers(Exception):  # noqa: N818 - as above
    """The ranks have frozen different parameters."""


class Overflow(Exception):  # noqa: N818 - as above
    """The sum over ranks is beyond what float32 holds, at the flat index that it carries; known to all ranks."""


@dataclass
class Inputs:
    """What a rank brings to a step; gradients are None where they are in the accumulator already."""

    gradients: Gradients | None
    k: int
    unused: NDArray[np.bool_]
    status: int = FINE
    detail: int = 0
    frozen: int = 0  # a digest of which parameters are frozen
    trouble: str = ""  # why this rank cannot go on, where its status is BROKEN

    def note_nonfinite(self, index: int) -> None:
        """Remember the first non-finite element for the agreement that follows."""
        if index >= 0 and self.status == FINE:
            self.status, self.detail = NONFINITE, index


@dataclass(frozen=True)
class Found:
    """Candidates of this rank, ascending; `bad` is the first non-finite index, or -1."""

    index: Ints
    magnitude: Floats
    bad: int = -1

    def within(self, backend: Backend, lo: int, hi: int) -> Found:
        """The candidates in [lo, hi)."""
        a, b = backend.search(self.index, np.array([lo, hi])).tolist()
        return Found(self.index[a:b], self.magnitude[a:b])


@dataclass(frozen=True)
class Settled(Generic[Candidates]):
    """A threshold that all ranks know: its rung, the counts at every rung, and how it was found."""

    found: Candidates
    rungs: Rungs
    rung: int
    total: Ints
    workloads: Ints
    reselected: int = 0
    refined: int = 0

    @property
    def threshold(self) -> float:
        return float(self.rungs[self.rung])


def share_readiness(exchange: Exchange, inputs: Inputs) -> NDArray[np.bool_] | None:
    """Raise everywhere if any rank cannot go on or is set to another density, before anything is added. Collective.

    Returns which parameters had a gradient on some rank; None if all had one on all.
    """
    mine = [inputs.status, inputs.detail, inputs.k, int(inputs.unused.any()), inputs.frozen]
    rows = exchange.allgather(np.array(mine, dtype=np.int64))
    _refuse(rows)
    if (rows[:, 4] != inputs.frozen).any():
        raise FrozenDiffers
    if (rows[:, 2] != inputs.k).any():
        raise DensityDiffers(rows[:, 2].tolist())
    if not rows[:, 3].any():
        return None
    bits = exchange.allreduce_(np.packbits(~inputs.unused), "or")
    return np.unpackbits(bits, count=len(inputs.unused)).astype(bool)


def share_counts(exchange: Exchange, inputs: Inputs, counts: Ints, n: int) -> Ints:
    """Gather counts (of at most n), a row for each rank; raise everywhere if any has seen a non-finite value. Collective."""
    kind = np.uint32 if n < 2**32 else np.uint64
    header = np.array([inputs.status, inputs.detail], dtype=np.int64)
    rows = exchange.allgather(np.concatenate([header.view(np.uint8), counts.astype(kind).view(np.uint8)]))
    _refuse(np.ascontiguousarray(rows[:, : header.nbytes]).view(np.int64))
    gathered = np.ascontiguousarray(rows[:, header.nbytes :]).view(kind).astype(np.int64)
    return gathered.reshape(exchange.size, len(counts))


def _refuse(rows: Ints) -> None:
    """Raise StepRefused unless every rank's status, first in its row, is fine."""
    if rows[:, 0].any():
        raise StepRefused([(int(status), int(detail)) for status, detail in rows[:, :2]])


def harmonic(rows: Ints) -> Ints:
    """Foretell how many elements are selected once borders are drawn, from what each rank would select everywhere.

    Balanced parts are as long as their owners are frugal, so that the harmonic mean over ranks counts.
    """
    mean: Ints = np.rint(len(rows) / (1.0 / np.maximum(rows, 0.5)).sum(axis=0)).astype(np.int64)
    return mean


class Search(Generic[Scope, Candidates]):
    """The search for the rung that gives k over all ranks; how ranks count and select is for those who do it to say.

    A scope is where candidates are collected. Subclasses are one rank among others, or all of them at once.
    """

    def __init__(self, controller: Controller, k: int, n: int, size: int) -> None:
        self.controller = controller
        self.k = k
        self.n = n
        self.size = size

    @property
    def gathers(self) -> bool:
        """Whether ranks are few enough to tell each other their own counts."""
        return self.size <= GATHERED_RANKS

    def ladder(self, found: Candidates, rungs: Rungs, everywhere: bool) -> tuple[Ints, Callable[[int], Ints]]:
        """How many reach each rung over all ranks, and what tells how many of each rank reach one of them."""
        raise NotImplementedError

    def histogram(self, scope: Scope) -> Ints:
        """All ranks' magnitudes in their scopes, by exponent and the first bits of the mantissa."""
        raise NotImplementedError

    def select(self, scope: Scope, floor: float) -> Candidates:
        """What reaches the floor in the scope."""
        raise NotImplementedError

    def block_counts(self, found: Candidates, threshold: float, edges: Ints) -> list[Ints]:
        """Every rank's count in every block above the threshold, in rank order; for many ranks all have the sum of all."""
        raise NotImplementedError

    def inside(self, found: Candidates, regions: list[Region]) -> tuple[Scope, Candidates]:
        """The part of a scope, and of the candidates in it, that lies in the region of its rank."""
        raise NotImplementedError

    def settle(self, scope: Scope, rungs: Rungs, found: Candidates, *, everywhere: bool = False) -> Settled[Candidates]:
        """Find the rung for the candidates that the ranks collected in their scopes (`everywhere`: in all there is).

        Where k lies between rungs, counts a finer ladder; where it lies below, places a new one by a histogram and
        selects again.
        """
        k = self.k
        everything = k >= self.n
        reselected = refined = attempts = 0
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
            reselected += len(rungs) > 0
            wanted = (k << attempts) * (self.size if everywhere else 1)
            attempts += 1
            rungs = self.controller.locate(self.histogram(scope), wanted)
            found = self.select(scope, float(rungs[0]))


class Settlement(Search[tuple[int, int], Found]):
    """The search as one rank does it, in messages of a ladder's counts each; collective."""

    def __init__(
        self, exchange: Exchange, backend: Backend, scorer: Magnitude, controller: Controller, inputs: Inputs
    ) -> None:
        super().__init__(controller, inputs.k, len(scorer.acc), exchange.size)
        self.exchange = exchange
        self.backend = backend
        self.scorer = scorer
        self.inputs = inputs

    def ladder(self, found: Found, rungs: Rungs, everywhere: bool) -> tuple[Ints, Callable[[int], Ints]]:
        """Combine the ladders over ranks; beyond 16 ranks by a sum, and each rank's share at the rung by another message."""
        counts = self.backend.tail_counts(found.magnitude, rungs)
        if self.gathers:
            rows = share_counts(self.exchange, self.inputs, counts, self.n)
            return harmonic(rows) if everywhere else rows.sum(axis=0), lambda rung: rows[:, rung]
        share_counts(self.exchange, self.inputs, counts[:0], self.n)
        total = self.exchange.allreduce_(counts.copy()) // (self.size if everywhere else 1)
        return total, lambda rung: self.exchange.allgather(counts[rung : rung + 1])[:, 0]

    def histogram(self, scope: tuple[int, int]) -> Ints:
        counted: Ints = self.exchange.allreduce_(self.scorer.histogram(*scope))
        return counted

    def select(self, scope: tuple[int, int], floor: float) -> Found:
        return self.scorer.select(*scope, floor)

    def block_counts(self, found: Found, threshold: float, edges: Ints) -> list[Ints]:
        counts = self.backend.block_counts(found.index, found.magnitude, threshold, edges)
        if self.gathers:
            return list(self.exchange.allgather(counts.astype(block_count_type(edges))).astype(np.int64))
        return [self.exchange.allreduce_(counts.astype(block_count_type(edges, self.size))).astype(np.int64)] * self.size

    def inside(self, found: Found, regions: list[Region]) -> tuple[tuple[int, int], Found]:
        mine = next((r.lo, r.hi) for r in regions if r.rank == self.exchange.rank)
        return mine, found.within(self.backend, *mine)


def block_count_type(edges: Ints, ranks: int = 1) -> type[np.unsignedinteger[Any]]:
    """The smallest type that holds the count of any block, summed over so many ranks."""
    longest = ranks * int(np.diff(edges).max())
    if longest >= 2**32:
        return np.uint64
    return np.uint8 if longest < 2**8 else np.uint16 if longest < 2**16 else np.uint32


def both(first: Settled[Candidates], second: Settled[Candidates]) -> Settled[Candidates]:
    """The second, with the first's effort added."""
    return replace(second, reselected=first.reselected + second.reselected, refined=first.refined + second.refined)
