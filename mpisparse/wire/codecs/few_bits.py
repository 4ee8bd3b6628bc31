"""Payloads of int4, int2 and sign: a bfloat16 scale per group of values, then the codes of the values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpisparse.arrays import Bytes, Floats, Halves
from mpisparse.backends.protocol import FEW_BITS
from mpisparse.wire.codecs.protocol import Kernels


@dataclass(frozen=True)
class FewBits:
    """A few bits per value, and 2 bytes per group. Scales and codes are padded to a multiple of 4 bytes each.

    Kernels are those of the codec's name. int4 has a level at zero: what it leaves is exact and not larger than what was given.
    int2 and sign send at least their inner level: what they leave is rounded to float32, so that decoded + left differs
    from the value by up to 2^-25 of what was decoded. Over a group errors are never larger than the values, in squares.
    """

    name: str
    lossless = False
    blended = False
    variable = False

    def nbytes(self, count: int) -> int:
        return _padded(2 * self._groups(count)) + _padded(self._codes_nbytes(count))

    def encode(self, kernels: Kernels, values: Floats, payload: Bytes) -> int:
        scales, codes = self._split(kernels, payload, len(values))
        self._clear_padding(payload, len(values))
        getattr(kernels, f"encode_{self.name}")(values, scales, codes)
        return self.nbytes(len(values))

    def decode(self, kernels: Kernels, payload: Bytes, values: Floats) -> None:
        getattr(kernels, f"decode_{self.name}")(*self._split(kernels, payload, len(values)), values)

    def add(self, kernels: Kernels, payload: Bytes, total: Floats) -> None:
        getattr(kernels, f"add_{self.name}")(*self._split(kernels, payload, len(total)), total)

    def _groups(self, count: int) -> int:
        return -(-count // FEW_BITS[self.name].group)

    def _codes_nbytes(self, count: int) -> int:
        """Bytes of all codes; those of the last group end with the last byte in use."""
        form = FEW_BITS[self.name]
        return count // form.group * form.nbytes + min(count % form.group, form.nbytes)

    def _split(self, kernels: Kernels, payload: Bytes, count: int) -> tuple[Halves, Bytes]:
        """Return views of the scales and of the codes."""
        scales_nbytes = 2 * self._groups(count)
        start = _padded(scales_nbytes)
        return kernels.view_as(payload[:scales_nbytes], np.uint16), payload[start : start + self._codes_nbytes(count)]

    def _clear_padding(self, payload: Bytes, count: int) -> None:
        scales_nbytes = 2 * self._groups(count)
        start = _padded(scales_nbytes)
        payload[scales_nbytes:start] = 0
        payload[start + self._codes_nbytes(count) :] = 0


def _padded(nbytes: int) -> int:
    return -(-nbytes // 4) * 4
