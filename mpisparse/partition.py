"""Blocks and partitions of the flat gradient vector: pure functions on integers, the same result on every rank.

The vector of n elements is cut into blocks at fixed `edges`; a partition is a run of blocks between two `borders`
(indices into edges). Partition p belongs to rank (p - step) mod size, so that over `size` steps every rank selects
in every partition once.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

PAPER_BLOCKS = 1024
PAPER_ALIGN = 32
BLOCKS_PER_RANK = 256


def even_edges(n: int, blocks: int) -> Ints:
    """Cut n elements into blocks whose lengths differ by one at most (never more blocks than elements)."""
    count = max(1, min(blocks, n))
    return np.array([i * n // count for i in range(count + 1)], dtype=np.int64)


def paper_edges(n: int, blocks: int = PAPER_BLOCKS) -> Ints:
    """Cut as the paper does: blocks a multiple of 32 long, the remainder in the last; short vectors get shorter blocks."""
    count = max(1, min(blocks, n))
    length = n // count
    if length >= PAPER_ALIGN:
        length -= length % PAPER_ALIGN
    edges = np.arange(count + 1, dtype=np.int64) * length
    edges[-1] = n
    return edges


def default_blocks(size: int) -> int:
    """Blocks for a rank count: enough that one of them is a small part of a partition."""
    return max(PAPER_BLOCKS, BLOCKS_PER_RANK * size)


def even_borders(blocks: int, size: int) -> Ints:
    """Share the blocks evenly: the start of every run."""
    return np.array([p * blocks // size for p in range(size + 1)], dtype=np.int64)


def owner(partition: int, step: int, size: int) -> int:
    """Tell which rank selects in a partition at a step."""
    return (partition - step) % size


def partition_of(rank: int, step: int, size: int) -> int:
    """Tell in which partition a rank selects at a step."""
    return (step + rank) % size


def block_counts(union: Ints, edges: Ints) -> Ints:
    """Count the selected indices (sorted) in every block."""
    return np.diff(np.searchsorted(union, edges)).astype(np.int64)


def best_borders(work: Ints, edges: Ints, size: int, longest: int | None = None) -> Ints:
    """Find the contiguous partition whose heaviest part is lightest, none longer than `longest` elements if given.

    A bound on the heaviest part is feasible if filling the parts greedily up to it needs no more than `size` of them; the
    least feasible bound is found by bisection. Among the partitions with that bound, cuts are taken as near to the even
    shares as they can be. `longest` is widened to what `size` runs of whole blocks can always meet.
    """
    blocks = len(work)
    total = int(work.sum())
    limit = _feasible_length(edges, size, longest)
    if total == 0:
        return even_borders(blocks, size) if limit is None else _cut(work, edges, size, 0, limit)
    low = max(-(-total // size), int(work.max()))
    high = total
    while low < high:
        middle = (low + high) // 2
        if _greedy(work, edges, size, middle, limit) is None:
            low = middle + 1
        else:
            high = middle
    return _cut(work, edges, size, low, limit)


def _feasible_length(edges: Ints, size: int, longest: int | None) -> int | None:
    if longest is None:
        return None
    block = int(np.diff(edges).max()) if len(edges) > 1 else 0
    return max(longest, -(-int(edges[-1]) // size) + block)


def _reach(prefix: list[int], ends: list[int], start: int, bound: int, limit: int | None) -> int:
    """Tell how far a part from block `start` may go with at most `bound` work and `limit` elements."""
    stop = bisect_right(prefix, prefix[start] + bound) - 1
    if limit is not None:
        stop = min(stop, bisect_right(ends, ends[start] + limit) - 1)
    return stop


def _greedy(work: Ints, edges: Ints, size: int, bound: int, limit: int | None) -> list[int] | None:
    """Fill the parts from the left; None if `size` of them do not reach the end."""
    prefix, ends = _prefix(work), edges.tolist()
    borders = [0]
    for _ in range(size):
        borders.append(_reach(prefix, ends, borders[-1], bound, limit))
    return borders if borders[-1] == len(work) else None


def _cut(work: Ints, edges: Ints, size: int, bound: int, limit: int | None) -> Ints:
    """Choose every border as near to its even share as the bound allows on both sides."""
    prefix, ends = _prefix(work), edges.tolist()
    latest = _greedy(work, edges, size, bound, limit)
    earliest = _earliest(work, edges, size, bound, limit)
    if latest is None or earliest is None:
        raise AssertionError("no partition meets its own bound")
    borders = [0]
    for p in range(1, size):
        share = bisect_right(prefix, prefix[-1] * p // size) - 1 if bound else p * len(work) // size
        least = max(earliest[p], borders[-1])
        most = min(latest[p], _reach(prefix, ends, borders[-1], bound, limit))
        borders.append(min(max(share, least), most))
    return np.array([*borders, len(work)], dtype=np.int64)


def _earliest(work: Ints, edges: Ints, size: int, bound: int, limit: int | None) -> list[int] | None:
    """The leftmost place each border can have: the greedy filling of the mirrored vector."""
    mirrored = (edges[-1] - edges)[::-1]
    filled = _greedy(work[::-1], mirrored, size, bound, limit)
    return None if filled is None else [len(work) - b for b in reversed(filled)]


def _prefix(work: Ints) -> list[int]:
    sums: list[int] = [0, *np.cumsum(work).tolist()]
    return sums


def paper_borders(borders: Ints, counts: Ints, edges: Ints, blocks: int = PAPER_BLOCKS) -> Ints:
    """Move one block between each pair of neighbours that is out of balance, in one sweep, as the paper does.

    `counts` are the elements selected in each partition. Never leaves a partition fewer than blocks / (4 size) blocks.
    """
    size = len(borders) - 1
    total = int(counts.sum())
    mean = total // size
    if mean == 0:
        return borders
    moved, load = borders.copy(), counts.astype(np.int64).copy()
    least = max(1, blocks // (4 * size))
    shift = int((edges[1] - edges[0]) * total // edges[-1])
    for i in range(size - 1):
        a, b = load[i] / mean, load[i + 1] / mean
        step = -1 if a > 1.05 and b < 0.95238 else 1 if b > 1.05 and a < 0.95238 else 0
        donor = i if step < 0 else i + 1
        if step == 0 or moved[donor + 1] - moved[donor] - 1 < least:
            continue
        moved[i + 1] += step
        load[i] += step * shift
        load[i + 1] -= step * shift
    return moved
