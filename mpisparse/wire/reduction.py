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

from mpisparse.arrays import Floats, Ints, State
from mpisparse.comm.agreement import Overflow
from mpisparse.comm.regions import Region, even_spans
from mpisparse.wire.codecs.protocol import add_decoded

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.exchange import Exchange
    from mpisparse.wire.codecs.protocol import Codec

Span = tuple[int, int]

NOT_A_NUMBER = 0xFF  # the byte of which every codec's payload decodes to NaN
NO_INDEX: Ints = np.empty(0, dtype=np.int64)
NO_VALUES: Floats = np.empty(0, dtype=np.float32)


class Reduced(NamedTuple):
    """The mean with its index, and what this rank keeps of what it sent (`left`, at the sent index; None: nothing).

    kept_index and kept: what an owner keeps of its sums at elements that it did not send itself. nbytes: bytes of indices
    and values per rank, on average; counted only if sizes travel. index_nbytes: bytes of indices that this rank received.
    own: the part of this rank's values that arrived, if the caller keeps the rest. error: what an owner remembers
    (mpisparse.wire.feedback).
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
    """The protocol, with defaults for a reducer that remembers nothing. A reducer is immutable."""

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
        """Return the reducer that a state describes."""
        return self

    def at_rest(self, state: State, residual: Floats, rank: int, size: int) -> State:
        """Move what a saved state, of one of `size` ranks, remembers to the saved residual, in place; return the rest."""
        return state

    def resize(self, states: Sequence[State]) -> State:
        """Return the state on another number of ranks, from the states taken over, which remember nothing (at_rest)."""
        return self.state()

    def moved(
        self, fresh: Reducer, exchange: Exchange, backend: Backend, rank: int, size: int
    ) -> Callable[[Floats], object]:
        """Prepare to move what this reducer, of one of `size` ranks, remembers to a reducer of fewer, or to the accumulator.

        Collective; changes nothing. Returns the local function that does it, given the accumulator on the host.
        """

        def move(acc: Floats) -> None:
            self.at_rest({key: backend.to_host(value) for key, value in self.state().items()}, acc, rank, size)

        return move

    def packed(self, reduced: Reduced) -> State:
        """The result of a delivery in flight, as plain values and arrays."""
        names = ("left", "index", "mean", "kept_index", "kept", "nbytes")
        return {name: getattr(reduced, name) for name in names}

    def unpacked(self, state: State, size: int) -> Reduced:
        """The result that packed() packed, on `size` ranks. Raises KeyError, TypeError or ValueError if it is invalid."""
        index, kept_index = (np.asarray(state[key], dtype=np.int64) for key in ("index", "kept_index"))
        left, mean, kept = (np.asarray(state[key], dtype=np.float32) for key in ("left", "mean", "kept"))
        return Reduced(index, mean.copy(), left, kept_index, kept, int(state["nbytes"]))

    def recalled(self, state: State, residual: Floats) -> State | None:
        """What stays in flight of a packed delivery if the number of ranks changes; None: nothing, as if it was not sent.

        What belongs to this rank alone goes to its saved residual, in place.
        """
        for index, values in (("sent", "left"), ("kept_index", "kept")):
            residual[np.asarray(state[index])] += np.asarray(state[values])
            state = {**state, index: NO_INDEX, values: NO_VALUES}
        return state


@dataclass(frozen=True)
class ByMpi(Reducer):
    """One Allreduce, summed in MPI's order; there is no error to keep."""

    def reduce(self, exchange: Exchange, backend: Backend, index: Any, values: Any, regions: Sequence[Region]) -> Reduced:
        mean = exchange.allreduce_(backend.copy(values))
        backend.fill(values, 0.0)
        backend.divide(mean, exchange.size)
        check_finite(exchange, backend, index, mean)
        return Reduced(index, mean, values)


