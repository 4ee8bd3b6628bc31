"""Coded indices (mpisparse.backends.gaps has the format) in NumPy; kernels/indices.hpp does the same."""

from __future__ import annotations

import numpy as np

from mpisparse.arrays import Bytes, Floats, Ints
from mpisparse.backends.gaps import ESCAPE, GROUP, GROUPED, MOST_LOW, PLAIN, low_bits


def encode_indices(index: Ints, lo: int, hi: int) -> Bytes:
    """Return the indices of [lo, hi) as bytes."""
    count, length = len(index), hi - lo
    if not count:
        return np.empty(0, dtype=np.uint8)
    gaps = np.diff(index, prepend=lo - 1) - 1
    wide, low = length.bit_length(), low_bits(count, length)
    lows, grouped = _group_parameters(gaps, wide)
    plain = count * (1 + low) + int((gaps >> low).sum())
    if grouped >= plain:
        return _write(np.array([PLAIN], dtype=np.uint8), gaps, np.full(count, low), gaps >> low, gaps[:0], wide)
    each = np.repeat(lows, GROUP)[:count]
    quotients = gaps >> each
    head = np.append(np.uint8(GROUPED), lows.astype(np.uint8))
    return _write(head, gaps, each, np.minimum(quotients, ESCAPE), quotients[quotients >= ESCAPE], wide)


def _group_parameters(gaps: Ints, wide: int) -> tuple[Ints, int]:
    """The parameter of every group, and the bits of all: from the mean gap downwards as long as that saves bits."""
    groups = -(-len(gaps) // GROUP)
    padded = np.zeros(groups * GROUP, dtype=np.int64)
    padded[: len(gaps)] = gaps
    rows = padded.reshape(groups, GROUP)
    sizes = np.full(groups, GROUP, dtype=np.int64)
    sizes[-1] = len(gaps) - GROUP * (groups - 1)
    means = rows.sum(axis=1) // sizes
    lows = np.minimum(MOST_LOW, np.frexp(means.astype(np.float64))[1].astype(np.int64))
    bits = _bits_of(rows, sizes, lows, wide)
    open_ = lows > 0
    while open_.any():
        fewer = _bits_of(rows, sizes, np.maximum(lows - 1, 0), wide)
        open_ &= fewer < bits
        lows = np.where(open_, lows - 1, lows)
        bits = np.where(open_, fewer, bits)
        open_ &= lows > 0
    return lows, 8 * groups + int(bits.sum())


def _bits_of(rows: Ints, sizes: Ints, lows: Ints, wide: int) -> Ints:
    """Bits of each group with its parameter; places behind the last gap are zeros and count for nothing."""
    quotients = rows >> lows[:, None]
    escapes = (quotients >= ESCAPE).sum(axis=1)
    bits: Ints = np.minimum(quotients, ESCAPE).sum(axis=1) + sizes * (1 + lows) + escapes * wide
    return bits


def _write(head: Bytes, gaps: Ints, lows: Ints, quotients: Ints, escaped: Ints, wide: int) -> Bytes:
    low_ends, unary_ends = np.cumsum(lows), np.cumsum(quotients + 1)
    unary, escapes = int(low_ends[-1]), int(low_ends[-1] + unary_ends[-1])
    bits = np.zeros(escapes + wide * len(escaped), dtype=np.uint8)
    for bit in range(int(lows.max())):
        has = lows > bit
        bits[(low_ends - lows + bit)[has]] = (gaps[has] >> bit) & 1
    bits[unary + unary_ends - 1] = 1
    shifts = np.arange(wide)
    bits[escapes:] = ((escaped[:, None] >> shifts) & 1).reshape(-1)
    return np.concatenate([head, np.packbits(bits, bitorder="little")])


def decode_indices(payload: Bytes, lo: int, hi: int, out: Ints) -> int:
    """Write the indices to out; return how many bytes they took, or -1 if the message is damaged."""
    count, length = len(out), hi - lo
    if not count:
        return 0
    if not len(payload) or count > length or payload[0] > GROUPED:
        return -1
    grouped, groups = payload[0] == GROUPED, -(-count // GROUP)
    head = 1 + (groups if grouped else 0)
    if len(payload) < head:
        return -1
    lows = np.full(count, low_bits(count, length))
    if grouped:
        lows = np.repeat(payload[1:head].astype(np.int64), GROUP)[:count]
    if (lows > MOST_LOW).any():
        return -1
    bits, low_ends = np.unpackbits(payload[head:], bitorder="little"), np.cumsum(lows)
    places = np.flatnonzero(bits[low_ends[-1] :])[:count]
    if len(places) < count:
        return -1
    quotients: Ints = np.diff(places, prepend=-1) - 1
    end = int(low_ends[-1] + places[-1]) + 1
    if grouped:
        if (quotients > ESCAPE).any():
            return -1
        escaped = np.flatnonzero(quotients == ESCAPE)
        wide = length.bit_length()
        if end + wide * len(escaped) > len(bits):
            return -1
        written = bits[end : end + wide * len(escaped)].reshape(-1, wide).astype(np.int64)
        quotients[escaped] = (written << np.arange(wide)).sum(axis=1)
        end += wide * len(escaped)
        if (quotients[escaped] < ESCAPE).any():
            return -1
    if (quotients > length >> lows).any():
        return -1
    gaps = quotients << lows
    for bit in range(int(lows.max())):
        has = lows > bit
        gaps[has] |= bits[(low_ends - lows + bit)[has]].astype(np.int64) << bit
    if (np.cumsum(gaps.astype(np.float64) + 1.0) > length).any():
        return -1
    out[:] = lo - 1 + np.cumsum(gaps + 1)
    return head + -(-end // 8)


def reaching(index: Ints, magnitude: Floats, threshold: float) -> Ints:
    """The candidates that reach a threshold."""
    return index[magnitude >= np.float32(threshold)]


def by_owner(index: Ints, block: int, size: int, rank: int) -> tuple[Ints, Ints, Ints]:
    """The places of an index in the order of their owners, how many each owner has, and where `rank` keeps its own ones."""
    owner = index // block % size
    order, counts = np.argsort(owner, kind="stable"), np.bincount(owner, minlength=size)
    mine = index[owner == rank]
    return order, counts, mine // (block * size) * block + mine % block
