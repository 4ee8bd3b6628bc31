"""Regions: the flat vector cut into one per rank, which sums that region."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpisparse.arrays import Ints

BLOCK = 1024  # neighbours in one part; a multiple of all codecs' groups


class Region(NamedTuple):
    """Elements [lo, hi) of the flat vector, whose sums one rank makes in this step."""

    rank: int
    lo: int
    hi: int


def even_regions(n: int, size: int) -> list[Region]:
    """Cut the vector evenly."""
    return cut_at([p * n // size for p in range(1, size)], n)


def cut_at(cuts: Sequence[int], n: int) -> list[Region]:
    """Cut the vector at ascending positions, for ranks 0, 1, ..."""
    bounds = [0, *cuts, n]
    return [Region(p, bounds[p], bounds[p + 1]) for p in range(len(bounds) - 1)]


def shared_out(index: Ints, n: int, size: int) -> list[Region]:
    """Cut the vector so that all ranks sum about the same number of elements of an ascending index."""
    return cut_at([int(index[p * len(index) // size]) if len(index) else p * n // size for p in range(1, size)], n)


def spans_of(search: Callable[[Any, Ints], Ints], index: Any, regions: Sequence[Region]) -> list[tuple[int, int]]:
    """Return the span of each rank's region in an ascending index, in rank order."""
    cuts = search(index, np.array([*(r.lo for r in regions), regions[-1].hi])).tolist()
    spans = [(0, 0)] * len(regions)
    for p, region in enumerate(regions):
        spans[region.rank] = cuts[p], cuts[p + 1]
    return spans


def even_spans(count: int, regions: Sequence[Region]) -> list[tuple[int, int]]:
    """Divide `count` elements evenly, in the order of the regions; return each rank's part, in rank order.

    A rank need not sum where it selected, so sums are balanced however uneven the selection is.
    """
    size, spans = len(regions), [(0, 0)] * len(regions)
    for p, region in enumerate(regions):
        spans[region.rank] = p * count // size, (p + 1) * count // size
    return spans


class Subset(Protocol):
    """Elements of a vector as an ascending index that is computed instead of stored."""

    @property
    def n(self) -> int: ...

    def __len__(self) -> int: ...

    def below(self, element: int) -> int:
        """How many of them lie below an element of the vector."""
        ...

    def blocks(self, start: int, stop: int) -> tuple[Ints, int, int]:
        """The blocks that positions [start, stop) lie in, the length of a block, and the offset of `start` in the first."""
        ...

    def index(self, start: int, stop: int) -> Ints:
        """The elements at places [start, stop)."""
        ...


def index_on(backend: Any, subset: Subset, start: int, stop: int) -> Any:
    """The elements at positions [start, stop), in a backend's memory; a device computes them, so that none are copied."""
    write = getattr(backend, "neighbours", None)
    if write is None:
        return backend.from_host(subset.index(start, stop))
    return write(*subset.blocks(start, stop), stop - start)


@dataclass(frozen=True)
class Part:
    """Every `every`-th block of a vector of n elements, from block `phase` on, as an index that is not stored."""

    n: int
    every: int
    phase: int

    def __len__(self) -> int:
        return self.below(self.n)

    def below(self, element: int) -> int:
        """How many elements of the part lie below an element of the vector."""
        whole, rest = divmod(element, BLOCK * self.every)
        return whole * BLOCK + min(BLOCK, max(0, rest - self.phase * BLOCK))

    def index(self, start: int, stop: int) -> Ints:
        """The elements at places [start, stop) of the part."""
        place = np.arange(start, stop)
        index: Ints = (place // BLOCK * self.every + self.phase) * BLOCK + place % BLOCK
        return index

    def blocks(self, start: int, stop: int) -> tuple[Ints, int, int]:
        """The blocks that these places lie in."""
        return np.arange(start // BLOCK, -(-stop // BLOCK)) * self.every + self.phase, BLOCK, start % BLOCK


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of `width` neighbours (the vector's last may have fewer), given by their numbers, ascending."""

    n: int
    width: int
    numbers: Ints

    def __len__(self) -> int:
        return self.below(self.n)

    def below(self, element: int) -> int:
        """How many of them lie below an element of the vector."""
        group, rest = divmod(element, self.width)
        place = int(np.searchsorted(self.numbers, group))
        inside = place < len(self.numbers) and self.numbers[place] == group
        return place * self.width + (rest if inside else 0)

    def index(self, start: int, stop: int) -> Ints:
        """The elements at places [start, stop)."""
        place = np.arange(start, stop)
        index: Ints = self.numbers[place // self.width] * self.width + place % self.width
        return index

    def blocks(self, start: int, stop: int) -> tuple[Ints, int, int]:
        """The groups that these places lie in."""
        return self.numbers[start // self.width : -(-stop // self.width)], self.width, start % self.width
