"""Sorted indices as bytes: long runs of neighbours by their two ends, the rest one by one; both coded."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpisparse.arrays import Bytes, Ints
from mpisparse.wire.codecs.protocol import ALIGNMENT

STRETCH = 64  # from this length on, neighbours take fewer bytes as two ends than one by one
HEAD = 4  # bytes of the number of stretches


def pack(backend: Any, index: Ints, lo: int, hi: int) -> Bytes:
    """Encode an ascending index inside [lo, hi): the number of stretches, their ends, and the indices outside stretches.

    Padded to a multiple of 4, because float32 values follow.
    """
    ends, singles = _split(index)
    head = np.array([len(ends) // 2], dtype=np.uint32).view(np.uint8)
    parts = [head, backend.encode_indices(ends, lo, hi + 1), backend.encode_indices(singles, lo, hi)]
    return np.concatenate([*parts, np.zeros(-sum(map(len, parts)) % ALIGNMENT, dtype=np.uint8)])


def unpack(backend: Any, payload: Bytes, lo: int, hi: int, count: int) -> tuple[Ints, int]:
    """Decode the index of `count` elements that pack() wrote at the start of a payload; also return its size in bytes."""
    stretches = int(payload[:HEAD].view(np.uint32)[0]) if len(payload) >= HEAD else -1
    if not 0 <= stretches <= count // STRETCH:
        raise _damaged()
    ends: Ints = np.empty(2 * stretches, dtype=np.int64)
    at = HEAD + _decode(backend, payload[HEAD:], lo, hi + 1, ends)
    begins, stops = ends[::2], ends[1::2]
    lengths = stops - begins
    singles = count - int(lengths.sum())
    if singles < 0:
        raise _damaged()
    index: Ints = np.empty(count, dtype=np.int64)
    at += _decode(backend, payload[at:], lo, hi, index[:singles])
    at += -at % ALIGNMENT
    if not stretches:
        return index, at
    before = np.cumsum(lengths) - lengths
    index[singles:] = np.arange(count - singles) + np.repeat(begins - before, lengths)
    return np.sort(index, kind="stable"), at


def _decode(backend: Any, payload: Bytes, lo: int, hi: int, out: Ints) -> int:
    used = int(backend.decode_indices(payload, lo, hi, out))
    if used < 0:
        raise _damaged()
    return used


def _damaged() -> RuntimeError:
    return RuntimeError("the indices of a message do not decode: it is damaged")


def _split(index: Ints) -> tuple[Ints, Ints]:
    """The begin and end of every long stretch of neighbours, and the indices outside stretches."""
    if len(index) < STRETCH:
        return index[:0], index
    begins = np.flatnonzero(np.diff(index, prepend=index[0] - 2) != 1)
    lengths = np.diff(begins, append=len(index))
    long = lengths >= STRETCH
    first = index[begins[long]]
    ends: Ints = np.stack([first, first + lengths[long]], axis=1).reshape(-1)
    return ends, index[np.repeat(~long, lengths)] if long.any() else index
