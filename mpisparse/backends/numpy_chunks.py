"""Long vectors in few bits in NumPy: a payload for each chunk of values, one behind the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from mpisparse.arrays import Bytes, Floats, Halves
from mpisparse.backends import numpy_few_bits as few_bits
from mpisparse.backends.payloads import places_of
from mpisparse.backends.protocol import FEW_BITS


def decode_chunks(codec: str, payload: Bytes, chunk: int, x: Floats) -> None:
    """Decode the payloads of all chunks of x."""
    decode = getattr(few_bits, f"decode_{codec}")
    for part, place in _each(codec, len(x), chunk):
        decode(*_split(codec, payload[place], part), x[part])


def settle_chunks(
    codec: str, rows: Sequence[Bytes], chunk: int, by: float, error: Floats, left: Floats, payload: Bytes
) -> int:
    """Sum the rows into left, divide, add the error and encode; return the first index that is not finite, or -1."""
    settle = getattr(few_bits, f"settle_{codec}")
    for part, place in _each(codec, len(left), chunk):
        parts = [_split(codec, row[place], part) for row in rows]
        bad: int = settle(parts, by, error[part], left[part], *_padded(codec, payload[place], part))
        if bad >= 0:
            return int(part.start) + bad
    return -1


def encode_chunks(codec: str, x: Floats, borders: Sequence[int], chunk: int, payload: Bytes) -> None:
    """Encode all chunks, which begin anew at each border; x becomes what is not sent."""
    encode, at = getattr(few_bits, f"encode_{codec}"), 0
    for lo, hi in pairwise(borders):
        values, end = x[lo:hi], at
        for part, place in _each(codec, hi - lo, chunk):
            encode(values[part], *_padded(codec, payload[at:][place], part))
            end = at + place.stop
        at = end


def _each(codec: str, count: int, chunk: int) -> Iterator[tuple[slice, slice]]:
    """The values and the payload of each chunk."""
    form, at = FEW_BITS[codec], 0
    for start in range(0, count, chunk):
        part = slice(start, min(start + chunk, count))
        end = at + places_of(form, part.stop - start).end
        yield part, slice(at, end)
        at = end


def _split(codec: str, payload: Bytes, part: slice) -> tuple[Halves, Bytes]:
    """Scales and codes of a payload."""
    places = places_of(FEW_BITS[codec], part.stop - part.start)
    return payload[: places.scales_end].view(np.uint16), payload[places.codes : places.codes_end]


def _padded(codec: str, payload: Bytes, part: slice) -> tuple[Halves, Bytes]:
    """Scales and codes of a payload that is to be written, with zeros behind both."""
    payload[:] = 0
    return _split(codec, payload, part)
