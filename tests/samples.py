"""Shared by the kernel tests: difficult numbers, gradients of every type, and bitwise comparison."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpisparse.backends.kinds import BF16, FP16, FP32, FP64, widen
from mpisparse.select.threshold import HUGE, TINY

FLOORS = (0.0, TINY, 1e-40, 0.02, 1.0, HUGE)
SPECIAL = np.array([0.0, -0.0, TINY, -TINY, 1e-40, 1.0, -1.0, 1.0, HUGE, -HUGE], dtype=np.float32)
TYPES = {FP32: torch.float32, FP16: torch.float16, BF16: torch.bfloat16, FP64: torch.float64}
NONFINITE = np.array([np.nan, np.inf, -np.inf], dtype=np.float32)

Flat = tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.uint8]]


def values(rng: np.random.Generator, n: int, *, nonfinite: bool = False) -> NDArray[np.float32]:
    """Draw heavy-tailed values with ties, mixed with special values."""
    x = (rng.standard_t(2, n) * 0.01).astype(np.float32)
    x[rng.random(n) < 0.1] = 0.02
    at = rng.random(n) < 0.1
    x[at] = rng.choice(SPECIAL, at.sum())
    if nonfinite and n:
        x[rng.integers(0, n, 3)] = rng.choice(NONFINITE, 3)
    return x


def gradients(x: NDArray[np.float32], cuts: list[int], kinds: list[int | None]) -> tuple[Flat, list[torch.Tensor]]:
    """Split x into gradients of the given types (None: absent); keep the tensors alive while the addresses are used."""
    bounds = [0, *cuts, len(x)]
    clipped = torch.from_numpy(np.where(np.isfinite(x), np.clip(x, -6e4, 6e4), x))
    alive = [
        (torch.from_numpy(x) if kind in (None, FP32) else clipped)[begin:end].to(TYPES[kind or FP32], copy=True)
        for (begin, end), kind in zip(pairwise(bounds), kinds, strict=True)
    ]
    pointers = [0 if kind is None else part.data_ptr() for kind, part in zip(kinds, alive, strict=True)]
    types = np.array([kind or FP32 for kind in kinds], dtype=np.uint8)
    return (np.array(pointers, dtype=np.uint64), np.array(bounds[1:], dtype=np.int64), types), alive


def assert_same(got: Any, expected: Any) -> None:
    """Assert equal types, shapes and bits. Any two NaNs are equal: an addition may return either operand's NaN."""
    if isinstance(expected, tuple):
        for a, b in zip(got, expected, strict=True):
            assert_same(a, b)
    elif isinstance(expected, np.ndarray):
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        if got.dtype.kind == "f":
            number = ~np.isnan(expected)
            np.testing.assert_array_equal(np.isnan(got), ~number)
            got, expected = got[number].view(f"u{got.itemsize}"), expected[number].view(f"u{expected.itemsize}")
        np.testing.assert_array_equal(got, expected)
    else:
        assert got == expected


def halfway(kind: int) -> NDArray[np.float32]:
    """Return all finite 16-bit values, the midpoints between neighbours, and the float32 neighbours of the midpoints."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    x = np.unique(widen(patterns, kind))
    x = x[np.isfinite(x)].astype(np.float64)
    middles = ((x[1:] + x[:-1]) / 2).astype(np.float32)
    around = [np.nextafter(middles, np.float32(side)) for side in (-HUGE, HUGE)]
    return np.concatenate([x.astype(np.float32), middles, *around])
