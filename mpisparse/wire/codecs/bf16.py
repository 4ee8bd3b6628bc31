"""Values rounded to bfloat16."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpisparse.arrays import Bytes, Floats
from mpisparse.wire.codecs.protocol import Kernels


@dataclass(frozen=True)
class Bf16:
    """2 bytes per value, padded to a multiple of 4, rounded to the nearest finite bfloat16."""

    name = "bf16"
    lossless = False
    blended = False
    variable = False

    def nbytes(self, count: int) -> int:
        return 4 * -(-count // 2)

    def encode(self, kernels: Kernels, values: Floats, payload: Bytes) -> int:
        halves = kernels.view_as(payload, np.uint16)
        halves[len(values) :] = 0
        kernels.encode_bf16(values, halves[: len(values)])
        return self.nbytes(len(values))

    def decode(self, kernels: Kernels, payload: Bytes, values: Floats) -> None:
        kernels.decode_bf16(kernels.view_as(payload, np.uint16)[: len(values)], values)

    def add(self, kernels: Kernels, payload: Bytes, total: Floats) -> None:
        kernels.add_bf16(kernels.view_as(payload, np.uint16)[: len(total)], total)


CODEC = Bf16()
