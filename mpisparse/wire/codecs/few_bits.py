"""Payloads of int4, int2 and sign: a bfloat16 scale per group of values, then the codes of the values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mpisparse.arrays import Bytes, Floats, Halves
from mpisparse.backends.protocol import FEW_BITS, CodeForm
from mpisparse.wire.codecs.protocol import Kernels


class Places(NamedTuple):
    """Where in a payload scales end, codes begin and end, and the payload ends."""

    scales_end: int
    codes: int
    codes_end: int
    end: int


@lru_cache(maxsize=64)
def places_of(form: CodeForm, count: int) -> Places:
    """Lay out the payload of `count` values; the codes of the last group end with the last byte in use."""
    groups, rest = divmod(count, form.group)
    scales_end = 2 * -(-count // form.group)
    codes = _padded(scales_end)
    codes_end = codes + groups * form.nbytes + min(rest, form.nbytes)
    return Places(scales_end, codes, codes_end, _padded(codes_end))


def _padded(nbytes: int) -> int:
    return -(-nbytes // 4) * 4


@dataclass(frozen=True)
class FewBits:
    """A few bits per value, and 2 bytes per group. Scales and codes are padded to a multiple of 4 bytes each.

    Kernels are those of the codec's name. int4 has a level at zero: what it leaves is exact, and not larger than what was
    given. int2 and sign have none: what they leave is rounded to float32, so that decoded + left differs from the value by
    up to 2^-25 of what was decoded. In squares, a group's errors are never larger than its values.
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

    def settle(self, kernels: Kernels, rows: Sequence[Bytes], by: float, error: Floats, left: Floats, payload: Bytes) -> int:
        """Encode left = sum of the rows / by + error; return the first index that is not finite, or -1."""
        places = places_of(FEW_BITS[self.name], len(left))
        payload[places.scales_end : places.codes] = 0
        payload[places.codes_end :] = 0
        parts = [self._split(kernels, row, places) for row in rows]
        bad: int = getattr(kernels, f"settle_{self.name}")(parts, by, error, left, *self._split(kernels, payload, places))
        return bad

    def _write(self, kernel: Callable[..., None], kernels: Kernels, values: Floats, payload: Bytes) -> int:
        places = places_of(FEW_BITS[self.name], len(values))
        payload[places.scales_end : places.codes] = 0
        payload[places.codes_end :] = 0
        kernel(values, *self._split(kernels, payload, places))
        return places.end

    def _split(self, kernels: Kernels, payload: Bytes, places: Places) -> tuple[Halves, Bytes]:
        """Return views of the scales and of the codes."""
        return kernels.view_as(payload[: places.scales_end], np.uint16), payload[places.codes : places.codes_end]
