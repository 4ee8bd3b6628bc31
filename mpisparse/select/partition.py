"""Blocks and partitions of the flat gradient vector: pure functions on integers, the same result on every rank.

The vector of n elements is cut into blocks at fixed `edges`; a partition is a run of blocks between two `borders`
(indices into edges). Partition p belongs to rank (p - step) mod size, so that over `size` steps every rank selects
in every partition once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpisparse.arrays import Ints
from mpisparse.backends.numpy_tallies import least_borders

PAPER_BLOCKS = 1024
PAPER_ALIGN = 32
BLOCKS_PER_RANK, MOST_BLOCKS = 256, 16_384
FEW_BLOCKS, FEW_PER_RANK, PER_BLOCK = 384, 64, 2
ROOM = 256  # the room of a part of mean weight

LeastBorders = Callable[[Sequence[Ints], Ints, int, Sequence[int], int, int, int], Ints]


def even_edges(n: int, blocks: int) -> Ints:
    """Cut n elements into blocks whose lengths differ by one at most (never more blocks than elements)."""
    count = max(1, min(blocks, n))
    block = np.arange(count + 1, dtype=np.int64)
    edges: Ints = block * (n // count) + block * (n % count) // count
    return edges


def worked_edges(n: int, blocks: int, union: Ints, bounds: Ints, pick: Callable[[Ints, Ints], Ints] = np.take) -> Ints:
    """Cut half of the blocks evenly by elements and half by the indices selected last, so that no block holds many of them.

    bounds: further places to cut. `pick` takes elements of the union at given places.
    """
    share = max(1, len(union) // max(1, blocks // 2))
    sample = pick(union, np.arange(share - 1, len(union), share))
    edges: Ints = np.sort(np.concatenate([even_edges(n, blocks - blocks // 2), sample, bounds]))
    distinct: Ints = edges[np.append(True, edges[1:] != edges[:-1])]
    return distinct


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
    """Number of blocks for a rank count: each a small part of a partition, yet few enough to count in every step."""
    return max(PAPER_BLOCKS, min(BLOCKS_PER_RANK * size, MOST_BLOCKS), size)


def enough_blocks(blocks: int, size: int, selected: int) -> int:
    """Number of blocks, reduced if few elements are selected: the counts should take no more bytes than the elements."""
    return min(blocks, max(FEW_BLOCKS, FEW_PER_RANK * size, selected // PER_BLOCK))


def even_borders(blocks: int, size: int) -> Ints:
    """Divide the blocks evenly; return the start of every run."""
    return np.array([p * blocks // size for p in range(size + 1)], dtype=np.int64)


def owner(partition: int, step: int, size: int) -> int:
    """Tell which rank selects in a partition at a step."""
    return (partition - step) % size


def partition_of(rank: int, step: int, size: int) -> int:
    """Tell in which partition a rank selects at a step."""
    return (step + rank) % size


def block_counts(union: Ints, edges: Ints, search: Callable[[Ints, Ints], Ints] = np.searchsorted) -> Ints:
    """Count the selected indices (sorted) in every block; `search` is the backend's searchsorted."""
    return np.diff(search(union, edges)).astype(np.int64)


def best_borders(
    work: Sequence[Ints], edges: Ints, longest: int | None = None, weights: Sequence[int] | None = None,
    least: LeastBorders = least_borders,
) -> Ints:  # fmt: skip
    """Find the borders that make the heaviest part lightest, none longer than `longest` elements if given.

    work[p][b] is what block b would cost in partition p (its owner's count), times weights[p] if given, in units of their
    mean; a part of little weight holds at most four times as much as one of mean weight. A backend's `least` finds the least
    feasible bound on the heaviest part by bisection. `longest` is raised to a length that runs of whole blocks can always
    meet.
    """
    size, n = len(work), int(edges[-1])
    limit = n if not longest or longest >= n else max(longest, -(-n // size) + int(np.diff(edges).max()))
    distinct = {id(w): w for w in work}  # often all are the same array
    low, high = 0, max(int(w.sum()) for w in distinct.values())
    if high == 0:
        return best_borders([np.diff(edges)] * size, edges, longest) if n else even_borders(len(edges) - 1, size)
    if len(distinct) == 1 and weights is None:  # no bound below an equal share is feasible
        low = -(-high // size)
    return least(work, edges, limit, _rooms(weights, size), ROOM, low, high)


def _rooms(weights: Sequence[int] | None, size: int) -> list[int]:
    """The share of the bound that each part may hold, in units of 1 / ROOM: larger if its work weighs less."""
    if weights is None:
        return [ROOM] * size
    mean = max(1, sum(weights) // size)
    return [max(1, min(4 * ROOM, ROOM * mean // max(1, w))) for w in weights]


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


def imbalance(workloads: Ints) -> float:
    """How much more than the mean the busiest rank selected, as a share of the mean."""
    total = int(workloads.sum())
    return int(workloads.max()) * len(workloads) / total - 1 if total else 0.0
