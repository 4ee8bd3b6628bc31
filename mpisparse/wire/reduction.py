"""The mean over ranks of what they send: through the owners of regions with any codec, or by MPI's own reduction.

A reducer takes what this rank sends, as an ascending index and values, and returns the mean that all ranks receive and what
this rank must keep: values before = ranks x its share of the mean + what is kept, summed over ranks. Sums are made in rank
order, so that all ranks receive the same bits. A sum beyond float32 raises Overflow on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from mpisparse.arrays import Bytes, Floats, Ints, State
from mpisparse.comm.agreement import BROKEN, FINE, Overflow, StepRefused
from mpisparse.comm.regions import Region, spans_of
from mpisparse.wire.codecs.protocol import add_decoded
from mpisparse.wire.stretches import pack, unpack

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.exchange import Exchange
    from mpisparse.wire.codecs.protocol import Codec

Span = tuple[int, int]

NOT_A_NUMBER = 0xFF  # bytes that every codec decodes to NaN
NO_INDEX: Ints = np.empty(0, dtype=np.int64)
NO_VALUES: Floats = np.empty(0, dtype=np.float32)


class Reduced(NamedTuple):
    """The mean, where it is, and what this rank keeps of what it sent (`left`, at the sent index; None: nothing).

    kept_index and kept: what an owner keeps of its sums where it did not send itself. nbytes: of indices and values, per
    rank, on average; counted only where sizes travel. index_nbytes: of indices, received by this rank. own: what of this
    rank's values arrived, where the caller keeps the rest; error: what an owner remembers (mpisparse.wire.feedback).
    """

    index: Ints  # type: ignore[assignment]  # hides tuple.index
    mean: Any
    left: Any
    kept_index: Ints = NO_INDEX
    kept: Floats = NO_VALUES
    nbytes: int = 0
    own: Any = None
    error: Any = None
    index_nbytes: int = 0


class Reducer:
    """The protocol, with defaults of a reducer that remembers nothing. A reducer is immutable."""

    def reduce(self, exchange: Exchange, backend: Backend, index: Any, values: Any, regions: Sequence[Region]) -> Reduced:
        """Exchange values, which may be overwritten unless they are read-only; collective."""
        raise NotImplementedError

    def after(self, backend: Backend, reduced: Reduced) -> Reducer:
        """Return the reducer of the next step."""
        return self

    def state(self) -> State:
        """What the next step depends on."""
        return {}

    def check(self, state: State) -> None:
        """Raise ConfigurationError unless loaded() could take the state."""

    def loaded(self, state: State) -> Reducer:
        """Return the reducer that state() was taken of."""
        return self

    def at_rest(self, state: State, residual: Floats, rank: int, size: int) -> State:
        """Return a saved state of one of `size` ranks with nothing remembered; it goes to the saved residual, in place."""
        return state

    def resize(self, states: Sequence[State]) -> State:
        """Return the state on another number of ranks, from those taken over, which are at rest."""
        return self.state()

    def packed(self, reduced: Reduced) -> State:
        """What came of a delivery in flight, as plain values and arrays."""
        names = ("left", "index", "mean", "kept_index", "kept", "nbytes")
        return {name: getattr(reduced, name) for name in names}

    def unpacked(self, state: State, size: int) -> Reduced:
        """What packed() was given, on `size` ranks. Raises KeyError, TypeError or ValueError if that cannot be."""
        index, kept_index = (np.asarray(state[key], dtype=np.int64) for key in ("index", "kept_index"))
        left, mean, kept = (np.asarray(state[key], dtype=np.float32) for key in ("left", "mean", "kept"))
        return Reduced(index, mean.copy(), left, kept_index, kept, int(state["nbytes"]))

    def recalled(self, state: State, residual: Floats) -> State | None:
        """What stays in flight of a packed delivery if the number of ranks changes; None: nothing, as if it were not sent.

        What belongs to no other rank goes to this rank's saved residual, in place.
        """
        for index, values in (("sent", "left"), ("kept_index", "kept")):
            residual[np.asarray(state[index])] += np.asarray(state[values])
            state = {**state, index: NO_INDEX, values: NO_VALUES}
        return state


@dataclass(frozen=True)
class ByMpi(Reducer):
    """One Allreduce, summed in MPI's order; nothing is left over."""

    def reduce(self, exchange: Exchange, backend: Backend, index: Any, values: Any, regions: Sequence[Region]) -> Reduced:
        mean = exchange.allreduce_(backend.copy(values))
        backend.fill(values, 0.0)
        backend.divide(mean, exchange.size)
        check_finite(exchange, backend, index, mean)
        return Reduced(index, mean, values)


