"""The reduction of each rank's own elements: they travel with their indices to owners, who add them up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpisparse.arrays import Bytes, Floats, Ints
from mpisparse.comm.agreement import BROKEN, FINE, Overflow, StepRefused
from mpisparse.comm.regions import Region, spans_of
from mpisparse.wire.reduction import NO_INDEX, NO_VALUES, Reduced, Reducer
from mpisparse.wire.stretches import pack, unpack

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.exchange import Exchange
    from mpisparse.wire.codecs.protocol import Codec


class Travelled(NamedTuple):
    """The outcome for each rank's own elements: their union, and the owners' answers.

    values: the answers, at the union; own: the part of this rank's values that arrived, at the index that it sent. mine and
    left: this rank's owned part of the union, and the codec's error on its answers there. nbytes: bytes of indices and
    values per rank, on average.
    """

    index: Ints  # type: ignore[assignment]  # hides tuple.index
    values: Floats
    mine: Ints
    left: Floats
    nbytes: int
    index_nbytes: int
    payloads: list[Bytes]


Answer = Callable[[Ints, Floats, Floats], Floats]  # an owner's answer to its union, the sums and the numbers of senders


@dataclass(frozen=True)
class OwnByOwner(Reducer):
    """Each rank sends its own elements, with their indices, to the regions' owners; all receive the union.

    received: divide by the number of ranks that sent an element instead of by all ranks.
    """

    codec: Codec
    received: bool = False

    def reduce(self, exchange: Exchange, backend: Backend, index: Any, values: Any, regions: Sequence[Region]) -> Reduced:
        outcome = self.travel(exchange, backend, index, values, regions, self._answer)
        if not self.received:
            outcome.values[:] /= np.float32(exchange.size)
        reduced = Reduced(outcome.index, outcome.values, values, nbytes=outcome.nbytes, index_nbytes=outcome.index_nbytes)
        return reduced if self.codec.lossless else reduced._replace(kept_index=outcome.mine, kept=outcome.left)

    def _answer(self, union: Ints, total: Floats, senders: Floats) -> Floats:
        return total / senders if self.received else total

    def travel(
        self, exchange: Exchange, backend: Backend, index: Any, values: Any, regions: Sequence[Region], answer: Answer
    ) -> Travelled:
        """Route to the owners, sum there in rank order, send union and answers to all.

        `values` becomes what was not sent.
        """
        by_rank = sorted(regions)
        spans = spans_of(backend.search, index, regions)
        payloads = [
            self._message(backend, region, index[a:b], values[a:b]) for region, (a, b) in zip(by_rank, spans, strict=True)
        ]
        rows = exchange.allgather(np.array([*(b - a for a, b in spans), *map(len, payloads)], dtype=np.int64))
        counts, nbytes = rows[:, : exchange.size], rows[:, exchange.size :]
        arrived = exchange.route(np.concatenate(payloads), nbytes)
        rank, mine = exchange.rank, by_rank[exchange.rank]
        cause: Exception | None = None
        union, total, back, first_bad, failure, indices = NO_INDEX, NO_VALUES, np.empty(0, dtype=np.uint8), -1, "", 0
        try:
            terms = self._terms(backend, mine, arrived, counts[:, rank].tolist(), nbytes[:, rank].tolist())
            indices = sum(used for _, _, used in terms) - terms[rank][2]
            union, total = _sum_terms(terms, answer)
            bad = np.flatnonzero(~np.isfinite(total))[:1]
            first_bad = int(union[bad[0]]) if len(bad) else -1
            back = self._message(backend, mine, union, total) if first_bad < 0 else back
        except Exception as error:  # the other ranks are waiting and must learn of it
            failure, cause = f"{type(error).__name__}: {error}", error
        sizes = exchange.allgather(np.array([len(back), len(union), first_bad, bool(failure)], dtype=np.int64))
        if sizes[:, 3].any():
            raise StepRefused([(BROKEN if failed else FINE, 0) for failed in sizes[:, 3].tolist()], failure) from cause
        if (sizes[:, 2] >= 0).any():
            raise Overflow(int(sizes[:, 2].max()))
        starts = np.cumsum([0, *sizes[:, 0]]).tolist()
        gathered = exchange.allgatherv(back, sizes[:, 0].tolist(), starts[:-1])
        parts = [
            self._read(backend, region, gathered[a:b], count)
            for region, a, b, count in zip(by_rank, starts[:-1], starts[1:], sizes[:, 1].tolist(), strict=True)
        ]
        indices += sum(used for part_rank, (_, _, used) in enumerate(parts) if part_rank != rank)
        moved = int(nbytes.sum() + sizes[:, 0].sum() * (exchange.size - 1)) // exchange.size
        joined, returned = (np.concatenate([part[i] for part in parts]) for i in range(2))
        return Travelled(joined, returned, union, total, moved, indices, payloads)

    def arrived(self, backend: Backend, outcome: Travelled, index: Any, regions: Sequence[Region]) -> Floats:
        """This rank's values at the index that it sent, as the owners decoded them."""
        by_rank, spans = sorted(regions), spans_of(backend.search, index, regions)
        messages = zip(by_rank, outcome.payloads, spans, strict=True)
        return np.concatenate([self._read(backend, region, payload, b - a)[1] for region, payload, (a, b) in messages])

    def _message(self, backend: Backend, region: Region, index: Ints, values: Floats) -> Bytes:
        """Indices and values as bytes; `values` becomes what was not sent."""
        encoded = np.empty(self.codec.nbytes(len(index)), dtype=np.uint8)
        encoded = encoded[: self.codec.encode(backend, values, encoded)]
        return np.concatenate([pack(backend, index, region.lo, region.hi), encoded]) if len(index) else encoded[:0]

    def _read(self, backend: Backend, region: Region, payload: Bytes, count: int) -> tuple[Ints, Floats, int]:
        """Decode a message; also return the bytes of its indices."""
        values = np.empty(count, dtype=np.float32)
        if not count:
            return NO_INDEX, values, 0
        index, used = unpack(backend, payload, region.lo, region.hi, count)
        self.codec.decode(backend, payload[used:], values)
        return index, values, used

    def _terms(
        self, backend: Backend, region: Region, arrived: Bytes, counts: list[int], nbytes: list[int]
    ) -> list[tuple[Ints, Floats, int]]:
        """What each rank sent for this rank's region, and the bytes of its indices."""
        ends = np.cumsum([0, *nbytes]).tolist()
        messages = zip(ends[:-1], ends[1:], counts, strict=True)
        return [self._read(backend, region, arrived[a:b], count) for a, b, count in messages]


@np.errstate(over="ignore", invalid="ignore")
def _sum_terms(terms: Sequence[tuple[Ints, Floats, int]], answer: Answer) -> tuple[Ints, Floats]:
    """The union of what ranks sent, and the owner's answer to the sums, which are made in rank order."""
    union = np.sort(np.concatenate([index for index, _, _ in terms]), kind="stable")  # merges sorted runs
    union = union[np.diff(union, prepend=-1) > 0]
    total, senders = np.zeros((2, len(union)), dtype=np.float32)
    for index, term, _ in terms:
        places = np.searchsorted(union, index)
        total[places] += term
        senders[places] += 1
    return union, answer(union, total, senders)
