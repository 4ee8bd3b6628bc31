"""The protocols of a codec and of the kernels that it may call."""

from __future__ import annotations

from collections.abc import Sequence
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
    def empty(self, count: int, dtype: Any, /) -> NDArray[Any]: ...
    def add(self, total: Floats, term: Floats, /) -> None: ...

    def encode_int8(self, x: Floats, scales: Floats, q: NDArray[np.int8]) -> None: ...
    def decode_int8(self, scales: Floats, q: NDArray[np.int8], x: Floats) -> None: ...
    def encode_fp16(self, x: Floats, scales: Floats, h: Halves) -> None: ...
    def decode_fp16(self, scales: Floats, h: Halves, x: Floats) -> None: ...
    def encode_bf16(self, x: Floats, h: Halves) -> None: ...
    def decode_bf16(self, h: Halves, x: Floats) -> None: ...
    def encode_int4(self, x: Floats, scales: Halves, codes: Bytes) -> None: ...
    def pack_int4(self, x: Floats, scales: Halves, codes: Bytes) -> None: ...
    def decode_int4(self, scales: Halves, codes: Bytes, x: Floats) -> None: ...
    def encode_int2(self, x: Floats, scales: Halves, codes: Bytes) -> None: ...
    def pack_int2(self, x: Floats, scales: Halves, codes: Bytes) -> None: ...
    def decode_int2(self, scales: Halves, codes: Bytes, x: Floats) -> None: ...
    def encode_sign(self, x: Floats, scales: Halves, codes: Bytes) -> None: ...
    def pack_sign(self, x: Floats, scales: Halves, codes: Bytes) -> None: ...
    def decode_sign(self, scales: Halves, codes: Bytes, x: Floats) -> None: ...

    def add_int8(self, scales: Floats, q: NDArray[np.int8], total: Floats) -> None: ...
    def add_fp16(self, scales: Floats, h: Halves, total: Floats) -> None: ...
    def add_bf16(self, h: Halves, total: Floats) -> None: ...
    def add_int4(self, scales: Halves, codes: Bytes, total: Floats) -> None: ...
    def add_int2(self, scales: Halves, codes: Bytes, total: Floats) -> None: ...
    def add_sign(self, scales: Halves, codes: Bytes, total: Floats) -> None: ...
    def subtract_int4(self, scales: Halves, codes: Bytes, total: Floats) -> None: ...
    def subtract_int2(self, scales: Halves, codes: Bytes, total: Floats) -> None: ...
    def subtract_sign(self, scales: Halves, codes: Bytes, total: Floats) -> None: ...


class Codec(Protocol):
    """Values to bytes and back, without memory: the same values give the same bytes.

    `encode` leaves in `values` what was not sent: values before = decoded + values after, to float32's rounding.
    `lossless`: nothing is left. `variable`: payloads differ in size. `blended`: the step mixes values with what was sent
    before (mpisparse.core.blend) and then calls encode.
    A payload of fixed size whose bytes are all 0xFF decodes to NaN: an owner sends it if its sum overflows.
    A codec may also have methods that save a pass: `add` and `subtract(kernels, payload, total)`, which add or subtract the
    decoded values, and `pack(kernels, values, payload)`, which writes what `encode` writes but leaves the values unchanged.
    `chunks(kernels)` returns kernels for many payloads in one call, or None (mpisparse.wire.codecs.few_bits).
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


def add_decoded(codec: Codec, kernels: Kernels, payload: Bytes, total: Floats) -> None:
    """Add the values of a payload to a sum, in one pass if the codec can, with the same bits as decode, then add."""
    add = getattr(codec, "add", None)
    if add is not None:
        add(kernels, payload, total)
    else:
        kernels.add(total, _decoded(codec, kernels, payload, len(total)))


def settle(
    codec: Codec, kernels: Any, rows: Sequence[Bytes], by: float, error: Floats, left: Floats, payload: Bytes
) -> tuple[int, Any]:
    """Encode left = sum of the rows, in order, / by + error, in one pass if the codec can; left becomes what is not sent.

    Returns the bytes written, and the first non-finite index or -1; a device returns the index as a vector of one.
    """
    fused = getattr(codec, "settle", None)
    if fused is not None:
        return len(payload), fused(kernels, rows, by, error, left, payload)
    codec.decode(kernels, rows[0], left)
    for row in rows[1:]:
        add_decoded(codec, kernels, row, left)
    kernels.divide(left, by)
    kernels.add(left, error)
    if hasattr(kernels, "first_bad") and not codec.variable:
        first = kernels.first_bad(left)
        return codec.encode(kernels, left, payload), first
    *_, bad = kernels.select(left, 0, len(left), float("inf"))
    return (codec.encode(kernels, left, payload) if bad < 0 else len(payload)), bad


def subtract_decoded(codec: Codec, kernels: Kernels, payload: Bytes, total: Floats) -> None:
    """Subtract the values of a payload, in one pass if the codec can."""
    subtract = getattr(codec, "subtract", None)
    if subtract is not None:
        subtract(kernels, payload, total)
    else:
        total -= _decoded(codec, kernels, payload, len(total))


def pack_values(codec: Codec, kernels: Kernels, values: Floats, payload: Bytes) -> int:
    """Encode values without changing them; return the bytes written."""
    pack = getattr(codec, "pack", None)
    if pack is not None:
        written: int = pack(kernels, values, payload)
        return written
    room = kernels.empty(len(values), np.float32)
    room[:] = values
    return codec.encode(kernels, room, payload)


def _decoded(codec: Codec, kernels: Kernels, payload: Bytes, count: int) -> Floats:
    values: Floats = kernels.empty(count, np.float32)
    codec.decode(kernels, payload, values)
    return values
