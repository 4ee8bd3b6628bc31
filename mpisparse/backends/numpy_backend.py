"""Every kernel in plain NumPy: the backend where no compiler was found, and the oracle of the kernel tests.

mpisparse.backends.protocol explains the arguments. Only `load_backend` in mpisparse.backends.device imports this module;
a test enforces it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpisparse.arrays import Bytes, Doubles, Floats, Halves, Ints
from mpisparse.backends.host_arrays import array_of as array_of
from mpisparse.backends.host_arrays import bytes_at as bytes_at
from mpisparse.backends.host_arrays import copy as copy
from mpisparse.backends.host_arrays import empty as empty
from mpisparse.backends.host_arrays import fill as fill
from mpisparse.backends.host_arrays import from_host as from_host
from mpisparse.backends.host_arrays import pick as pick
from mpisparse.backends.host_arrays import put_bytes as put_bytes
from mpisparse.backends.host_arrays import search as search
from mpisparse.backends.host_arrays import to_host as to_host
from mpisparse.backends.host_arrays import view_as as view_as
from mpisparse.backends.keys import keys_of
from mpisparse.backends.kinds import BF16, FP16, memory, round_to, widen
from mpisparse.backends.numpy_apart import add_stretch as add_stretch
from mpisparse.backends.numpy_apart import divide_into as divide_into
from mpisparse.backends.numpy_apart import group_norms as group_norms
from mpisparse.backends.numpy_apart import histogram_apart as histogram_apart
from mpisparse.backends.numpy_apart import move_apart as move_apart
from mpisparse.backends.numpy_apart import select_apart as select_apart
from mpisparse.backends.numpy_apart import subtract_apart as subtract_apart
from mpisparse.backends.numpy_apart import values_apart as values_apart
from mpisparse.backends.numpy_chunks import decode_chunks as decode_chunks
from mpisparse.backends.numpy_chunks import encode_chunks as _encode_chunks
from mpisparse.backends.numpy_chunks import settle_chunks as settle_chunks
from mpisparse.backends.numpy_few_bits import add_int2 as add_int2
from mpisparse.backends.numpy_few_bits import add_int4 as add_int4
from mpisparse.backends.numpy_few_bits import add_sign as add_sign
from mpisparse.backends.numpy_few_bits import decode_int2 as decode_int2
from mpisparse.backends.numpy_few_bits import decode_int4 as decode_int4
from mpisparse.backends.numpy_few_bits import decode_sign as decode_sign
from mpisparse.backends.numpy_few_bits import encode_int2 as encode_int2
from mpisparse.backends.numpy_few_bits import encode_int4 as encode_int4
from mpisparse.backends.numpy_few_bits import encode_sign as encode_sign
from mpisparse.backends.numpy_few_bits import pack_int2 as pack_int2
from mpisparse.backends.numpy_few_bits import pack_int4 as pack_int4
from mpisparse.backends.numpy_few_bits import pack_sign as pack_sign
from mpisparse.backends.numpy_few_bits import settle_int2 as settle_int2
from mpisparse.backends.numpy_few_bits import settle_int4 as settle_int4
from mpisparse.backends.numpy_few_bits import settle_sign as settle_sign
from mpisparse.backends.numpy_few_bits import subtract_int2 as subtract_int2
from mpisparse.backends.numpy_few_bits import subtract_int4 as subtract_int4
from mpisparse.backends.numpy_few_bits import subtract_sign as subtract_sign
from mpisparse.backends.numpy_indices import by_owner as by_owner
from mpisparse.backends.numpy_indices import decode_indices as decode_indices
from mpisparse.backends.numpy_indices import encode_indices as encode_indices
from mpisparse.backends.numpy_indices import reaching as reaching
from mpisparse.backends.numpy_nets import gather as gather
from mpisparse.backends.numpy_nets import learn as learn
from mpisparse.backends.numpy_nets import predict as predict
from mpisparse.backends.numpy_nets import record as record
from mpisparse.backends.numpy_tallies import decode_counts as decode_counts
from mpisparse.backends.numpy_tallies import decode_falling as decode_falling
from mpisparse.backends.numpy_tallies import encode_counts as encode_counts
from mpisparse.backends.numpy_tallies import encode_falling as encode_falling
from mpisparse.backends.numpy_tallies import least_borders as least_borders
from mpisparse.backends.protocol import GROUP, PIECE

name = "numpy"


def use_threads(count: int) -> None:
    """Do nothing: NumPy computes on one thread."""


def _first_nonfinite(values: Floats, base: int = 0) -> int:
    bad = np.flatnonzero(~np.isfinite(values))
    return base + int(bad[0]) if len(bad) else -1


def _add(acc: Floats, pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes) -> int:
    begin, bad = 0, -1
    for pointer, end, kind in zip(pointers.tolist(), ends.tolist(), kinds.tolist(), strict=True):
        if pointer:
            part = acc[begin:end]
            with np.errstate(over="ignore", invalid="ignore"):
                part += widen(memory(pointer, kind, end - begin), kind)
            bad = _first_nonfinite(part, begin) if bad < 0 else bad
        begin = end
    return bad


def accumulate_select(
    acc: Floats, pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes, lo: int, hi: int, floor: float
) -> tuple[Ints, Floats, int]:
    """Add the gradients into acc and collect the elements of acc[lo:hi] that reach the floor."""
    bad = _add(acc, pointers, ends, kinds)
    index, magnitude, inside = select(acc, lo, hi, floor)
    bads = [b for b in (bad, inside) if b >= 0]
    return index, magnitude, min(bads, default=-1)


def peek_select(
    acc: Floats, pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes, lo: int, hi: int, floor: float
) -> tuple[Ints, Floats, int]:
    """As accumulate_select, but nothing is added: what would be found in acc[lo:hi] if it were."""
    part, begin = acc[lo:hi].copy(), 0
    for pointer, end, kind in zip(pointers.tolist(), ends.tolist(), kinds.tolist(), strict=True):
        a, b = max(begin, lo), min(end, hi)
        if pointer and a < b:
            with np.errstate(over="ignore", invalid="ignore"):
                part[a - lo : b - lo] += widen(memory(pointer, kind, end - begin), kind)[a - begin : b - begin]
        begin = end
    index, magnitude, bad = select(part, 0, len(part), floor)
    return index + lo, magnitude, bad + lo if bad >= 0 else -1


def accumulate_chunks(
    codec: str, acc: Floats, pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes, borders: Ints, chunk: int,
    payload: Bytes,
) -> int:  # fmt: skip
    """Add the gradients into acc and encode the sums; what is not sent stays. Return the first non-finite index or -1."""
    _add(acc, pointers, ends, kinds)
    bad = _first_nonfinite(acc)
    if bad < 0:
        _encode_chunks(codec, acc, borders.tolist(), chunk, payload)
    return bad


def average_select(
    acc: Floats, average: Floats, rate: float, pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes,
    lo: int, hi: int, floor: float,
) -> tuple[Ints, Floats, int]:  # fmt: skip
    """Add the gradients into acc, update average = rate x |gradient| + (1 - rate) x average, and select in it."""
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
    """Mix share x value + (1 - share) x previous at the union of two indices; also flag those of the first."""
    both = np.union1d(index, carried)
    new, old = np.zeros((2, len(both)), dtype=np.float32)
    new[np.searchsorted(both, index)] = values
    old[np.searchsorted(both, carried)] = previous
    mixed = np.float32(share) * new + (np.float32(1) - np.float32(share)) * old
    return both, mixed, np.isin(both, index).astype(np.uint8)


def drop_decayed(
    acc: Floats, index: Ints, values: Floats, selected: Bytes, mean: Floats, left: Floats, pending: float
) -> tuple[Ints, Floats]:
    """Drop elements that are not selected and whose mean is zero; their unsent momentum goes to `left`, `left` into acc."""
    decayed = (selected == 0) & (mean == 0)
    left[decayed] += np.float32(pending) * values[decayed]
    acc[index] += left
    return index[~decayed], values[~decayed]


def select(acc: Floats, lo: int, hi: int, floor: float) -> tuple[Ints, Floats, int]:
    """Collect the elements of acc[lo:hi] that reach the floor."""
    magnitude = np.abs(acc[lo:hi])
    at = np.flatnonzero(~(magnitude < np.float32(floor)))
    return at.astype(np.int64) + lo, magnitude[at], _first_nonfinite(magnitude, lo)


def accumulate_select_scored(
    acc: Floats, scores: Bytes, key: int, pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes,
    lo: int, hi: int, floor: float,
) -> tuple[Ints, Floats, int]:  # fmt: skip
    """As accumulate_select, by key instead of magnitude."""
    bad = _add(acc, pointers, ends, kinds)
    index, keys, inside = select_scored(acc, scores, key, lo, hi, floor)
    return index, keys, min((b for b in (bad, inside) if b >= 0), default=-1)


def select_scored(acc: Floats, scores: Bytes, key: int, lo: int, hi: int, floor: float) -> tuple[Ints, Floats, int]:
    """As select, by key instead of magnitude."""
    keys = keys_of(acc[lo:hi], scores[lo:hi], key)
    at = np.flatnonzero(~(keys < np.float32(floor)))
    return at.astype(np.int64) + lo, keys[at], _first_nonfinite(acc[lo:hi], lo)


def histogram_scored(acc: Floats, scores: Bytes, key: int, lo: int, hi: int) -> Ints:
    """As histogram, of keys."""
    return histogram(keys_of(acc[lo:hi], scores[lo:hi], key), 0, hi - lo)


def accumulate(acc: Floats, pointer: int, kind: int) -> int:
    """Add one gradient into its slice of the accumulator; return the first non-finite index or -1."""
    return _add(acc, np.array([pointer], np.uint64), np.array([len(acc)]), np.array([kind], np.uint8))


def late_nonfinite(acc: Floats) -> int:
    """Return -1: accumulate() reports at once."""
    return -1


def first_nonfinite(pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes) -> int:
    """Return the first non-finite flat index of the gradients, or -1; changes nothing."""
    begin = 0
    for pointer, end, kind in zip(pointers.tolist(), ends.tolist(), kinds.tolist(), strict=True):
        bad = _first_nonfinite(widen(memory(pointer, kind, end - begin), kind), begin) if pointer else -1
        if bad >= 0:
            return bad
        begin = end
    return -1


def histogram(acc: Floats, lo: int, hi: int) -> Ints:
    """Count magnitudes by exponent and three bits of mantissa: bin b holds bit patterns [b << 20, (b + 1) << 20)."""
    bins = (acc[lo:hi].view(np.uint32) & 0x7FFFFFFF) >> 20
    return np.bincount(bins, minlength=2048).astype(np.int64)


def piece_sums(values: Floats, begins: Ints, ends: Ints) -> Doubles:
    """Sum the magnitudes of each piece, and their squares, by halves in float64."""
    found = np.zeros((len(begins), 2))
    for i, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        x = np.zeros((2, PIECE))
        x[:, : end - begin] = np.abs(values[begin:end])
        x[1] *= x[1]
        while x.shape[1] > 1:
            half = x.shape[1] // 2
            x = x[:, :half] + x[:, half:]
        found[i] = x[:, 0]
    return found.reshape(-1)


def tail_counts(magnitudes: Floats, rungs: Floats) -> Ints:
    """Count, for each rung (ascending), the magnitudes that reach it; NaN reaches none."""
    reached = np.searchsorted(rungs, magnitudes[~np.isnan(magnitudes)], side="right")
    counts = np.bincount(reached, minlength=len(rungs) + 1)
    return np.cumsum(counts[::-1])[::-1][1:].astype(np.int64)


def block_counts(index: Ints, magnitude: Floats, threshold: float, edges: Ints) -> Ints:
    """Count the candidates that reach the threshold in each block; block b is [edges[b], edges[b + 1])."""
    return np.diff(np.searchsorted(index[magnitude >= np.float32(threshold)], edges)).astype(np.int64)


def compress_rows(
    index: Ints, magnitude: Floats, threshold: float, lo: int, row: int, rows: int
) -> tuple[NDArray[np.uint32], Halves]:
    """Return row counts and columns of the candidates that reach the threshold."""
    offset = index[magnitude >= np.float32(threshold)] - lo
    counts = np.bincount(offset // row, minlength=rows).astype(np.uint32)
    return counts, (offset % row).astype(np.uint16)


def expand_rows(counts: NDArray[np.uint32], columns: Halves, lo: int, row: int, out: Ints) -> bool:
    """Write the flat indices of compressed rows to out; False if the counts do not add up to its length."""
    if int(counts.sum()) != len(out) or len(columns) != len(out):
        return False
    out[:] = lo + np.repeat(np.arange(len(counts)), counts) * row + columns
    return True


def values_at(acc: Floats, index: Ints) -> Floats:
    """Return a copy of the values at index."""
    return acc[index]


def take(acc: Floats, index: Ints, out: Floats) -> None:
    """Move the values at index to out, leaving zeros in acc."""
    out[:] = acc[index]
    acc[index] = 0.0


def put(acc: Floats, index: Ints, values: Floats) -> None:
    """Set the values at index."""
    acc[index] = values


def add_at(acc: Floats, index: Ints, values: Floats) -> None:
    """Add to the values at index."""
    acc[index] += values


def add(total: Floats, term: Floats) -> None:
    """Add a term to a sum in place."""
    total += term


def divide(values: Floats, by: float) -> None:
    """Divide in place by a number, rounded to float32."""
    values /= np.float32(by)


def zero_at(address: int, kind: int, count: int, index: Ints) -> None:
    """Clear the elements at index in a published buffer of `count` elements."""
    memory(address, kind, count)[index] = 0


def publish_at(address: int, kind: int, count: int, index: Ints, values: Floats) -> None:
    """Write values at index, rounded to the buffer's kind; `values` becomes the rounding error."""
    rounded = round_to(values, kind)
    memory(address, kind, count)[index] = rounded
    values -= widen(rounded, kind)