@dataclass(frozen=True)
class ByOwner(Reducer):
    """All ranks send the same elements, in regions, to the regions' owners."""

    codec: Codec

    @np.errstate(over="ignore", invalid="ignore")
    def reduce(self, exchange: Exchange, backend: Backend, index: Any, values: Any, regions: Sequence[Region]) -> Reduced:
        """Send each region to its owner, sum there in rank order, send the sum to all.

        A region whose sum is beyond float32 is not a number on all ranks, and on its owner where it is not finite.
        """
        codec, rank = self.codec, exchange.rank
        if exchange.size == 1 and codec.lossless:
            left = backend.empty(len(values), np.float32)
            backend.fill(left, 0.0)
            check_finite(exchange, backend, index, values)
            return Reduced(index, values, left)
        spans = spans_of(backend.search, index, regions)
        nbytes = [codec.nbytes(stop - start) for start, stop in spans]
        places = _places(nbytes, spans)
        payload = backend.empty(sum(nbytes), np.uint8)
        written = [
            codec.encode(backend, values[start:stop], payload[place : place + count])
            for (start, stop), place, count in zip(spans, places, nbytes, strict=True)
        ]
        start, stop = spans[rank]
        if codec.variable:
            received, sizes = _route(exchange, payload, places, written)
        else:
            received, sizes = exchange.alltoallv(payload, nbytes, places), [nbytes[rank]] * exchange.size
        total = _sum_rows(backend, codec, received, sizes, stop - start)
        back = backend.empty(nbytes[rank], np.uint8)
        *_, bad = backend.select(total, 0, len(total), float("inf"))
        if bad < 0:
            count = codec.encode(backend, total, back)
            backend.add(values[start:stop], total)
        else:
            count = len(back)
            backend.fill(back, NOT_A_NUMBER)
        if codec.variable:
            at = int(backend.to_host(index[start + bad : start + bad + 1])[0]) if bad >= 0 else -1
            sizes_and_bads = exchange.allgather(np.array([count, at], dtype=np.int64))
            if (sizes_and_bads[:, 1] >= 0).any():
                raise Overflow(int(sizes_and_bads[:, 1].max()))
            nbytes = sizes_and_bads[:, 0].tolist()
            places = _places(nbytes, spans)
        gathered = exchange.allgatherv(back[: nbytes[rank]], nbytes, places)
        mean: Floats = backend.empty(len(values), np.float32)
        for (a, b), place, count in zip(spans, places, nbytes, strict=True):
            codec.decode(backend, gathered[place : place + count], mean[a:b])
        if bad >= 0:
            mean[start:stop] = total
        backend.divide(mean, exchange.size)
        check_finite(exchange, backend, index, mean)
        return Reduced(index, mean, values)


