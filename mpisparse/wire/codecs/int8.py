"""Values rounded to 255 even steps between plus and minus the largest magnitude of their group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpisparse.arrays import Bytes, Floats
from mpisparse.wire.codecs.grouped import grouped_nbytes, split_payload
from mpisparse.wire.codecs.protocol import Kernels


@dataclass(frozen=True)
class Int8:
    """1 byte per value, and a scale per 256 values; rounded to nearest, ties to even."""

    name = "int8"
    lossless = False
    blended = False
    variable = False

    def nbytes(self, count: int) -> int:
        return grouped_nbytes(count, 1)

    def encode(self, kernels: Kernels, values: Floats, payload: Bytes) -> int:
        scales, steps = split_payload(kernels, payload, len(values), np.int8)
        steps[len(values) :] = 0
        kernels.encode_int8(values, scales, steps[: len(values)])
        return self.nbytes(len(values))

    def decode(self, kernels: Kernels, payload: Bytes, values: Floats) -> None:
        scales, steps = split_payload(kernels, payload, len(values), np.int8)
        kernels.decode_int8(scales, steps[: len(values)], values)

    def add(self, kernels: Kernels, payload: Bytes, total: Floats) -> None:
        scales, steps = split_payload(kernels, payload, len(total), np.int8)
        kernels.add_int8(scales, steps[: len(total)], total)


CODEC = Int8()
