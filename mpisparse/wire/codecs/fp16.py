"""Values as IEEE half precision, scaled by a power of two so that none overflows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpisparse.arrays import Bytes, Floats
from mpisparse.wire.codecs.grouped import grouped_nbytes, split_payload
from mpisparse.wire.codecs.protocol import Kernels


@dataclass(frozen=True)
class Fp16:
    """2 bytes per value, and a scale per 256 values."""

    name = "fp16"
    lossless = False
    blended = False
    variable = False

    def nbytes(self, count: int) -> int:
        return grouped_nbytes(count, 2)

    def encode(self, kernels: Kernels, values: Floats, payload: Bytes) -> int:
        scales, halves = split_payload(kernels, payload, len(values), np.uint16)
        halves[len(values) :] = 0
        kernels.encode_fp16(values, scales, halves[: len(values)])
        return self.nbytes(len(values))

    def decode(self, kernels: Kernels, payload: Bytes, values: Floats) -> None:
        scales, halves = split_payload(kernels, payload, len(values), np.uint16)
        kernels.decode_fp16(scales, halves[: len(values)], values)

    def add(self, kernels: Kernels, payload: Bytes, total: Floats) -> None:
        scales, halves = split_payload(kernels, payload, len(total), np.uint16)
        kernels.add_fp16(scales, halves[: len(total)], total)


CODEC = Fp16()
