"""The kernels of int4, int2 and sign in NumPy. docs/results/codecs.md says where the levels come from.

A group of values has one bfloat16 scale. A value is sent as the number of a level: a constant times the scale. The constants
have few bits, so that their products with a scale are exact in float32 unless they are denormal.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from mpisparse.arrays import Bytes, Floats, Halves
from mpisparse.backends.kinds import BF16, round_to, widen
from mpisparse.backends.protocol import FEW_BITS

ROW = 16  # values that the native kernels add at once

# int4: the scale is the value of largest magnitude, with its sign. Levels ascend.
INT4_ZERO = 7
INT4_LEVELS = np.array([-224, -176, -136, -102, -70, -41, -16, 0, 18, 44, 73, 104, 138, 173, 211, 256], np.float32)
INT4_LEVELS /= np.float32(256)
INT4_SPLITS = (INT4_LEVELS[1:] + INT4_LEVELS[:-1]) / np.float32(2)

# int2: the scale is the outer level that is best, in least squares, if magnitudes from INT2_FIRST x the largest on are outer
# ones. Then magnitudes from INT2_SPLIT x scale on are. Bit 0 of a code tells the outer level, bit 1 the sign.
INT2_FIRST, INT2_INNER = np.float32(49 / 128), np.float32(9 / 32)
INT2_SPLIT = (INT2_INNER + 1) / np.float32(2)
INT2_LEVELS = np.array([INT2_INNER, 1, -INT2_INNER, -1], np.float32)

LEVELS: dict[str, Floats] = {"int4": INT4_LEVELS, "int2": INT2_LEVELS, "sign": np.array([1, -1], np.float32)}


def _encode(codec: str, x: Floats, scales: Halves, codes: Bytes) -> None:
    """Encode as level x scale; x becomes the rounding error. A group whose scale is 0 sends nothing."""
    form = FEW_BITS[codec]
    groups = np.zeros((len(scales), form.group), np.float32)
    groups.reshape(-1)[: len(x)] = x
    scales[:] = _scales(codec, groups, len(x))
    scale = widen(scales, BF16)[:, None]
    nothing = scale == 0
    found = np.where(nothing, INT4_ZERO if codec == "int4" else 0, _nearest(codec, groups, scale)).astype(np.uint8)
    sent = np.where(nothing, np.float32(0), LEVELS[codec][found] * scale)
    x[:] = (groups - sent).reshape(-1)[: len(x)]
    parts = found.reshape(len(scales), 8 // form.bits, form.nbytes)
    packed = np.bitwise_or.reduce(parts << _shifts(form.bits), axis=1)
    codes[:] = packed.reshape(-1)[: len(codes)]


def _decode(codec: str, scales: Halves, codes: Bytes, x: Floats) -> None:
    """Decode what _encode wrote."""
    x[:] = _decoded(codec, scales, codes, len(x))


def _pack(codec: str, x: Floats, scales: Halves, codes: Bytes) -> None:
    """Write what _encode writes; x is only read."""
    _encode(codec, x.copy(), scales, codes)


def _add(codec: str, scales: Halves, codes: Bytes, total: Floats) -> None:
    """Add what _decode gives."""
    total += _decoded(codec, scales, codes, len(total))


def _subtract(codec: str, scales: Halves, codes: Bytes, total: Floats) -> None:
    """Subtract what _decode gives."""
    total -= _decoded(codec, scales, codes, len(total))


def _settle(
    codec: str, rows: Sequence[tuple[Halves, Bytes]], by: float, error: Floats, left: Floats, scales: Halves, codes: Bytes
) -> int:
    """Sum the rows into left, divide, add the error and encode; return the first index that is not finite, or -1."""
    left[:] = _decoded(codec, *rows[0], len(left))
    for row in rows[1:]:
        left += _decoded(codec, *row, len(left))
    left /= np.float32(by)
    left += error
    bad = np.flatnonzero(~np.isfinite(left))
    if len(bad):
        return int(bad[0])
    _encode(codec, left, scales, codes)
    return -1


encode_int4, encode_int2, encode_sign = (partial(_encode, codec) for codec in FEW_BITS)
decode_int4, decode_int2, decode_sign = (partial(_decode, codec) for codec in FEW_BITS)
pack_int4, pack_int2, pack_sign = (partial(_pack, codec) for codec in FEW_BITS)
add_int4, add_int2, add_sign = (partial(_add, codec) for codec in FEW_BITS)
subtract_int4, subtract_int2, subtract_sign = (partial(_subtract, codec) for codec in FEW_BITS)
settle_int4, settle_int2, settle_sign = (partial(_settle, codec) for codec in FEW_BITS)


def _decoded(codec: str, scales: Halves, codes: Bytes, count: int) -> Floats:
    form = FEW_BITS[codec]
    padded = np.zeros(len(scales) * form.nbytes, np.uint8)
    padded[: len(codes)] = codes
    parts = padded.reshape(len(scales), 1, form.nbytes) >> _shifts(form.bits)
    found = (parts & ((1 << form.bits) - 1)).reshape(len(scales), form.group)
    values: Floats = (LEVELS[codec][found] * widen(scales, BF16)[:, None]).reshape(-1)[:count]
    return values


def _shifts(bits: int) -> Bytes:
    """Where in a byte the codes of values j, j + nbytes, j + 2 nbytes, ... are."""
    return np.arange(0, 8, bits, dtype=np.uint8)[:, None]


def _scales(codec: str, groups: Floats, count: int) -> Halves:
    """Return the scales of groups, of which the last may end early, as bfloat16."""
    counts = np.full(len(groups), groups.shape[1], np.float32)
    counts[-1:] = count - groups.shape[1] * (len(groups) - 1)
    halves: Halves = round_to(SCALES[codec](groups, counts), BF16)
    halves[halves == 0x8000] = 0
    return halves


def _signed_largest(groups: Floats, _: Floats) -> Floats:
    most, least = groups.max(axis=1, initial=0.0), groups.min(axis=1, initial=0.0)
    return np.asarray(np.where(most >= -least, most, least), np.float32)


def _best_outer_level(groups: Floats, counts: Floats) -> Floats:
    sizes = np.abs(groups)
    outer = sizes >= INT2_FIRST * sizes.max(axis=1, initial=0.0)[:, None]
    share = np.float32(1 / groups.shape[1])  # of sums, so that they are finite
    parts, many = sizes * share, outer.sum(axis=1).astype(np.float32)
    total = _sums(np.where(outer, parts, np.float32(0)))
    product = INT2_INNER * (_sums(parts) - total) + total
    square = INT2_INNER * INT2_INNER * (counts - many) + many
    return np.asarray(product / (square * share), np.float32)


def _mean_magnitude(groups: Floats, counts: Floats) -> Floats:
    return _sums(np.abs(groups) * (np.float32(1) / counts)[:, None])


SCALES = {"int4": _signed_largest, "int2": _best_outer_level, "sign": _mean_magnitude}


def _sums(groups: Floats) -> Floats:
    """Add up each group row by row, then the lanes of a row by halves: the order of the other backends."""
    lanes = np.zeros((len(groups), ROW), np.float32)
    for row in range(0, groups.shape[1], ROW):
        lanes += groups[:, row : row + ROW]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def _nearest(codec: str, groups: Floats, scale: Floats) -> Bytes:
    """Return the numbers of the levels to send; a value in the middle of two gets the upper, or the outer one."""
    if codec == "sign":
        return np.signbit(groups).astype(np.uint8)
    if codec == "int2":
        return (2 * np.signbit(groups) + (np.abs(groups) >= INT2_SPLIT * scale)).astype(np.uint8)
    turned, size = np.where(scale < 0, -groups, groups), np.abs(scale)
    found = np.zeros(groups.shape, np.uint8)
    for split in INT4_SPLITS:
        found += turned >= split * size
    return found