@dataclass(frozen=True)
class ByOwner(Reducer):
    """All ranks send the same elements; each rank sums an equal part of them."""

    codec: Codec

    @np.errstate(over="ignore", invalid="ignore")
    def reduce(self, exchange: Exchange, backend: Backend, index: Any, values: Any, regions: Sequence[Region]) -> Reduced:
        """Send each part to its owner, sum there in rank order, send the sum to all.

        The owners of the parts follow the order of the regions. If a sum is beyond float32, its whole part is NaN on all
        ranks but its owner, where only the affected elements are not finite.
        """
        codec, rank = self.codec, exchange.rank
        if exchange.size == 1 and codec.lossless:
            left = backend.empty(len(values), np.float32)
            backend.fill(left, 0.0)
            check_finite(exchange, backend, index, values)
            return Reduced(index, values, left)
        spans = even_spans(len(index), regions)
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
            room = backend.empty(nbytes[rank] * exchange.size, np.uint8)
            received, sizes = exchange.alltoallv(payload, nbytes, places, room), [nbytes[rank]] * exchange.size
        total = _sum_rows(backend, codec, received, sizes, stop - start)
        back = backend.empty(nbytes[rank], np.uint8)
        if hasattr(backend, "first_bad") and not codec.variable:
            return self._returned_late(exchange, backend, index, values, total, back, spans, nbytes)
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
        mean: Floats = backend.empty(len(values), np.float32)
        self._gather(exchange, backend, back[: nbytes[rank]], spans, nbytes, mean)
        if bad >= 0:
            mean[start:stop] = total
        backend.divide(mean, exchange.size)
        check_finite(exchange, backend, index, mean)
        return Reduced(index, mean, values)

    def _gather(
        self, exchange: Exchange, backend: Backend, back: Any, spans: list[Span], nbytes: list[int], sums: Any
    ) -> None:
        """Gather the sums of all owners; collective."""
        places = _places(nbytes, spans)
        gathered = exchange.allgatherv(back, nbytes, places, backend.empty(sum(nbytes), np.uint8))
        for (a, b), place, count in zip(spans, places, nbytes, strict=True):
            self.codec.decode(backend, gathered[place : place + count], sums[a:b])

    def _returned_late(
        self, exchange: Exchange, backend: Any, index: Any, values: Any, total: Any, back: Any, spans: list[Span],
        nbytes: list[int],
    ) -> Reduced:  # fmt: skip
        """Send the owner's sum to all without asking the device whether it is finite; the mean shows it. Collective."""
        start, stop = spans[exchange.rank]
        bad = backend.first_bad(total)
        self.codec.encode(backend, total, back)
        backend.add(values[start:stop], total)
        backend.spoil(back, NOT_A_NUMBER, bad)
        mean: Floats = backend.empty(len(values), np.float32)
        self._gather(exchange, backend, back, spans, nbytes, mean)
        backend.divide(mean, exchange.size)
        check_finite(exchange, backend, index, mean, (start, stop, bad))
        return Reduced(index, mean, values)


class Divided(NamedTuple):
    """Summands that are overwritten by their mean, and divided by the number of ranks first, so that no sum overflows."""

    vector: Any


@dataclass(frozen=True)
class Whole(Reducer):
    """The whole vector by one Allreduce in `target()`; there is no error to keep.

    Summands are always divided first, so that the bits do not depend on where they come from.
    """

    target: Callable[[], torch.Tensor]

    def reduce(self, exchange: Exchange, backend: Backend, index: Any, values: Any, regions: Sequence[Region]) -> Reduced:
        if not isinstance(values, Divided):
            total = backend.array_of(self.target())
            total[:] = values
            backend.divide(total, exchange.size)
            values = Divided(total)
        return Reduced(index, exchange.allreduce_(values.vector), None)


def check_finite(
    exchange: Exchange, backend: Backend, index: Any, mean: Any, own: tuple[int, int, Any] | None = None
) -> None:
    """Raise Overflow on all ranks if the mean is not finite; only the owner knows where exactly.

    own: this rank's part, if a part of the mean that overflows is NaN as a whole, and the first index where the sum is
    really not finite, as first_bad() found it.
    """
    *_, bad = backend.select(mean, 0, len(mean), float("inf"))
    if bad >= 0:
        if own is not None and own[0] <= bad < own[1]:
            bad = own[0] + max(0, int(backend.to_host(own[2])[0]))
        at = backend.to_host(index[bad : bad + 1]).copy()
        raise Overflow(int(exchange.allreduce_(at, "max")[0]))


def _route(exchange: Exchange, payload: Any, places: list[int], written: list[int]) -> tuple[Any, list[int]]:
    """Send each rank the bytes written for it; returns the bytes received, in rank order, and the sizes."""
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
    """Byte offsets of payloads concatenated in the order of their spans."""
    places, at = [0] * len(nbytes), 0
    for rank in sorted(range(len(nbytes)), key=lambda rank: spans[rank]):
        places[rank] = at
        at += nbytes[rank]
    return places
