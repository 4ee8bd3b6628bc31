"""Indices on the wire: Golomb-Rice codes of the gaps between them, or 16-bit columns.

The cheapest form is used. Indices on the host are coded, which takes about half of the bytes at density 0.01 ("coded").
Only the sender knows the size of its code, so the ranks exchange the sizes first. A few indices are instead padded to the
bound that follows from their count, which all ranks know ("padded"): this adds some 5 % to few bytes, and saves a message.
Indices on a device stay there, as compressed sparse rows of at most 65,536 elements with uint32 counts and uint16 columns
("columns"): coding them would take two copies between host and device, and links between devices are fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpisparse.arrays import Bytes, Ints
from mpisparse.backends.gaps import most_nbytes
from mpisparse.comm.agreement import refuse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpisparse.backends.protocol import DeviceBackend, HostBackend
    from mpisparse.comm.agreement import Notice
    from mpisparse.comm.exchange import Exchange
    from mpisparse.comm.regions import Region

ROW = 65_536
FEW = 8192  # up to this many bytes of all ranks' indices are padded instead of preceded by their sizes
STATUS = 16  # bytes of a rank's status and its detail


class United(NamedTuple):
    """The union in the order of the regions, its tags, the form in which it travelled, and the bytes of indices received."""

    union: Any
    tags: Any
    form: str
    nbytes: int


def nbytes_of(length: int, count: int, width: int = 2) -> int:
    """Bytes of `count` indices as columns of a region: row counts, then `width` bytes per index, padded to 4."""
    return 4 * (-(-length // ROW) + -(-count * width // 4))


def rooms_of(regions: Sequence[Region], workloads: Sequence[int]) -> list[int]:
    """The largest number of bytes of every region's coded indices, in the order of the regions."""
    return [most_nbytes(int(workloads[r.rank]), r.hi - r.lo) for r in regions]


def unite(
    exchange: Exchange, backend: Any, index: Any, magnitude: Any, threshold: float, regions: Sequence[Region],
    workloads: Sequence[int], tags: Any = None, news: Notice | None = None,
) -> United:  # fmt: skip
    """Gather what every rank selects in its region. Collective. Raises on all ranks if a message is damaged.

    `index` lies inside this rank's region; `workloads` are the counts that reach the threshold, in rank order. tags: one
    byte per element of the vector; those of selected elements are sent along and returned too. news: this rank's status, if
    the ranks do not know it yet and indices are on the host; raises StepRefused on all ranks if any cannot go on.
    """
    if isinstance(index, np.ndarray):
        chosen = backend.reaching(index, magnitude, threshold)
        return _unite_coded(exchange, backend, chosen, regions, workloads, tags, news)
    return _unite_columns(exchange, backend, index, magnitude, threshold, regions, workloads, tags)


