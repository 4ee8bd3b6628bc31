"""The NumPy backend's kernels for the importance nets: record gradients, score elements, train.

Only operations that IEEE 754 defines to the last bit, in a fixed order, so that the native kernels give the same bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpisparse.arrays import Bytes, Floats, Halves, Ints
from mpisparse.backends.kinds import BF16, memory, round_to, widen
from mpisparse.backends.protocol import HIDDEN


def record(pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes, lo: int, out: Halves) -> None:
    """Write the gradients of [lo, lo + len(out)) as finite bfloat16; absent ones are zero."""
    out[:] = 0
    begin, hi = 0, lo + len(out)
    for pointer, end, kind in zip(pointers.tolist(), ends.tolist(), kinds.tolist(), strict=True):
        a, b = max(begin, lo), min(end, hi)
        if pointer and a < b:
            out[a - lo : b - lo] = round_to(widen(memory(pointer, kind, end - begin)[a - begin : b - begin], kind), BF16)
        begin = end


def gather(pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes, index: Ints, out: Floats) -> None:
    """Write the gradients at ascending indices; absent ones are zero."""
    out[:] = 0.0
    begin = 0
    for pointer, end, kind in zip(pointers.tolist(), ends.tolist(), kinds.tolist(), strict=True):
        a, b = np.searchsorted(index, (begin, end))
        if pointer and a < b:
            out[a:b] = widen(memory(pointer, kind, end - begin)[index[a:b] - begin], kind)
        begin = end


@np.errstate(over="ignore")
def _features(history: Halves, inverse: Floats, depth: int) -> Floats:
    """Signed logarithms of the last gradients, scaled per layer; positive where the sign agrees with the accumulator's."""
    rows = history.reshape(depth + 1, -1)
    x = widen(rows[:depth], BF16) * inverse
    length = ((np.float32(1) + np.abs(x)).view(np.int32) - np.int32(0x3F800000)).astype(np.float32) * np.float32(2**-23)
    sign = (x.view(np.uint32) & 0x80000000) ^ ((rows[depth].astype(np.uint32) & 0x8000) << 16)
    features: Floats = (length.view(np.uint32) ^ sign).view(np.float32)
    return features


def _forward(nets: Floats, x: Floats) -> tuple[Floats, Floats]:
    """Hidden units before the ReLU, and the output; row i of `nets` is the net of element i, column i of `x` its input."""
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
    """Score elements by their layers' nets: importance in (0, 1) in steps of 1 / 255; `ends` delimits the layers."""
    layer = _layers(ends)
    _, z = _forward(nets.reshape(len(ends), -1)[layer], _features(history, inverse[layer], depth))
    out[:] = np.minimum(_importance(z) * np.float32(255), np.float32(254))


@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def learn(
    nets: Floats, mean: Floats, square: Floats, history: Halves, inverse: Floats, ends: Ints, depth: int,
    magnitude: Floats, pairs: Ints, weights: Floats, batch: int, rate: float, corrections: Floats,
) -> None:  # fmt: skip
    """Train the nets with Adam to rank the first element of each pair above the second, by importance x magnitude.

    The loss of a batch is the weighted mean over its pairs of (second - first) / (second + first).
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
