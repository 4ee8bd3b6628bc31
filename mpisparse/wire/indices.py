"""Indices on the wire: compressed sparse rows of at most 65,536 elements, with uint32 counts and uint16 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpisparse.arrays import Bytes, Ints

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.exchange import Exchange
    from mpisparse.core.records import Region
    from mpisparse.select.candidates import Found


ROW = 65_536


def nbytes_of(length: int, count: int, width: int = 2) -> int:
    """Bytes of so many indices in a region of so many elements: its rows' counts, then `width` bytes each, padded to 4."""
    return 4 * (-(-length // ROW) + -(-count * width // 4))


def unite(
    exchange: Exchange, backend: Backend, found: Found, threshold: float, regions: list[Region], workloads: list[int],
    tags: Bytes | None = None,
) -> tuple[Ints, Bytes | None]:  # fmt: skip
    """Gather what every rank selects in its region; returns the sorted union. Collective.

    `found` lies inside this rank's region; `workloads` are the counts above the threshold, in rank order. Of `tags`, a byte
    for every element there is, those of what is selected travel along and are returned too.
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
    counts, columns = backend.compress_rows(found.index, found.magnitude, threshold, regions[mine].lo, ROW, rows[mine])
    payload[: counts.nbytes] = backend.view_as(counts, np.uint8)
    place_of_tags = counts.nbytes + columns.nbytes
    payload[counts.nbytes : place_of_tags] = backend.view_as(columns, np.uint8)
    if tags is not None:
        payload[place_of_tags : place_of_tags + len(columns)] = tags[found.index[found.magnitude >= np.float32(threshold)]]
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
