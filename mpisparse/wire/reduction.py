"""The mean at the union: through the regions' owners with any codec, or by MPI's own reduction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpisparse.arrays import Bytes, Floats

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.exchange import Exchange
    from mpisparse.wire.codecs import Codec

Span = tuple[int, int]

NOT_A_NUMBER = 0xFF  # bytes that every codec decodes to NaN


def reduce_by_mpi(exchange: Exchange, backend: Backend, values: Floats) -> Floats:
    """The mean by one Allreduce, summed in MPI's order; values become zero, since all is sent. Collective."""
    mean = exchange.allreduce_(backend.copy(values))
    backend.fill(values, 0.0)
    backend.divide(mean, exchange.size)
    return mean


@np.errstate(over="ignore", invalid="ignore")
def reduce_by_owner(exchange: Exchange, backend: Backend, codec: Codec, values: Floats, spans: list[Span]) -> Floats:
    """Send each span to its rank, sum there in rank order, send the sum to all; returns the mean. Collective.

    `values` becomes what this rank must keep: what it did not send and, in its own span, what it did not return. A span
    whose sum is beyond float32 is not a number on all ranks, and on its owner where it is not finite.
    """
    nbytes = [codec.nbytes(stop - start) for start, stop in spans]
    places = _places(nbytes, spans)
    payload = backend.empty(sum(nbytes), np.uint8)
    for (start, stop), place, count in zip(spans, places, nbytes, strict=True):
        codec.encode(backend, values[start:stop], payload[place : place + count])
    received = exchange.alltoallv(payload, nbytes, places)
    start, stop = spans[exchange.rank]
    total = _sum_rows(exchange.size, backend, codec, received, stop - start)
    back = backend.empty(nbytes[exchange.rank], np.uint8)
    *_, bad = backend.select(total, 0, len(total), float("inf"))
    sound = bad < 0
    if sound:
        codec.encode(backend, total, back)
        backend.add(values[start:stop], total)
    else:
        backend.fill(back, NOT_A_NUMBER)
    gathered = exchange.allgatherv(back, nbytes, places)
    mean: Floats = backend.empty(len(values), np.float32)
    for (start, stop), place, count in zip(spans, places, nbytes, strict=True):
        codec.decode(backend, gathered[place : place + count], mean[start:stop])
    if not sound:
        start, stop = spans[exchange.rank]
        mean[start:stop] = total
    backend.divide(mean, exchange.size)
    return mean


def _sum_rows(size: int, backend: Backend, codec: Codec, rows: Bytes, count: int) -> Floats:
    """Decode and add the ranks' payloads in rank order."""
    nbytes = codec.nbytes(count)
    total, term = backend.empty(count, np.float32), backend.empty(count, np.float32)
    codec.decode(backend, rows[:nbytes], total)
    for rank in range(1, size):
        codec.decode(backend, rows[rank * nbytes : (rank + 1) * nbytes], term)
        backend.add(total, term)
    sums: Floats = total
    return sums


def _places(nbytes: list[int], spans: list[Span]) -> list[int]:
    """Byte offsets of payloads laid one behind the other in the order of their spans."""
    places, at = [0] * len(nbytes), 0
    for rank in sorted(range(len(nbytes)), key=lambda rank: spans[rank]):
        places[rank] = at
        at += nbytes[rank]
    return places
