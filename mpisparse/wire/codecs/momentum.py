"""Values blended with what was sent before, then sent as another codec does; mpisparse.wire.blend keeps the memory of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpisparse.arrays import Bytes, Floats

if TYPE_CHECKING:
    from mpisparse.wire.codecs import Codec, Kernels


@dataclass(frozen=True)
class Momentum:
    """The bytes of `values`; that they are blended first is the step's affair."""

    values: Codec
    blended = True

    @property
    def name(self) -> str:
        return f"momentum-{self.values.name}"

    @property
    def lossless(self) -> bool:
        return self.values.lossless

    def nbytes(self, count: int) -> int:
        return self.values.nbytes(count)

    def encode(self, kernels: Kernels, values: Floats, payload: Bytes) -> None:
        self.values.encode(kernels, values, payload)

    def decode(self, kernels: Kernels, payload: Bytes, values: Floats) -> None:
        self.values.decode(kernels, payload, values)
