"""Counts as bytes, and the borders of partitions, in NumPy; kernels/tallies.hpp does the same.

A row of counts is a row of marks in which each count's items are followed by its end. Either the places of the items travel
or those of the ends, whichever are fewer, as coded indices.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from mpisparse.arrays import Bytes, Ints
from mpisparse.backends.numpy_indices import decode_indices, encode_indices


def encode_counts(counts: Ints) -> Bytes:
    """Counts as bytes."""
    if (counts < 0).any():
        raise ValueError("counts must not be negative")
    slots, total = len(counts), int(counts.sum())
    if total < slots:
        places = np.repeat(np.arange(slots), counts) + np.arange(total)
    else:
        places = np.cumsum(counts) + np.arange(slots)
    return encode_indices(places, 0, slots + total)


def decode_counts(payload: Bytes, total: int, out: Ints) -> bool:
    """Write the counts, whose sum is `total`, to out; False if the message is damaged."""
    slots = len(out)
    if total < 0:
        return False
    places: Ints = np.empty(min(slots, total), dtype=np.int64)
    if decode_indices(payload, 0, slots + total, places) < 0:
        return False
    if total < slots:
        items = places - np.arange(total)
        if (items >= slots).any():
            return False
        out[:] = np.bincount(items, minlength=slots)
    else:
        out[:] = np.diff(places, prepend=-1) - 1
    return int(out.sum()) == total


def encode_falling(counts: Ints, above: int, payload: Bytes) -> None:
    """Write what lies between counts that fall, and between the last and `above`, with zeros behind."""
    coded = encode_counts(counts - np.append(counts[1:], above)[: len(counts)])
    if len(coded) > len(payload):
        raise ValueError("the counts take more bytes than there is room for")
    payload[: len(coded)] = coded
    payload[len(coded) :] = 0


def decode_falling(payload: Bytes, total: int, above: int, out: Ints) -> bool:
    """Write the falling counts to out; False if the message is damaged."""
    if not decode_counts(payload, total, out):
        return False
    out[:] = np.cumsum(out[::-1])[::-1] + above
    return True


def least_borders(
    work: Sequence[Ints], edges: Ints, limit: int, rooms: Sequence[int], unit: int, low: int, high: int
) -> Ints:
    """Find the borders that make the heaviest part lightest; low and high enclose the bound on it.

    work[p][b] is what block b costs in part p, which has room for rooms[p] / unit of a bound and is at most `limit` elements
    long. A bound is feasible if filling the parts greedily up to it reaches the end.
    """
    blocks, ends = len(edges) - 1, edges.tolist()
    distinct = {id(w): _running(w) for w in {id(w): w for w in work}.values()}  # often all are one and the same
    parts = [(*distinct[id(w)], room) for w, room in zip(work, rooms, strict=True)]

    def fill(bound: int) -> list[int]:
        borders = [0]
        for sums, stops, room in parts:
            start = borders[-1]
            before = sums[bisect_left(stops, start)]
            stop = stops[bisect_right(sums, before + bound * room // unit) - 1]
            if limit < ends[-1]:
                stop = min(stop, bisect_right(ends, ends[start] + limit) - 1)
            borders.append(stop)
        return borders

    weighted = any(room != unit for room in rooms)
    while weighted and fill(high)[-1] < blocks:  # every part may have less room than one of mean weight
        high *= 2
    while low < high:
        middle = (low + high) // 2
        if fill(middle)[-1] < blocks:
            low = middle + 1
        else:
            high = middle
    return np.array(fill(low), dtype=np.int64)


def _running(work: Ints) -> tuple[list[int], list[int]]:
    """The distinct sums of runs of blocks from the first on, ascending, and where the longest run of each ends."""
    busy = np.flatnonzero(work)
    return [0, *np.cumsum(work[busy]).tolist()], [*busy.tolist(), len(work)]
