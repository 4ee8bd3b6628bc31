"""The NumPy twins of the kernels that compare weights with a flat reference."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mpisparse.arrays import Bytes, Floats, Ints
from mpisparse.backends.kinds import FP32, memory, widen
from mpisparse.backends.protocol import GROUP_OF_WEIGHTS

Pointers = NDArray[np.uint64]


def _pieces(pointers: Pointers, ends: Ints, lo: int, hi: int) -> Iterator[tuple[int, int, Floats | None]]:
    """Each piece's share [begin, end) of [lo, hi) and its memory; None if there is none."""
    first = 0
    for pointer, last in zip(pointers.tolist(), ends.tolist(), strict=True):
        begin, end = max(first, lo), min(last, hi)
        if begin < end:
            yield begin, end, memory(pointer, FP32, last - first)[begin - first : end - first] if pointer else None
        first = last


def _check(kinds: Bytes) -> None:
    if (np.asarray(kinds) != FP32).any():
        raise ValueError("weights must be float32")


def subtract_apart(pointers: Pointers, ends: Ints, kinds: Bytes, reference: Floats, lo: int, out: Floats) -> None:
    """Write weights minus reference of [lo, lo + len(out)); a missing weight counts as equal."""
    _check(kinds)
    for begin, end, own in _pieces(pointers, ends, lo, lo + len(out)):
        out[begin - lo : end - lo] = 0.0 if own is None else own - reference[begin:end]


@np.errstate(invalid="ignore")
def select_apart(
    pointers: Pointers, ends: Ints, kinds: Bytes, reference: Floats, lo: int, hi: int, floor: float
) -> tuple[Ints, Floats, int]:
    """Collect the elements of [lo, hi) that are at least `floor` apart; watch them and all weights for non-finite values."""
    near = np.zeros_like(reference)
    near[lo:hi] = reference[lo:hi]
    difference = np.zeros_like(reference)
    subtract_apart(pointers, ends, kinds, near, 0, difference)
    bad = np.flatnonzero(~np.isfinite(difference))[:1]
    magnitude = np.abs(difference[lo:hi])
    at = np.flatnonzero(~(magnitude < np.float32(floor)))
    return at.astype(np.int64) + lo, magnitude[at], int(bad[0]) if len(bad) else -1


@np.errstate(over="ignore", invalid="ignore")
def group_norms(pointers: Pointers, ends: Ints, kinds: Bytes, reference: Floats, norms: Floats) -> int:
    """Write the norm of each group of 512 differences; return the first non-finite index or -1."""
    lanes, n = 16, len(reference)
    if len(norms) * GROUP_OF_WEIGHTS < n:
        raise ValueError("there must be a norm for each group")
    difference = np.zeros(len(norms) * GROUP_OF_WEIGHTS, dtype=np.float32)
    subtract_apart(pointers, ends, kinds, reference, 0, difference[:n])
    rows = difference.reshape(len(norms), GROUP_OF_WEIGHTS // lanes, lanes)
    sums = np.zeros((len(norms), lanes), dtype=np.float32)
    for row in range(rows.shape[1]):
        sums += rows[:, row] * rows[:, row]
    while lanes > 1:
        lanes //= 2
        sums = sums[:, :lanes] + sums[:, lanes:]
    norms[:] = np.minimum(np.sqrt(sums[:, 0]), np.finfo(np.float32).max)
    bad = np.flatnonzero(~np.isfinite(difference))[:1]
    return int(bad[0]) if len(bad) else -1


def histogram_apart(pointers: Pointers, ends: Ints, kinds: Bytes, reference: Floats, lo: int, hi: int) -> Ints:
    """Count the magnitudes of the differences by exponent and three bits of mantissa."""
    difference = np.zeros(hi - lo, dtype=np.float32)
    subtract_apart(pointers, ends, kinds, reference, lo, difference)
    bins = (difference.view(np.uint32) & 0x7FFFFFFF) >> 20
    return np.bincount(bins, minlength=2048).astype(np.int64)


def values_apart(pointers: Pointers, ends: Ints, kinds: Bytes, reference: Floats, index: Ints) -> Floats:
    """Return weights minus reference at ascending indices; a missing weight counts as equal."""
    _check(kinds)
    values: Floats = np.zeros(len(index), dtype=np.float32)
    for begin, end, own in _pieces(pointers, ends, 0, len(reference)):
        a, b = np.searchsorted(index, (begin, end)).tolist()
        if own is not None:
            values[a:b] = own[index[a:b] - begin] - reference[index[a:b]]
    return values


def move_apart(
    pointers: Pointers, ends: Ints, kinds: Bytes, reference: Floats, index: Ints, mean: Floats, own: Floats
) -> None:
    """Add the mean to the reference at ascending indices, and mean - own to the weights."""
    _check(kinds)
    reference[index] += mean
    for begin, end, weights in _pieces(pointers, ends, 0, len(reference)):
        a, b = np.searchsorted(index, (begin, end)).tolist()
        if weights is not None:
            weights[index[a:b] - begin] += mean[a:b] - own[a:b]


def add_stretch(pointers: Pointers, ends: Ints, kinds: Bytes, lo: int, values: Floats) -> None:
    """Add to the weights of [lo, lo + len(values))."""
    _check(kinds)
    for begin, end, own in _pieces(pointers, ends, lo, lo + len(values)):
        if own is not None:
            own += values[begin - lo : end - lo]


def divide_into(out: Floats, pointers: Pointers, ends: Ints, kinds: Bytes, by: float) -> int:
    """Write the gradients divided by a number, zeros where there is none; return the first non-finite index or -1."""
    first = 0
    for pointer, last, kind in zip(pointers.tolist(), ends.tolist(), kinds.tolist(), strict=True):
        out[first:last] = widen(memory(pointer, kind, last - first), kind) / np.float32(by) if pointer else 0.0
        first = last
    bad = np.flatnonzero(~np.isfinite(out))[:1]
    return int(bad[0]) if len(bad) else -1