@dataclass(frozen=True)
class OwnByOwner(Reducer):
    """Each rank sends its own elements, with their indices, to the regions' owners; all receive the union.

    received: divide by how many ranks sent an element instead of by all ranks.
    """

    codec: Codec
    received: bool = False

    def reduce(self, exchange: Exchange, backend: Backend, index: Any, values: Any, regions: Sequence[Region]) -> Reduced:
        """Route to the owners, sum there in rank order, send union and sums to all."""
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
            union, total, indices = self._sum(backend, mine, arrived, counts[:, rank].tolist(), nbytes[:, rank].tolist())
            bad = np.flatnonzero(~np.isfinite(total))[:1]
            first_bad = int(union[bad[0]]) if len(bad) else -1
            back = self._message(backend, mine, union, total) if first_bad < 0 else back
        except Exception as error:  # the other ranks wait: they must hear of it
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
        mean = np.concatenate([part for _, part, _ in parts])
        indices += sum(used for part_rank, (_, _, used) in enumerate(parts) if part_rank != rank)
        if not self.received:
            mean /= np.float32(exchange.size)
        moved = int(nbytes.sum() + sizes[:, 0].sum() * (exchange.size - 1)) // exchange.size
        joined = np.concatenate([part for part, _, _ in parts])
        reduced = Reduced(joined, mean, values, nbytes=moved, index_nbytes=indices)
        return reduced if self.codec.lossless else reduced._replace(kept_index=union, kept=total)

    def _message(self, backend: Backend, region: Region, index: Ints, values: Floats) -> Bytes:
        """Indices and values as bytes; `values` becomes what was not sent."""
        encoded = np.empty(self.codec.nbytes(len(index)), dtype=np.uint8)
        encoded = encoded[: self.codec.encode(backend, values, encoded)]
        return np.concatenate([pack(backend, index, region.lo, region.hi), encoded]) if len(index) else encoded[:0]

    def _read(self, backend: Backend, region: Region, payload: Bytes, count: int) -> tuple[Ints, Floats, int]:
        """What a message holds, and the bytes of its indices."""
        values = np.empty(count, dtype=np.float32)
        if not count:
            return NO_INDEX, values, 0
        index, used = unpack(backend, payload, region.lo, region.hi, count)
        self.codec.decode(backend, payload[used:], values)
        return index, values, used

    @np.errstate(over="ignore", invalid="ignore")
    def _sum(
        self, backend: Backend, region: Region, arrived: Bytes, counts: list[int], nbytes: list[int]
    ) -> tuple[Ints, Floats, int]:
        """Add up what the ranks sent of this rank's region; also return the bytes of the other ranks' indices."""
        ends = np.cumsum([0, *nbytes]).tolist()
        terms = [
            self._read(backend, region, arrived[a:b], count) for a, b, count in zip(ends[:-1], ends[1:], counts, strict=True)
        ]
        union = np.sort(np.concatenate([index for index, _, _ in terms]), kind="stable")  # merges sorted runs
        union = union[np.diff(union, prepend=-1) > 0]
        total, senders = np.zeros((2, len(union)), dtype=np.float32)
        for index, term, _ in terms:
            places = np.searchsorted(union, index)
            total[places] += term
            senders[places] += 1
        if self.received:
            total /= senders
        return union, total, sum(used for _, _, used in terms) - terms[region.rank][2]


class Divided(NamedTuple):
    """Summands that lie where their mean goes and are divided by the number of ranks, so that no sum overflows."""

    vector: Any


@dataclass(frozen=True)
class Whole(Reducer):
    """The whole vector by one Allreduce in `target()`; nothing is left over.

    Summands are divided first, wherever they come from, so that the bits are the same.
    """

    target: Callable[[], torch.Tensor]

    def reduce(self, exchange: Exchange, backend: Backend, index: Any, values: Any, regions: Sequence[Region]) -> Reduced:
        if not isinstance(values, Divided):
            total = backend.array_of(self.target())
            total[:] = values
            backend.divide(total, exchange.size)
            values = Divided(total)
        return Reduced(index, exchange.allreduce_(values.vector), None)


def check_finite(exchange: Exchange, backend: Backend, index: Any, mean: Any) -> None:
    """Raise Overflow on all ranks if the mean is not finite; its owner knows best where."""
    *_, bad = backend.select(mean, 0, len(mean), float("inf"))
    if bad >= 0:
        at = backend.to_host(index[bad : bad + 1]).copy()
        raise Overflow(int(exchange.allreduce_(at, "max")[0]))


def _route(exchange: Exchange, payload: Any, places: list[int], written: list[int]) -> tuple[Any, list[int]]:
    """Send each rank what was written for it; returns what came, rank by rank, and the sizes."""
    table = exchange.allgather(np.array(written, dtype=np.int64))
    packed = np.concatenate([payload[place : place + count] for place, count in zip(places, written, strict=True)])
    return exchange.route(packed, table), table[:, exchange.rank].tolist()


def _sum_rows(backend: Backend, codec: Codec, rows: Any, sizes: list[int], count: int) -> Floats:
    """Decode and add the ranks' payloads in rank order."""
    total: Floats = backend.empty(count, np.float32)
    at = sizes[0]
    codec.decode(backend, rows[:at], total)
    for size in sizes[1:]:
        add_decoded(codec, backend, rows[at : at + size], total)
        at += size
    return total


def _places(nbytes: list[int], spans: list[Span]) -> list[int]:
    """Byte offsets of payloads laid one behind the other in the order of their spans."""
    places, at = [0] * len(nbytes), 0
    for rank in sorted(range(len(nbytes)), key=lambda rank: spans[rank]):
        places[rank] = at
        at += nbytes[rank]
    return places
