"""Payloads of int4, int2 and sign: a bfloat16 scale per group of values, then the codes of the values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpisparse.arrays import Bytes, Floats, Halves
from mpisparse.backends.payloads import Places, places_of
from mpisparse.backends.protocol import FEW_BITS
from mpisparse.wire.codecs.protocol import Kernels


class Chunks(NamedTuple):
    """A host backend's kernels for many payloads in one call, one for each chunk of values."""

    decode: Callable[..., None]
    settle: Callable[..., int]
    accumulate: Callable[..., int]


@dataclass(frozen=True)
class FewBits:
    """A few bits per value, and 2 bytes per group. Scales and codes are padded to a multiple of 4 bytes each.

    The kernels have the codec's name. int4 has a level at zero: its error is exact, and not larger than the value. int2 and
    sign have none: their error is rounded to float32, so that decoded + left differs from the value by up to 2^-25 of the
    decoded value. The sum of a group's squared errors is never larger than that of its values.
    """

    name: str
    lossless = False
    blended = False
    variable = False

    def nbytes(self, count: int) -> int:
        return places_of(FEW_BITS[self.name], count).end

    def encode(self, kernels: Kernels, values: Floats, payload: Bytes) -> int:
        return self._write(getattr(kernels, f"encode_{self.name}"), kernels, values, payload)

    def pack(self, kernels: Kernels, values: Floats, payload: Bytes) -> int:
        return self._write(getattr(kernels, f"pack_{self.name}"), kernels, values, payload)

    def decode(self, kernels: Kernels, payload: Bytes, values: Floats) -> None:
        places = places_of(FEW_BITS[self.name], len(values))
        getattr(kernels, f"decode_{self.name}")(*self._split(kernels, payload, places), values)

    def add(self, kernels: Kernels, payload: Bytes, total: Floats) -> None:
        places = places_of(FEW_BITS[self.name], len(total))
        getattr(kernels, f"add_{self.name}")(*self._split(kernels, payload, places), total)

    def subtract(self, kernels: Kernels, payload: Bytes, total: Floats) -> None:
        places = places_of(FEW_BITS[self.name], len(total))
        getattr(kernels, f"subtract_{self.name}")(*self._split(kernels, payload, places), total)

    def settle(self, kernels: Kernels, rows: Sequence[Bytes], by: float, error: Floats, left: Floats, payload: Bytes) -> Any:
        """Encode left = sum of the rows / by + error; return the first non-finite index, or -1.

        A device returns it as a vector of one.
        """
        places = places_of(FEW_BITS[self.name], len(left))
        payload[places.scales_end : places.codes] = 0
        payload[places.codes_end :] = 0
        parts = [self._split(kernels, row, places) for row in rows]
        return getattr(kernels, f"settle_{self.name}")(parts, by, error, left, *self._split(kernels, payload, places))

    def chunks(self, kernels: Any) -> Chunks | None:
        """The kernels for many payloads in one call; None on a device."""
        if not hasattr(kernels, "decode_chunks"):
            return None
        return Chunks(*(partial(getattr(kernels, f"{what}_chunks"), self.name) for what in Chunks._fields))

    def _write(self, kernel: Callable[..., None], kernels: Kernels, values: Floats, payload: Bytes) -> int:
        places = places_of(FEW_BITS[self.name], len(values))
        payload[places.scales_end : places.codes] = 0
        payload[places.codes_end :] = 0
        kernel(values, *self._split(kernels, payload, places))
        return places.end

    def _split(self, kernels: Kernels, payload: Bytes, places: Places) -> tuple[Halves, Bytes]:
        """Return views of the scales and of the codes."""
        return kernels.view_as(payload[: places.scales_end], np.uint16), payload[places.codes : places.codes_end]
