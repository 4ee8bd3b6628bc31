"""Values as bytes, chunk by chunk: a chunk stays in cache while it is read, encoded and summed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpisparse.backends.device import load_backend
from mpisparse.wire.codecs.protocol import pack_values, settle, subtract_decoded

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.wire.codecs.protocol import Codec

CHUNK = 1 << 16  # elements
HEADER = 4  # bytes before a chunk of variable size, which say how many follow

Span = tuple[int, int]
Chunk = tuple[int, int, Any]  # elements [start, stop), and their bytes or values


class Encoded(NamedTuple):
    """The bytes of some spans of a vector, one span behind the other. sizes: the bytes of each."""

    codec: Codec
    payload: Any
    spans: Sequence[Span]
    sizes: Sequence[int]

    @property
    def starts(self) -> list[int]:
        """Where in the payload each span begins."""
        return [0, *np.cumsum(self.sizes[:-1]).tolist()]

    def values(self, backend: Backend) -> Iterator[Chunk]:
        """Decode chunk by chunk; each is overwritten by the next."""
        room = backend.empty(min(CHUNK, max((stop - start for start, stop in self.spans), default=0)), np.float32)
        for start, stop, part in self.parts():
            values = room[: stop - start]
            self.codec.decode(backend, part, values)
            yield start, stop, values

    def parts(self) -> Iterator[Chunk]:
        """The bytes of each chunk."""
        for span, at, size in zip(self.spans, self.starts, self.sizes, strict=True):
            yield from chunks(self.codec, self.payload[at : at + size], span)

    def write(self, backend: Backend, vector: Any) -> None:
        """Write the values where they belong in a vector."""
        for start, stop, part in self.parts():
            self.codec.decode(backend, part, vector[start:stop])

    def subtract_from(self, backend: Backend, vector: Any) -> None:
        """Subtract the values where they belong in a vector."""
        for start, stop, part in self.parts():
            subtract_decoded(self.codec, backend, part, vector[start:stop])

    def decoded(self, backend: Backend) -> Any:
        """All values, in the order of the spans."""
        out, at = backend.empty(sum(stop - start for start, stop in self.spans), np.float32), 0
        for start, stop, part in self.parts():
            self.codec.decode(backend, part, out[at : at + stop - start])
            at += stop - start
        return out


def check(encoded: Encoded) -> None:
    """Raise ValueError unless the bytes can be those of the spans and decode to finite numbers; for what a file held."""
    codec, payload, spans, sizes = encoded
    fits = len(sizes) == len(spans) and min(sizes, default=0) >= 0 and sum(sizes) == len(payload)
    for span, at, size in zip(spans, encoded.starts, sizes, strict=False):
        end = 0
        for start, stop, part in chunks(codec, payload[at : at + size], span):
            most, header = codec.nbytes(stop - start), HEADER if codec.variable else 0
            end += header + len(part)
            fits = fits and (len(part) <= most if codec.variable else len(part) == most)
        fits = fits and end == size
    if not fits:
        raise ValueError("an encoded vector has too many bytes, or too few")
    if not all(np.isfinite(values).all() for _, _, values in encoded.values(load_backend())):
        raise ValueError("an encoded vector is not finite everywhere")


def chunks(codec: Codec, payload: Any, span: Span) -> Iterator[Chunk]:
    """The bytes of each chunk of a span."""
    at = 0
    for start in range(*span, CHUNK):
        stop = min(start + CHUNK, span[1])
        size = codec.nbytes(stop - start)
        if codec.variable:
            size = int(payload[at : at + HEADER].view(np.uint32)[0])
            at += HEADER
        yield start, stop, payload[at : at + size]
        at += size


def span_nbytes(codec: Codec, span: Span) -> int:
    """The largest number of bytes that a span may take."""
    whole, rest = divmod(span[1] - span[0], CHUNK)
    header = HEADER if codec.variable else 0
    return whole * (codec.nbytes(CHUNK) + header) + ((codec.nbytes(rest) + header) if rest else 0)


def write_chunk(codec: Codec, backend: Backend, values: Any, payload: Any) -> int:
    """Encode a chunk, which is only read, at the start of a payload; returns the bytes written."""
    room = _room(codec, payload, len(values))
    return _with_header(codec, payload, pack_values(codec, backend, values, room))


def settle_chunk(
    codec: Codec, backend: Backend, rows: Sequence[Any], by: float, error: Any, left: Any, payload: Any
) -> tuple[int, int]:
    """Encode left = sum of the rows' values / by + error at the start of a payload; `left` becomes what is not sent.

    Returns the bytes written, and the first index that is not finite or -1.
    """
    size, bad = settle(codec, backend, rows, by, error, left, _room(codec, payload, len(left)))
    return _with_header(codec, payload, size), bad


def _room(codec: Codec, payload: Any, count: int) -> Any:
    header = HEADER if codec.variable else 0
    return payload[header : header + codec.nbytes(count)]


def _with_header(codec: Codec, payload: Any, size: int) -> int:
    """Write how many bytes follow, if that varies; returns the bytes in all."""
    if not codec.variable:
        return size
    payload[:HEADER] = np.array([size], dtype=np.uint32).view(np.uint8)
    return HEADER + size


def encode(codec: Codec, backend: Backend, vector: Any, spans: Sequence[Span]) -> Encoded:
    """Encode spans of a vector, which is only read."""
    payload = backend.empty(sum(span_nbytes(codec, span) for span in spans), np.uint8)
    at, sizes = 0, []
    for span in spans:
        before = at
        for start in range(*span, CHUNK):
            values = vector[start : min(start + CHUNK, span[1])]
            at += write_chunk(codec, backend, values, payload[at:])
        sizes.append(at - before)
    return Encoded(codec, payload[:at], spans, sizes)
