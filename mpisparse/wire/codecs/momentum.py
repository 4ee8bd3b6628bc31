"""Values blended with what was sent before, then encoded by another codec; mpisparse.core.blend keeps what was sent."""

from __future__ import annotations

from dataclasses import dataclass

from mpisparse.arrays import Bytes, Floats
from mpisparse.wire.codecs.protocol import Codec, Kernels, add_decoded, pack_values, subtract_decoded


@dataclass(frozen=True)
class Blended:
    """The bytes of the codec `values`; the step blends before it encodes."""

    values: Codec
    blended = True

    @property
    def name(self) -> str:
        return f"momentum-{self.values.name}"

    @property
    def lossless(self) -> bool:
        return self.values.lossless

    @property
    def variable(self) -> bool:
        return self.values.variable

    def nbytes(self, count: int) -> int:
        return self.values.nbytes(count)

    def encode(self, kernels: Kernels, values: Floats, payload: Bytes) -> int:
        return self.values.encode(kernels, values, payload)

    def decode(self, kernels: Kernels, payload: Bytes, values: Floats) -> None:
        self.values.decode(kernels, payload, values)

    def add(self, kernels: Kernels, payload: Bytes, total: Floats) -> None:
        add_decoded(self.values, kernels, payload, total)

    def subtract(self, kernels: Kernels, payload: Bytes, total: Floats) -> None:
        subtract_decoded(self.values, kernels, payload, total)

    def pack(self, kernels: Kernels, values: Floats, payload: Bytes) -> int:
        return pack_values(self.values, kernels, values, payload)
