"""Values as float32, unchanged."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpisparse.arrays import Bytes, Floats
from mpisparse.wire.codecs.protocol import Kernels


@dataclass(frozen=True)
class Fp32:
    """4 bytes per value; lossless."""

    name = "fp32"
    lossless = True
    blended = False
    variable = False

    def nbytes(self, count: int) -> int:
        return 4 * count

    def encode(self, kernels: Kernels, values: Floats, payload: Bytes) -> int:
        kernels.view_as(payload, np.float32)[:] = values
        kernels.fill(values, 0.0)
        return self.nbytes(len(values))

    def decode(self, kernels: Kernels, payload: Bytes, values: Floats) -> None:
        values[:] = kernels.view_as(payload, np.float32)

    def add(self, kernels: Kernels, payload: Bytes, total: Floats) -> None:
        kernels.add(total, kernels.view_as(payload, np.float32))


CODEC = Fp32()
