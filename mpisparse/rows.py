"""Indices on the wire: compressed sparse rows of at most 65,536 elements, with uint32 counts and uint16 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mpisparse.agree import Found
    from mpisparse.backend import Backend
    from mpisparse.exchange import Exchange
    from mpisparse.parts import Region

Ints = NDArray[np.int64]

ROW = 65_536


def unite(
    exchange: Exchange, backend: Backend, found: Found, threshold: float, regions: list[Region], workloads: list[int]
) -> Ints:
    """Gather what every rank selects in its region; returns the sorted union. Collective.

    `found` lies inside this rank's region; `workloads` are the counts above the threshold, in rank order.
    """
    rows = [-(-(r.hi - r.lo) // ROW) for r in regions]
    shares = [workloads[r.rank] for r in regions]
    nbytes = [4 * (n + -(-count // 2)) for n, count in zip(rows, shares, strict=True)]
    starts = np.cumsum([0, *nbytes]).tolist()
    place = {r.rank: p for p, r in enumerate(regions)}
    order = [place[rank] for rank in range(len(regions))]
    mine = place[exchange.rank]
    payload = backend.empty(nbytes[mine], np.uint8)
    payload[-2:] = 0  # there may be no column there
    counts, columns = backend.compress_rows(found.index, found.magnitude, threshold, regions[mine].lo, ROW, rows[mine])
    payload[: counts.nbytes] = counts.view(np.uint8)
    payload[counts.nbytes : counts.nbytes + columns.nbytes] = columns.view(np.uint8)
    gathered = exchange.allgatherv(payload, [nbytes[p] for p in order], [starts[p] for p in order])
    ends = np.cumsum([0, *shares]).tolist()
    union: Ints = backend.empty(ends[-1], np.int64)
    for p, region in enumerate(regions):
        block = gathered[starts[p] : starts[p + 1]]
        row_counts, rest = block[: 4 * rows[p]].view(np.uint32), block[4 * rows[p] :].view(np.uint16)
        if not backend.expand_rows(row_counts, rest[: shares[p]], region.lo, ROW, union[ends[p] : ends[p + 1]]):
            raise RuntimeError(f"r{exchange.rank} | the rows of rank {region.rank} do not add up: the message is damaged")
    return union
