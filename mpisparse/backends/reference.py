"""Every kernel in plain NumPy: the oracle of the tests, and the backend where no compiler was found.

Gradients arrive as addresses of dense memory in their parameter's own element order; `kinds` are the element types
below. `ends` are the parameters' ends in the flat vector; address 0 is an absent gradient.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpisparse.arrays import Bytes, Floats, Halves, Ints
from mpisparse.backends.host_arrays import add as add
from mpisparse.backends.host_arrays import array_of as array_of
from mpisparse.backends.host_arrays import divide as divide
from mpisparse.backends.host_arrays import empty as empty
from mpisparse.backends.host_arrays import from_host as from_host
from mpisparse.backends.host_arrays import late_nonfinite as late_nonfinite
from mpisparse.backends.host_arrays import pick as pick
from mpisparse.backends.host_arrays import search as search
from mpisparse.backends.host_arrays import to_host as to_host

FP32, FP16, BF16, FP64 = 0, 1, 2, 3
PRODUCTS, SCORES = 1, 2  # what scored elements are compared by; see keys_of
HIDDEN = 8  # units of a net that predicts importance
ITEMSIZE = {FP32: 4, FP16: 2, BF16: 2, FP64: 8}
STORED: dict[int, Any] = {FP32: np.float32, FP16: np.uint16, BF16: np.uint16, FP64: np.float64}
GROUP = 256

name = "numpy"


def memory(address: int, kind: int, count: int) -> NDArray[Any]:
    """An array over foreign memory, 16-bit types as their bit patterns."""
    raw = (ctypes.c_uint8 * (count * ITEMSIZE[kind])).from_address(address)
    return np.ctypeslib.as_array(raw).view(STORED[kind])


def widen(values: NDArray[Any], kind: int) -> Floats:
    """Exact float32 values of what memory() returned."""
    if kind == FP16:
        return values.view(np.float16).astype(np.float32)
    if kind == BF16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def round_to(values: Floats, kind: int) -> NDArray[Any]:
    """The nearest finite values of a type, as memory() stores it."""
    if kind == FP16:
        with np.errstate(over="ignore"):
            return np.clip(values.astype(np.float16), -65504, 65504).view(np.uint16)
    if kind == BF16:
        bits = values.view(np.uint32)
        halves = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        infinite = (halves & 0x7FFF) == 0x7F80
        return np.where(infinite, (halves & 0x8000) | 0x7F7F, halves).astype(np.uint16)
    return values.astype(STORED[kind])


def _first_bad(values: Floats, base: int = 0) -> int:
    bad = np.flatnonzero(~np.isfinite(values))
    return base + int(bad[0]) if len(bad) else -1


def _add(acc: Floats, pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes) -> int:
    begin, bad = 0, -1
    for pointer, end, kind in zip(pointers.tolist(), ends.tolist(), kinds.tolist(), strict=True):
        if pointer:
            part = acc[begin:end]
            with np.errstate(over="ignore", invalid="ignore"):
                part += widen(memory(pointer, kind, end - begin), kind)
            bad = _first_bad(part, begin) if bad < 0 else bad
        begin = end
    return bad


def accumulate_select(
    acc: Floats, pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes, lo: int, hi: int, floor: float
) -> tuple[Ints, Floats, int]:
    """Add the gradients into acc; return index and magnitude of what reaches the floor in acc[lo:hi], ascending, and the
    first non-finite index or -1."""
    bad = _add(acc, pointers, ends, kinds)
    index, magnitude, inside = select(acc, lo, hi, floor)
    bads = [b for b in (bad, inside) if b >= 0]
    return index, magnitude, min(bads, default=-1)


def average_select(
    acc: Floats, average: Floats, rate: float, pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes,
    lo: int, hi: int, floor: float,
) -> tuple[Ints, Floats, int]:  # fmt: skip
    """Add the gradients into acc, update average = rate x |gradient| + (1 - rate) x average, and collect from that."""
    begin, share = 0, np.float32(rate)
    for pointer, end, kind in zip(pointers.tolist(), ends.tolist(), kinds.tolist(), strict=True):
        part = average[begin:end]
        part *= np.float32(1) - share
        if pointer:
            part += share * np.abs(widen(memory(pointer, kind, end - begin), kind))
        begin = end
    bad = _add(acc, pointers, ends, kinds)
    index, magnitude, _ = select(average, lo, hi, floor)
    return index, magnitude, bad


def blend(index: Ints, values: Floats, carried: Ints, previous: Floats, share: float) -> tuple[Ints, Floats, Bytes]:
    """Mix share x value + (1 - share) x previous at the union of two ascending indices; also which are of the first."""
    both = np.union1d(index, carried)
    new, old = np.zeros((2, len(both)), dtype=np.float32)
    new[np.searchsorted(both, index)] = values
    old[np.searchsorted(both, carried)] = previous
    mixed = np.float32(share) * new + (np.float32(1) - np.float32(share)) * old
    return both, mixed, np.isin(both, index).astype(np.uint8)


def come_to_rest(
    acc: Floats, index: Ints, values: Floats, selected: Bytes, mean: Floats, left: Floats, pending: float
) -> tuple[Ints, Floats]:
    """Add to `left` what was still to come (pending x value) of elements that are not selected and of which nothing arrived;
    add `left` into acc; return the other elements with their values."""
    resting = (selected == 0) & (mean == 0)
    left[resting] += np.float32(pending) * values[resting]
    acc[index] += left
    return index[~resting], values[~resting]


def select(acc: Floats, lo: int, hi: int, floor: float) -> tuple[Ints, Floats, int]:
    """Return index and magnitude of what reaches the floor in acc[lo:hi], and its first non-finite index or -1."""
    magnitude = np.abs(acc[lo:hi])
    at = np.flatnonzero(~(magnitude < np.float32(floor)))
    return at.astype(np.int64) + lo, magnitude[at], _first_bad(magnitude, lo)


def keys_of(acc: Floats, scores: Bytes, key: int) -> Floats:
    """PRODUCTS: magnitude x (score + 1) / 256. SCORES: a float whose bits are those of the score, then of the magnitude."""
    magnitude = np.abs(acc)
    if key == PRODUCTS:
        share = (scores.astype(np.float32) + np.float32(1)) * np.float32(2**-8)
        with np.errstate(invalid="ignore"):
            product: Floats = magnitude * share
        return product
    bits: Floats = (scores.astype(np.uint32) << 23 | magnitude.view(np.uint32) >> 8).view(np.float32)
    return bits


def accumulate_select_scored(
    acc: Floats, scores: Bytes, key: int, pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes,
    lo: int, hi: int, floor: float,
) -> tuple[Ints, Floats, int]:  # fmt: skip
    """As accumulate_select, by keys that combine scores with magnitudes."""
    bad = _add(acc, pointers, ends, kinds)
    index, keys, inside = select_scored(acc, scores, key, lo, hi, floor)
    return index, keys, min((b for b in (bad, inside) if b >= 0), default=-1)


def select_scored(acc: Floats, scores: Bytes, key: int, lo: int, hi: int, floor: float) -> tuple[Ints, Floats, int]:
    """As select, by keys that combine scores with magnitudes."""
    keys = keys_of(acc[lo:hi], scores[lo:hi], key)
    at = np.flatnonzero(~(keys < np.float32(floor)))
    return at.astype(np.int64) + lo, keys[at], _first_bad(acc[lo:hi], lo)


def histogram_scored(acc: Floats, scores: Bytes, key: int, lo: int, hi: int) -> Ints:
    """As histogram, of keys that combine scores with magnitudes."""
    return histogram(keys_of(acc[lo:hi], scores[lo:hi], key), 0, hi - lo)


def record(pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes, lo: int, out: Halves) -> None:
    """Write the gradients of [lo, lo + len(out)) as finite bfloat16; an absent one is zeros."""
    out[:] = 0
    begin, hi = 0, lo + len(out)
    for pointer, end, kind in zip(pointers.tolist(), ends.tolist(), kinds.tolist(), strict=True):
        a, b = max(begin, lo), min(end, hi)
        if pointer and a < b:
            out[a - lo : b - lo] = round_to(widen(memory(pointer, kind, end - begin)[a - begin : b - begin], kind), BF16)
        begin = end


def gather(pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes, index: Ints, out: Floats) -> None:
    """Write the gradients at ascending indices; an absent one is zero."""
    out[:] = 0.0
    begin = 0
    for pointer, end, kind in zip(pointers.tolist(), ends.tolist(), kinds.tolist(), strict=True):
        a, b = np.searchsorted(index, (begin, end))
        if pointer and a < b:
            out[a:b] = widen(memory(pointer, kind, end - begin)[index[a:b] - begin], kind)
        begin = end


@np.errstate(over="ignore")
def _features(history: Halves, inverse: Floats, depth: int) -> Floats:
    """Signed logarithms of the last gradients in units of their layers; oriented by the accumulator, the last row."""
    rows = history.reshape(depth + 1, -1)
    x = widen(rows[:depth], BF16) * inverse
    length = ((np.float32(1) + np.abs(x)).view(np.int32) - np.int32(0x3F800000)).astype(np.float32) * np.float32(2**-23)
    sign = (x.view(np.uint32) & 0x80000000) ^ ((rows[depth].astype(np.uint32) & 0x8000) << 16)
    features: Floats = (length.view(np.uint32) ^ sign).view(np.float32)
    return features


def _forward(nets: Floats, x: Floats) -> tuple[Floats, Floats]:
    """The hidden units before they are rectified, and the output, of elements (last axis) in their own nets (rows)."""
    depth = len(x)
    units = nets[:, HIDDEN * depth : HIDDEN * (depth + 1)].T.copy()
    z = nets[:, HIDDEN * (depth + 2)].copy()
    for j in range(HIDDEN):
        for h in range(depth):
            units[j] += nets[:, j * depth + h] * x[h]
        z += nets[:, HIDDEN * (depth + 1) + j] * np.where(units[j] > 0, units[j], np.float32(0))
    return units, z


def _importance(z: Floats) -> Floats:
    half = np.float32(0.5)
    return (half + half * (z / (np.float32(1) + np.abs(z)))).astype(np.float32, copy=False)


def _layers(ends: Ints) -> Ints:
    return np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))


def predict(history: Halves, nets: Floats, inverse: Floats, ends: Ints, depth: int, out: Bytes) -> None:
    """Score elements by their layers' nets: importance in (0, 1) in steps of 1 / 255. `ends` are the layers' among them."""
    layer = _layers(ends)
    _, z = _forward(nets.reshape(len(ends), -1)[layer], _features(history, inverse[layer], depth))
    out[:] = np.minimum(_importance(z) * np.float32(255), np.float32(254))


@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def learn(
    nets: Floats, mean: Floats, square: Floats, history: Halves, inverse: Floats, ends: Ints, depth: int,
    magnitude: Floats, pairs: Ints, weights: Floats, batch: int, rate: float, corrections: Floats,
) -> None:  # fmt: skip
    """Learn from pairs (better, worse) to give the better the larger key, importance x magnitude, by Adam in batches.

    Goes down the slope of (worse - better) / (worse + better), the weighted mean over a batch of pairs.
    """
    layer, size = _layers(ends), HIDDEN * (depth + 2) + 1
    every = _features(history, inverse[layer], depth)
    f32 = np.float32
    for b, start in enumerate(range(0, len(weights), batch)):
        chosen = pairs[2 * start : 2 * (start + batch)]
        own, x = nets.reshape(-1, size)[layer[chosen]], every[:, chosen]
        units, z = _forward(own, x)
        key = (_importance(z) * magnitude[chosen]).reshape(-1, 2)
        both = (key[:, 0] + key[:, 1])[:, None]
        shares = key / both
        share = weights[start : start + batch] * (f32(2) * (shares[:, 0] * shares[:, 1]))
        slope = np.where(both[:, 0] > 0, share, f32(0))
        slope = np.stack([-slope, slope], axis=1).reshape(-1)
        wide = f32(1) + np.abs(z)
        at_z = (slope / _importance(z)) * (f32(0.5) / (wide * wide))
        at_unit = np.where(units > 0, at_z * own[:, HIDDEN * (depth + 1) : -1].T, f32(0))
        parts = [
            *(at_unit[j] * x[h] for j in range(HIDDEN) for h in range(depth)),
            *at_unit,
            *(at_z * np.where(units > 0, units, f32(0))),
            at_z,
        ]
        slopes = np.zeros((len(ends), size), dtype=np.float32)
        np.add.at(slopes, layer[chosen], np.stack(parts, axis=1))
        g = slopes.reshape(-1) / f32(len(chosen) // 2)
        mean[:] = f32(0.9) * mean + f32(0.1) * g
        square[:] = f32(0.99) * square + f32(0.01) * (g * g)
        first, second = corrections[2 * b : 2 * b + 2]
        nets -= f32(rate) * ((mean * first) / (np.sqrt(square * second) + f32(1e-8)))


def accumulate(acc: Floats, pointer: int, kind: int) -> int:
    """Add one gradient into its slice of the accumulator; return the first non-finite index or -1."""
    return _add(acc, np.array([pointer], np.uint64), np.array([len(acc)]), np.array([kind], np.uint8))


def first_nonfinite(pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes) -> int:
    """Read the gradients only: the first non-finite flat index, or -1."""
    begin = 0
    for pointer, end, kind in zip(pointers.tolist(), ends.tolist(), kinds.tolist(), strict=True):
        bad = _first_bad(widen(memory(pointer, kind, end - begin), kind), begin) if pointer else -1
        if bad >= 0:
            return bad
        begin = end
    return -1


def histogram(acc: Floats, lo: int, hi: int) -> Ints:
    """Count magnitudes by exponent and three bits of mantissa: bin b holds bit patterns [b << 20, (b + 1) << 20)."""
    bins = (acc[lo:hi].view(np.uint32) & 0x7FFFFFFF) >> 20
    return np.bincount(bins, minlength=2048).astype(np.int64)


def tail_counts(magnitudes: Floats, rungs: Floats) -> Ints:
    """Count, for every rung (ascending), the magnitudes that reach it; NaN reaches none."""
    reached = np.searchsorted(rungs, magnitudes[~np.isnan(magnitudes)], side="right")
    counts = np.bincount(reached, minlength=len(rungs) + 1)
    return np.cumsum(counts[::-1])[::-1][1:].astype(np.int64)


def block_counts(index: Ints, magnitude: Floats, threshold: float, edges: Ints) -> Ints:
    """Count the candidates (ascending) that reach the threshold between each two edges."""
    return np.diff(np.searchsorted(index[magnitude >= np.float32(threshold)], edges)).astype(np.int64)


def compress_rows(
    index: Ints, magnitude: Floats, threshold: float, lo: int, row: int, rows: int
) -> tuple[NDArray[np.uint32], Halves]:
    """Compressed sparse rows of the candidates that reach the threshold: counts for each row, columns inside it."""
    offset = index[magnitude >= np.float32(threshold)] - lo
    counts = np.bincount(offset // row, minlength=rows).astype(np.uint32)
    return counts, (offset % row).astype(np.uint16)


def expand_rows(counts: NDArray[np.uint32], columns: Halves, lo: int, row: int, out: Ints) -> bool:
    """Write the flat indices of compressed rows to out; False if the counts do not add up to it."""
    if int(counts.sum()) != len(out) or len(columns) != len(out):
        return False
    out[:] = lo + np.repeat(np.arange(len(counts)), counts) * row + columns
    return True


def read_at(acc: Floats, index: Ints, out: Floats) -> None:
    """Copy the values at index out of acc."""
    np.take(acc, index, out=out, mode="clip")


def take(acc: Floats, index: Ints, out: Floats) -> None:
    """Move the values at index out of acc, leaving zeros."""
    out[:] = acc[index]
    acc[index] = 0.0


def put(acc: Floats, index: Ints, values: Floats) -> None:
    """Set the values at index."""
    acc[index] = values


def add_at(acc: Floats, index: Ints, values: Floats) -> None:
    """Add to the values at index (no index twice)."""
    acc[index] += values


def zero_at(address: int, kind: int, count: int, index: Ints) -> None:
    """Clear the elements at index in a published buffer of count elements."""
    memory(address, kind, count)[index] = 0


def publish_at(address: int, kind: int, count: int, index: Ints, values: Floats) -> None:
    """Write values at index in the buffer's own type; values keep what rounding left over."""
    rounded = round_to(values, kind)
    memory(address, kind, count)[index] = rounded
    values -= widen(rounded, kind)


