"""What a codec is, and which kernels it may call."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpisparse.arrays import Bytes, Floats, Halves

ALIGNMENT = 4  # payloads are packed one after the other and read as float32


class Kernels(Protocol):
    """The kernels of a backend that codecs call; each encoder leaves in x what it did not send.

    On a device values and payloads are torch tensors: fill and view_as work on both, as do len and slices.
    """

    def fill(self, array: NDArray[Any], value: float, /) -> None: ...
    def view_as(self, array: NDArray[Any], dtype: Any, /) -> NDArray[Any]: ...

    def encode_int8(self, x: Floats, scales: Floats, q: NDArray[np.int8]) -> None: ...
    def decode_int8(self, scales: Floats, q: NDArray[np.int8], x: Floats) -> None: ...
    def encode_fp16(self, x: Floats, scales: Floats, h: Halves) -> None: ...
    def decode_fp16(self, scales: Floats, h: Halves, x: Floats) -> None: ...
    def encode_bf16(self, x: Floats, h: Halves) -> None: ...
    def decode_bf16(self, h: Halves, x: Floats) -> None: ...


class Codec(Protocol):
    """Values to bytes and back, without memory: the same values give the same bytes.

    `encode` leaves in `values` what was not sent: values before = decoded + values after.
    `lossless`: nothing is left. `variable`: payloads differ in size. `blended`: the step mixes values with what was sent
    before (mpisparse.wire.blend) and then calls encode.
    A payload of fixed size whose bytes are all 0xFF decodes to NaN: an owner sends it if its sum overflows.
    """

    @property
    def name(self) -> str: ...
    @property
    def lossless(self) -> bool: ...
    @property
    def blended(self) -> bool: ...
    @property
    def variable(self) -> bool: ...

    def nbytes(self, count: int) -> int:
        """Size of the payload of `count` values, the largest possible one if it varies; a multiple of ALIGNMENT."""
        ...

    def encode(self, kernels: Kernels, values: Floats, payload: Bytes) -> int:
        """Write the payload into nbytes(len(values)) bytes and return the bytes written, a multiple of ALIGNMENT."""
        ...

    def decode(self, kernels: Kernels, payload: Bytes, values: Floats) -> None:
        """Read len(values) values from exactly the bytes that were written."""
        ...
