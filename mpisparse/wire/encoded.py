"""Values as bytes, chunk by chunk, so that a chunk stays in cache while it is read, encoded and summed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpisparse.arrays import Bytes
from mpisparse.backends.device import load_backend
from mpisparse.wire.codecs.protocol import pack_values, settle, subtract_decoded

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.wire.codecs.protocol import Codec

CHUNK = 1 << 16  # elements
HEADER = 4  # bytes before a chunk of variable size, which say how many follow

Span = tuple[int, int]
Dense = tuple[Any, Any, Any]  # addresses, ends and kinds of gradients
Chunk = tuple[int, int, Any]  # elements [start, stop), and their bytes or values


class Rooms:
    """Host memory by name, reused in every step, because the system clears fresh memory page by page."""

    def __init__(self) -> None:
        self._rooms: dict[str, Bytes] = {}

    def of(self, name: str, nbytes: int) -> Bytes:
        """Return nbytes of uninitialised memory."""
        if name not in self._rooms or len(self._rooms[name]) < nbytes:
            self._rooms[name] = np.empty(nbytes, dtype=np.uint8)
        return self._rooms[name][:nbytes]


class Encoded(NamedTuple):
    """The bytes of some spans of a vector, concatenated. sizes: the bytes of each."""

    codec: Codec
    payload: Any
    spans: Sequence[Span]
    sizes: Sequence[int]

    @property
    def starts(self) -> list[int]:
        """The offset of each span in the payload."""
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
        """Write the values to their places in a vector."""
        kernels = chunk_kernels(self.codec, backend)
        if kernels is not None:
            for (start, stop), at, size in zip(self.spans, self.starts, self.sizes, strict=True):
                kernels.decode(self.payload[at : at + size], CHUNK, vector[start:stop])
            return
        for start, stop, part in self.parts():
            self.codec.decode(backend, part, vector[start:stop])

    def subtract_from(self, backend: Backend, vector: Any) -> None:
        """Subtract the values at their places in a vector."""
        for start, stop, part in self.parts():
            subtract_decoded(self.codec, backend, part, vector[start:stop])

    def decoded(self, backend: Backend) -> Any:
        """All values, in the order of the spans."""
        out, at = backend.empty(sum(stop - start for start, stop in self.spans), np.float32), 0
        for start, stop, part in self.parts():
            self.codec.decode(backend, part, out[at : at + stop - start])
            at += stop - start
        return out


def chunk_kernels(codec: Codec, backend: Backend) -> Any:
    """A codec's kernels for many chunks in one call, or None."""
    find = getattr(codec, "chunks", None)
    return None if find is None else find(backend)


def check(encoded: Encoded) -> None:
    """Raise ValueError unless the bytes fit the spans and decode to finite numbers; for data read from a file."""
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
    """Encode a chunk at the start of a payload without changing it; returns the bytes written."""
    room = _room(codec, payload, len(values))
    return _with_header(codec, payload, pack_values(codec, backend, values, room))


def settle_chunk(
    codec: Codec, backend: Backend, rows: Sequence[Any], by: float, error: Any, left: Any, payload: Any
) -> tuple[int, Any]:
    """Encode left = sum of the rows' values / by + error at the start of a payload; `left` becomes what is not sent.

    Returns the bytes written, and the first non-finite index or -1; a device returns the index as a vector of one.
    """
    size, bad = settle(codec, backend, rows, by, error, left, _room(codec, payload, len(left)))
    return _with_header(codec, payload, size), bad


def _room(codec: Codec, payload: Any, count: int) -> Any:
    header = HEADER if codec.variable else 0
    return payload[header : header + codec.nbytes(count)]


def _with_header(codec: Codec, payload: Any, size: int) -> int:
    """Write how many bytes follow, if that varies; returns the total number of bytes."""
    if not codec.variable:
        return size
    payload[:HEADER] = np.array([size], dtype=np.uint32).view(np.uint8)
    return HEADER + size


def settle_span(
    codec: Codec, backend: Backend, rows: Sequence[Any], span: Span, by: float, error: Any, left: Any, payload: Any
) -> tuple[int, int]:
    """As settle_chunk, for a whole span; each row holds all bytes of it. Waits for a device only once."""
    at, lo, kernels = 0, span[0], chunk_kernels(codec, backend)
    late: list[tuple[int, Any]] = []
    if kernels is not None:
        bad = kernels.settle(rows, CHUNK, by, error, left, payload)
        return len(payload), bad if bad < 0 else lo + bad
    for parts in zip(*(chunks(codec, row, span) for row in rows), strict=True):
        start, stop, _ = parts[0]
        place = slice(start - lo, stop - lo)
        row_parts = [part for *_, part in parts]
        written, bad = settle_chunk(codec, backend, row_parts, by, error[place], left[place], payload[at:])
        at += written
        if not isinstance(bad, int | np.integer):
            late.append((start, bad))
        elif bad >= 0:
            return len(payload), start + bad
    return at, _first_of(backend, late)


def _first_of(backend: Any, late: Sequence[tuple[int, Any]]) -> int:
    """The first non-finite index over chunks, from what the device found in each; -1 if all are finite."""
    if not late:
        return -1
    bads = backend.empty(len(late), np.int64)
    for i, (_, bad) in enumerate(late):
        bads[i : i + 1] = bad
    found = backend.to_host(bads).tolist()
    return next((start + bad for (start, _), bad in zip(late, found, strict=True) if bad >= 0), -1)


def encode_sum(
    codec: Codec, kernels: Any, acc: Any, dense: Dense, spans: Sequence[Span], rooms: Rooms
) -> tuple[Encoded, int]:
    """Add gradients to acc and encode the sums, by kernels for many chunks; what is not sent stays in acc.

    The spans are contiguous and cover acc. Returns the first non-finite index, or -1.
    """
    sizes = [span_nbytes(codec, span) for span in spans]
    payload = rooms.of("own", sum(sizes))
    borders = np.array([0, *(stop for _, stop in spans)], dtype=np.int64)
    bad = kernels.accumulate(acc, *dense, borders, CHUNK, payload)
    return Encoded(codec, payload, spans, sizes), bad


def encode(codec: Codec, backend: Backend, vector: Any, spans: Sequence[Span]) -> Encoded:
    """Encode spans of a vector without changing it."""
    payload = backend.empty(sum(span_nbytes(codec, span) for span in spans), np.uint8)
    at, sizes = 0, []
    for span in spans:
        before = at
        for start in range(*span, CHUNK):
            values = vector[start : min(start + CHUNK, span[1])]
            at += write_chunk(codec, backend, values, payload[at:])
        sizes.append(at - before)
    return Encoded(codec, payload[:at], spans, sizes)
