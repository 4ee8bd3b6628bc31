"""Two codecs in plain NumPy: one of fixed size, one whose size depends on the values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import mpisparse

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Upper16:
    """The upper 16 bits of each float32, cut off, not rounded."""

    name = "upper16"
    lossless = False
    blended = False
    variable = False

    def nbytes(self, count: int) -> int:
        return 4 * -(-count // 2)

    def encode(self, kernels: mpisparse.codecs.Kernels, values: Floats, payload: Bytes) -> int:
        halves = payload.view(np.uint16)
        halves[len(values) :] = 0
        halves[: len(values)] = values.view(np.uint32) >> 16
        values -= (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
        return self.nbytes(len(values))

    def decode(self, kernels: mpisparse.codecs.Kernels, payload: Bytes, values: Floats) -> None:
        values.view(np.uint32)[:] = payload.view(np.uint16)[: len(values)].astype(np.uint32) << 16


@dataclass(frozen=True)
class Bitmap:
    """One bit per value, and the float32 of those that reach half the mean magnitude; the others are left."""

    name = "bitmap"
    lossless = False
    blended = False
    variable = True

    def nbytes(self, count: int) -> int:
        return self._map_nbytes(count) + 4 * count

    def encode(self, kernels: mpisparse.codecs.Kernels, values: Floats, payload: Bytes) -> int:
        head = self._map_nbytes(len(values))
        magnitude = np.abs(values.astype(np.float64))
        sent = magnitude >= 0.5 * (magnitude.mean() if len(values) else 0.0)
        bits = np.packbits(sent)
        payload[: len(bits)], payload[len(bits) : head] = bits, 0
        nbytes = head + 4 * int(sent.sum())
        payload[head:nbytes].view(np.float32)[:] = values[sent]
        values[sent] = 0.0
        return nbytes

    def decode(self, kernels: mpisparse.codecs.Kernels, payload: Bytes, values: Floats) -> None:
        head = self._map_nbytes(len(values))
        sent = np.unpackbits(payload[:head])[: len(values)].astype(bool)
        values.fill(0.0)
        values[sent] = payload[head:].view(np.float32)

    def _map_nbytes(self, count: int) -> int:
        return 4 * -(-count // 32)


UPPER16 = Upper16()
BITMAP = Bitmap()
