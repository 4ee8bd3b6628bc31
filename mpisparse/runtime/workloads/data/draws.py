"""Random numbers without a generator: a hash of (seed, epoch, index of the example, number of the draw).

The hash is splitmix64's: 64-bit integer arithmetic, the same bits on every machine and with every NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpisparse.arrays import Ints

Words = NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_HALF = np.uint64(32)


def _mix_(words: Words) -> Words:
    """Scramble each word in place."""
    words ^= words >> _SHIFTS[0]
    words *= _MULTIPLIERS[0]
    words ^= words >> _SHIFTS[1]
    words *= _MULTIPLIERS[1]
    words ^= words >> _SHIFTS[2]
    return words


def draw(indices: NDArray[Any], count: int, *, seed: int, epoch: int) -> Words:
    """Draw `count` random words for each index; the result has shape (indices, count)."""
    key = _mix_(np.array([seed & (2**64 - 1)], np.uint64) + _STEP)
    key = _mix_(key ^ np.array([epoch], np.uint64))
    keys = _mix_(indices.astype(np.uint64) * _STEP + key)
    return _mix_(keys[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _STEP)


def below(words: Words, limits: int | NDArray[Any]) -> Ints:
    """Map words to whole numbers in [0, limit), for limits below 2^32."""
    scaled = (words >> _HALF) * np.asarray(limits, np.uint64)
    return (scaled >> _HALF).astype(np.int64)


def shuffle(count: int, *, seed: int) -> Ints:
    """Return range(count), shuffled by the seed."""
    return np.argsort(draw(np.arange(count), 1, seed=seed, epoch=0)[:, 0], kind="stable")