def fletcher32(data: Bytes) -> int:
    """HDF5's checksum: running sums of big-endian 16-bit words modulo 65535; an odd last byte is a high byte."""
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
    """Encode as q x scale, one scale per group; x becomes the rounding error."""
    scales[:] = np.abs(_groups(x)).max(axis=1, initial=0.0) / np.float32(127)
    np.minimum(scales, np.float32(float.fromhex("0x1.020406p+121")), out=scales)
    scale = np.repeat(scales, GROUP)[: len(x)]
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.where(scale > 0, np.rint(x / scale), np.float32(0))
    q[:] = np.clip(steps, -127, 127)
    x -= q.astype(np.float32) * scale


def decode_int8(scales: Floats, q: NDArray[np.int8], x: Floats) -> None:
    """Decode what encode_int8 wrote."""
    x[:] = q.astype(np.float32) * np.repeat(scales, GROUP)[: len(x)]


def add_int8(scales: Floats, q: NDArray[np.int8], total: Floats) -> None:
    """Add what decode_int8 gives."""
    total += q.astype(np.float32) * np.repeat(scales, GROUP)[: len(total)]


def encode_fp16(x: Floats, scales: Floats, h: Halves) -> None:
    """Encode as fp16(x / scale) x scale, one power of two as scale per group; x becomes the rounding error."""
    most = np.abs(_groups(x)).max(axis=1, initial=0.0)
    exponent = np.clip(np.frexp(most)[1] - 15, -126, 127)
    scales[:] = np.where(most > 0, np.ldexp(np.float32(1), exponent), np.float32(1))
    scale = np.repeat(scales, GROUP)[: len(x)]
    h[:] = round_to(np.clip(x / scale, -32752, 32752), FP16)
    x -= widen(h, FP16) * scale


def decode_fp16(scales: Floats, h: Halves, x: Floats) -> None:
    """Decode what encode_fp16 wrote."""
    x[:] = widen(h, FP16) * np.repeat(scales, GROUP)[: len(x)]


def add_fp16(scales: Floats, h: Halves, total: Floats) -> None:
    """Add what decode_fp16 gives."""
    total += widen(h, FP16) * np.repeat(scales, GROUP)[: len(total)]


def encode_bf16(x: Floats, h: Halves) -> None:
    """Encode as the nearest finite bfloat16; x becomes the rounding error."""
    h[:] = round_to(x, BF16)
    x -= widen(h, BF16)


def decode_bf16(h: Halves, x: Floats) -> None:
    """Decode what encode_bf16 wrote."""
    x[:] = widen(h, BF16)


def add_bf16(h: Halves, total: Floats) -> None:
    """Add what decode_bf16 gives."""
    total += widen(h, BF16)