def _unite_coded(
    exchange: Exchange, backend: HostBackend, chosen: Ints, regions: Sequence[Region], workloads: Sequence[int],
    tags: Bytes | None, news: Notice | None,
) -> United:  # fmt: skip
    place = {r.rank: p for p, r in enumerate(regions)}
    rooms, shares = rooms_of(regions, workloads), [workloads[r.rank] for r in regions]
    order, mine = [place[rank] for rank in range(len(regions))], place[exchange.rank]
    coded, sizes = backend.encode_indices(chosen, regions[mine].lo, regions[mine].hi), rooms
    few = sum(rooms) <= FEW
    if few:
        coded = np.concatenate([coded, np.zeros(rooms[mine] - len(coded), dtype=np.uint8)])
    else:
        by_rank = exchange.allgather(np.array([len(coded)], dtype=np.int64))[:, 0].tolist()
        sizes = [by_rank[r.rank] for r in regions]
        if any(not 0 <= size <= room for size, room in zip(sizes, rooms, strict=True)):
            raise RuntimeError(f"r{exchange.rank} | the sizes of indices are {by_rank}: the message is damaged")
    tagged = [0] * len(regions) if tags is None else shares
    status = 0 if news is None else STATUS
    nbytes = [size + extra + status for size, extra in zip(sizes, tagged, strict=True)]
    starts, ends = np.cumsum([0, *nbytes]).tolist(), np.cumsum([0, *shares]).tolist()
    parts = [coded] if tags is None else [coded, tags[chosen]]
    if news is not None:
        parts.append(np.array([news.status, news.detail], dtype=np.int64).view(np.uint8))
    payload = parts[0] if len(parts) == 1 else np.concatenate(parts)
    gathered = exchange.allgatherv(payload, [nbytes[p] for p in order], [starts[p] for p in order])
    if news is not None:
        statuses = np.stack([gathered[starts[p + 1] - STATUS : starts[p + 1]].copy().view(np.int64) for p in order])
        exchange.nbytes_control += STATUS * (len(regions) - 1)
        if statuses[:, 0].any():
            refuse(statuses, news)
    union: Ints = np.empty(ends[-1], dtype=np.int64)
    arrived = None if tags is None else np.empty(ends[-1], dtype=np.uint8)
    for p, region in enumerate(regions):
        block = gathered[starts[p] : starts[p] + sizes[p]]
        if p == mine and len(chosen) == shares[p]:
            union[ends[p] : ends[p + 1]] = chosen
            used = sizes[p]
        else:
            used = backend.decode_indices(block, region.lo, region.hi, union[ends[p] : ends[p + 1]])
        if used < 0 or not (few or used == sizes[p]):
            raise RuntimeError(f"r{exchange.rank} | the indices of rank {region.rank} do not decode: the message is damaged")
        if arrived is not None:
            arrived[ends[p] : ends[p + 1]] = gathered[starts[p] + sizes[p] : starts[p + 1] - status]
    return United(union, arrived, "padded" if few else "coded", sum(sizes) - sizes[mine])


def _unite_columns(
    exchange: Exchange, backend: DeviceBackend, index: Any, magnitude: Any, threshold: float, regions: Sequence[Region],
    workloads: Sequence[int], tags: Any,
) -> United:  # fmt: skip
    rows = [-(-(r.hi - r.lo) // ROW) for r in regions]
    shares = [workloads[r.rank] for r in regions]
    nbytes = [nbytes_of(r.hi - r.lo, count, 2 if tags is None else 3) for r, count in zip(regions, shares, strict=True)]
    starts = np.cumsum([0, *nbytes]).tolist()
    place = {r.rank: p for p, r in enumerate(regions)}
    order = [place[rank] for rank in range(len(regions))]
    mine = place[exchange.rank]
    payload = backend.empty(nbytes[mine], np.uint8)
    payload[-4:] = 0  # padding after the last column
    counts, columns, tagged = _parts_of(backend, payload, rows[mine], shares[mine])
    backend.pack_rows(index, magnitude, threshold, regions[mine].lo, ROW, counts, columns)
    if tags is not None:
        own = backend.empty(shares[mine], np.int64)
        backend.unpack_rows(counts, columns, regions[mine].lo, regions[mine].hi, ROW, own)
        tagged[: shares[mine]] = backend.bytes_at(tags, own)
    room = backend.empty(starts[-1], np.uint8)
    gathered = exchange.allgatherv(payload, [nbytes[p] for p in order], [starts[p] for p in order], room)
    ends = np.cumsum([0, *shares]).tolist()
    union = backend.empty(ends[-1], np.int64)
    arrived = None if tags is None else backend.empty(ends[-1], np.uint8)
    for p, region in enumerate(regions):
        counts, columns, tagged = _parts_of(backend, gathered[starts[p] : starts[p + 1]], rows[p], shares[p])
        backend.unpack_rows(counts, columns, region.lo, region.hi, ROW, union[ends[p] : ends[p + 1]])
        if arrived is not None:
            arrived[ends[p] : ends[p + 1]] = tagged[: shares[p]]
    return United(union, arrived, "columns", sum(nbytes) - nbytes[mine])


def _parts_of(backend: Any, payload: Any, rows: int, count: int) -> tuple[Any, Any, Any]:
    """Views of the row counts, of the columns, and of what follows them in a payload."""
    counts, rest = payload[: 4 * rows], payload[4 * rows :]
    return backend.view_as(counts, np.uint32), backend.view_as(rest[: 2 * count], np.uint16), rest[2 * count :]
