"""Values as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpisparse.arrays import Bytes, Floats

if TYPE_CHECKING:
    from mpisparse.wire.codecs import Kernels


@dataclass(frozen=True)
class Fp32:
    """4 bytes a value, nothing held back."""

    name = "fp32"
    lossless = True
    blended = False

    def nbytes(self, count: int) -> int:
        return 4 * count

    def encode(self, kernels: Kernels, values: Floats, payload: Bytes) -> None:
        payload.view(np.float32)[:] = values
        values.fill(0.0)

    def decode(self, kernels: Kernels, payload: Bytes, values: Floats) -> None:
        values[:] = payload.view(np.float32)
