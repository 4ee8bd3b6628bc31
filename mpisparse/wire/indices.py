"""Indices on the wire: compressed sparse rows of at most 65,536 elements, with uint32 counts and uint16 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpisparse.arrays import Bytes, Floats, Ints

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.exchange import Exchange
    from mpisparse.comm.regions import Region

ROW = 65_536


def nbytes_of(length: int, count: int, width: int = 2) -> int:
    """Bytes of `count` indices in a region of `length` elements: row counts, then `width` bytes per index, padded to 4."""
    return 4 * (-(-length // ROW) + -(-count * width // 4))


def unite(
    exchange: Exchange, backend: Backend, index: Ints, magnitude: Floats, threshold: float, regions: Sequence[Region],
    workloads: Sequence[int], tags: Bytes | None = None,
) -> tuple[Ints, Bytes | None]:  # fmt: skip
    """Gather what every rank selects in its region; return the indices in the order of the regions. Collective.

    `index` lies inside this rank's region; `workloads` are the counts that reach the threshold, in rank order. tags: one
    byte per element of the vector; those of selected elements are sent along and returned too.
    """
    rows = [-(-(r.hi - r.lo) // ROW) for r in regions]
    shares = [workloads[r.rank] for r in regions]
    width = 2 if tags is None else 3
    nbytes = [nbytes_of(r.hi - r.lo, count, width) for r, count in zip(regions, shares, strict=True)]
    starts = np.cumsum([0, *nbytes]).tolist()
    place = {r.rank: p for p, r in enumerate(regions)}
    order = [place[rank] for rank in range(len(regions))]
    mine = place[exchange.rank]
    payload = backend.empty(nbytes[mine], np.uint8)
    payload[-4:] = 0  # what lies behind the last column or tag
    counts, columns = backend.compress_rows(index, magnitude, threshold, regions[mine].lo, ROW, rows[mine])
    payload[: counts.nbytes] = backend.view_as(counts, np.uint8)
    place_of_tags = counts.nbytes + columns.nbytes
    payload[counts.nbytes : place_of_tags] = backend.view_as(columns, np.uint8)
    if tags is not None:
        payload[place_of_tags : place_of_tags + len(columns)] = tags[index[magnitude >= np.float32(threshold)]]
    gathered = exchange.allgatherv(payload, [nbytes[p] for p in order], [starts[p] for p in order])
    ends = np.cumsum([0, *shares]).tolist()
    union: Ints = backend.empty(ends[-1], np.int64)
    arrived = None if tags is None else np.empty(ends[-1], dtype=np.uint8)
    for p, region in enumerate(regions):
        block = gathered[starts[p] : starts[p + 1]]
        row_counts, rest = backend.view_as(block[: 4 * rows[p]], np.uint32), block[4 * rows[p] :]
        columns = backend.view_as(rest[: 2 * shares[p]], np.uint16)
        if not backend.expand_rows(row_counts, columns, region.lo, ROW, union[ends[p] : ends[p + 1]]):
            raise RuntimeError(f"r{exchange.rank} | the rows of rank {region.rank} do not add up: the message is damaged")
        if arrived is not None:
            arrived[ends[p] : ends[p + 1]] = rest[2 * shares[p] : 3 * shares[p]]
    return union, arrived
