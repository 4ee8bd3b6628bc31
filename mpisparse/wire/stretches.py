"""Sorted indices as bytes: long runs of neighbours by their ends, the rest as compressed rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpisparse.arrays import Bytes, Ints
from mpisparse.wire.indices import ROW

STRETCH = 16  # neighbours that take fewer bytes as two ends than as columns


def pack(backend: Any, index: Ints, lo: int, hi: int) -> Bytes:
    """The bytes of an ascending index inside [lo, hi)."""
    stretches, singles = _split(index)
    head = np.array([len(stretches), len(singles)], dtype=np.int64)
    parts = [head.view(np.uint8), (stretches - [lo, 0]).reshape(-1).view(np.uint8)]
    if len(singles):
        rows = -(-(hi - lo) // ROW)
        counts, columns = backend.compress_rows(singles, np.zeros(len(singles), np.float32), 0.0, lo, ROW, rows)
        parts += [counts.view(np.uint8), columns.view(np.uint8), np.zeros(-columns.nbytes % 4, dtype=np.uint8)]
    return np.concatenate(parts)


def unpack(backend: Any, payload: Bytes, lo: int, hi: int) -> tuple[Ints, int]:
    """The index at the start of a payload, as pack() wrote it, and the number of its bytes."""
    stretched, single = payload[:16].view(np.int64).tolist()
    at = 16 + 16 * stretched
    starts, lengths = payload[16:at].view(np.int64).reshape(stretched, 2).T
    index: Ints = np.empty(int(lengths.sum()) + single, dtype=np.int64)
    if single:
        rows = -(-(hi - lo) // ROW)
        counts = payload[at : at + 4 * rows].view(np.uint32)
        columns = payload[at + 4 * rows : at + 4 * rows + 2 * single].view(np.uint16)
        if not backend.expand_rows(counts, columns, lo, ROW, index[:single]):
            raise RuntimeError("the rows of a message do not add up: it is damaged")
        at += 4 * rows + 4 * -(-single // 2)
    for start, length in zip((starts + lo).tolist(), lengths.tolist(), strict=True):
        index[single : single + length] = np.arange(start, start + length)
        single += length
    return np.sort(index, kind="stable") if stretched else index, at


def _split(index: Ints) -> tuple[Ints, Ints]:
    """Begin and length of every long stretch of neighbours, and the indices that lie in none."""
    if len(index) < STRETCH:
        return np.empty((0, 2), dtype=np.int64), index
    begins = np.flatnonzero(np.diff(index, prepend=index[0] - 2) != 1)
    lengths = np.diff(begins, append=len(index))
    long = lengths >= STRETCH
    stretches = np.stack([index[begins[long]], lengths[long]], axis=1)
    return stretches, index[np.repeat(~long, lengths)] if long.any() else index
