"""Payload layout of fp16 and int8: a float32 scale per group of values, then the values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpisparse.arrays import Bytes, Floats
from mpisparse.backends.protocol import GROUP

if TYPE_CHECKING:
    from mpisparse.wire.codecs.protocol import Kernels


def grouped_nbytes(count: int, itemsize: int) -> int:
    """Size of scales and values, padded to a multiple of 4."""
    return 4 * (-(-count // GROUP) + -(-count * itemsize // 4))


def split_payload(kernels: Kernels, payload: Bytes, count: int, dtype: type[np.generic]) -> tuple[Floats, NDArray[Any]]:
    """Return views of the scales and of the values in a payload of `count` values."""
    scales_nbytes = 4 * -(-count // GROUP)
    values = kernels.view_as(payload[scales_nbytes:], dtype)
    return kernels.view_as(payload[:scales_nbytes], np.float32), values