def fletcher32(data: Bytes) -> int:
    """HDF5's checksum: sums of big-endian 16-bit words (an odd last byte is a high one), modulo 65535, 0 only for 0."""
    words = np.append(data, np.zeros(len(data) % 2, np.uint8)).view(">u2").astype(np.uint64)
    one, two = 0, 0
    for start in range(0, len(words), 4096):
        block = words[start : start + 4096]
        weights = np.arange(len(block), 0, -1, dtype=np.uint64)
        two += one * len(block) + int(block @ weights)
        one += int(block.sum())
    return _fold(two) << 16 | _fold(one)


def _fold(total: int) -> int:
    return (total - 1) % 65535 + 1 if total else 0


def _groups(x: Floats) -> Floats:
    padded = np.zeros(-(-len(x) // GROUP) * GROUP, np.float32)
    padded[: len(x)] = x
    return padded.reshape(-1, GROUP)


def encode_int8(x: Floats, scales: Floats, q: NDArray[np.int8]) -> None:
    """Send q * scale for each group of 256; x keeps the rest."""
    scales[:] = np.abs(_groups(x)).max(axis=1, initial=0.0) / np.float32(127)
    np.minimum(scales, np.float32(float.fromhex("0x1.020406p+121")), out=scales)
    scale = np.repeat(scales, GROUP)[: len(x)]
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.where(scale > 0, np.rint(x / scale), np.float32(0))
    q[:] = np.clip(steps, -127, 127)
    x -= q.astype(np.float32) * scale


def decode_int8(scales: Floats, q: NDArray[np.int8], x: Floats) -> None:
    """The values that encode_int8 sent."""
    x[:] = q.astype(np.float32) * np.repeat(scales, GROUP)[: len(x)]


def encode_fp16(x: Floats, scales: Floats, h: Halves) -> None:
    """Send fp16(x / scale) * scale, scale a power of two for each group of 256; x keeps the rest."""
    most = np.abs(_groups(x)).max(axis=1, initial=0.0)
    exponent = np.clip(np.frexp(most)[1] - 15, -126, 127)
    scales[:] = np.where(most > 0, np.ldexp(np.float32(1), exponent), np.float32(1))
    scale = np.repeat(scales, GROUP)[: len(x)]
    h[:] = round_to(np.clip(x / scale, -32752, 32752), FP16)
    x -= widen(h, FP16) * scale


def decode_fp16(scales: Floats, h: Halves, x: Floats) -> None:
    """The values that encode_fp16 sent."""
    x[:] = widen(h, FP16) * np.repeat(scales, GROUP)[: len(x)]


def encode_bf16(x: Floats, h: Halves) -> None:
    """Send the nearest finite bfloat16; x keeps the rest."""
    h[:] = round_to(x, BF16)
    x -= widen(h, BF16)


def decode_bf16(h: Halves, x: Floats) -> None:
    """The values that encode_bf16 sent."""
    x[:] = widen(h, BF16)
