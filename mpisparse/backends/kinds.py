"""Element kinds of gradients, as the kernels number them, and their conversion to and from float32."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpisparse.arrays import Floats

FP32, FP16, BF16, FP64 = 0, 1, 2, 3
ITEMSIZE = {FP32: 4, FP16: 2, BF16: 2, FP64: 8}
STORED: dict[int, Any] = {FP32: np.float32, FP16: np.uint16, BF16: np.uint16, FP64: np.float64}


def memory(address: int, kind: int, count: int) -> NDArray[Any]:
    """View memory at an address as an array; 16-bit kinds as their bit patterns."""
    raw = (ctypes.c_uint8 * (count * ITEMSIZE[kind])).from_address(address)
    return np.ctypeslib.as_array(raw).view(STORED[kind])


def widen(values: NDArray[Any], kind: int) -> Floats:
    """Convert elements as stored to float32, exactly for all kinds but FP64."""
    if kind == FP16:
        return values.view(np.float16).astype(np.float32)
    if kind == BF16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def round_to(values: Floats, kind: int) -> NDArray[Any]:
    """Round to the nearest finite values of a kind, as stored."""
    if kind == FP16:
        with np.errstate(over="ignore"):
            return np.clip(values.astype(np.float16), -65504, 65504).view(np.uint16)
    if kind == BF16:
        bits = values.view(np.uint32)
        halves = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        infinite = (halves & 0x7FFF) == 0x7F80
        return np.where(infinite, (halves & 0x8000) | 0x7F7F, halves).astype(np.uint16)
    return values.astype(STORED[kind])
