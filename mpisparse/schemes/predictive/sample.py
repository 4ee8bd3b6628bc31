"""The elements from which nets learn: some of every layer, and of those that come near to being selected."""

from __future__ import annotations

import numpy as np

from mpisparse.arrays import Ints

LEAST = 16  # elements of every layer, where it has so many


def draw(generator: np.random.Generator, ends: Ints, count: int, candidates: Ints) -> Ints:
    """About `count` ascending indices: half by lot from each layer in proportion to its size, half from the candidates."""
    sizes = np.diff(ends, prepend=0)
    shares = np.minimum(sizes, np.maximum(LEAST, sizes * (count // 2) // max(1, int(ends[-1]))))
    layer = np.repeat(np.arange(len(ends)), shares)
    plain = (ends - sizes)[layer] + (generator.random(len(layer)) * sizes[layer]).astype(np.int64)
    near = candidates[generator.permutation(len(candidates))[: count // 2]]
    return np.union1d(plain, near)
