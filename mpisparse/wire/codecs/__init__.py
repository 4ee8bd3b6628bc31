"""How finely values are sent. One codec a file; a codec is its own configuration."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mpisparse.arrays import Bytes, Floats, Halves
from mpisparse.wire.codecs.bf16 import Bf16
from mpisparse.wire.codecs.fp16 import Fp16
from mpisparse.wire.codecs.fp32 import Fp32
from mpisparse.wire.codecs.int8 import Int8
from mpisparse.wire.codecs.momentum import Momentum


class Kernels(Protocol):
    """The part of a backend that codecs use; each encoder leaves in x what it did not send."""

    def encode_int8(self, x: Floats, scales: Floats, q: NDArray[np.int8]) -> None: ...
    def decode_int8(self, scales: Floats, q: NDArray[np.int8], x: Floats) -> None: ...
    def encode_fp16(self, x: Floats, scales: Floats, h: Halves) -> None: ...
    def decode_fp16(self, scales: Floats, h: Halves, x: Floats) -> None: ...
    def encode_bf16(self, x: Floats, h: Halves) -> None: ...
    def decode_bf16(self, h: Halves, x: Floats) -> None: ...


class Codec(Protocol):
    """Values to bytes and back. `encode` leaves in `values` what was not sent: values before = decoded + values after.

    `blended`: values are to be mixed with what was sent before (mpisparse.wire.blend) on their way to encode.
    """

    @property
    def name(self) -> str: ...
    @property
    def lossless(self) -> bool: ...
    @property
    def blended(self) -> bool: ...

    def nbytes(self, count: int) -> int: ...
    def encode(self, kernels: Kernels, values: Floats, payload: Bytes) -> None: ...
    def decode(self, kernels: Kernels, payload: Bytes, values: Floats) -> None: ...


_PLAIN: tuple[Codec, ...] = (Fp32(), Fp16(), Bf16(), Int8())
CODECS: dict[str, Codec] = {codec.name: codec for codec in (*_PLAIN, Momentum(Int8()), Momentum(Fp32()))}
