"""Each rank's own elements go to all ranks; no owner sums, so values are encoded only once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpisparse.arrays import Bytes, Floats, Ints
from mpisparse.comm.agreement import Overflow
from mpisparse.wire.reduction import NO_INDEX, Reduced, Reducer
from mpisparse.wire.stretches import pack, unpack

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.exchange import Exchange
    from mpisparse.comm.regions import Region
    from mpisparse.wire.codecs.protocol import Codec


@dataclass(frozen=True)
class Gathered(Reducer):
    """Indices and values of all ranks of a vector of n elements; every rank adds them up in rank order.

    `Reduced.own` is the part of this rank's values that arrived.
    """

    codec: Codec
    n: int

    @np.errstate(over="ignore", invalid="ignore")
    def reduce(self, exchange: Exchange, backend: Backend, index: Any, values: Any, regions: Sequence[Region]) -> Reduced:
        message = self._message(backend, index, values)
        rows = exchange.allgather(np.array([len(index), len(message)], dtype=np.int64))
        starts = np.cumsum([0, *rows[:, 1]]).tolist()
        gathered = exchange.allgatherv(message, rows[:, 1].tolist(), starts[:-1])
        terms = [
            self._read(backend, gathered[a:b], count)
            for a, b, count in zip(starts[:-1], starts[1:], rows[:, 0].tolist(), strict=True)
        ]
        union = np.unique(np.concatenate([each for each, _ in terms]))
        mean = np.zeros(len(union), dtype=np.float32)
        for each, term in terms:
            mean[np.searchsorted(union, each)] += term
        mean /= np.float32(exchange.size)
        bad = np.flatnonzero(~np.isfinite(mean))[:1]
        if len(bad):
            raise Overflow(int(union[bad[0]]))
        return Reduced(union, mean, None, own=terms[exchange.rank][1])

    def _message(self, backend: Backend, index: Ints, values: Floats) -> Bytes:
        """Indices and values as bytes; `values` becomes what was not sent."""
        encoded = np.empty(self.codec.nbytes(len(index)), dtype=np.uint8)
        encoded = encoded[: self.codec.encode(backend, values, encoded)]
        return np.concatenate([pack(backend, index, 0, self.n), encoded]) if len(index) else encoded[:0]

    def _read(self, backend: Backend, payload: Bytes, count: int) -> tuple[Ints, Floats]:
        """Decode a message."""
        values = np.empty(count, dtype=np.float32)
        if not count:
            return NO_INDEX, values
        index, used = unpack(backend, payload, 0, self.n, count)
        self.codec.decode(backend, payload[used:], values)
        return index, values
