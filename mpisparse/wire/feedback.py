"""Reduction at fixed owners with error feedback both ways: owners remember their codec's error on the mean.

Rank r sends q_r = Q(v_r). The owner of an element computes u = rate x mean(q) + e and returns Q(u); e = u - Q(u) waits at
the owner until the element is sent again. The caller keeps what a rank did not send, v_r - q_r; q_r is in `Reduced.own`.
Owners are fixed, so that e never moves: each rank owns an even stretch of a whole vector, or every size-th block of 64 if
elements are selected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpisparse.arrays import Floats, Ints, State
from mpisparse.comm.agreement import Overflow
from mpisparse.comm.regions import Part, Subset, even_regions, index_on
from mpisparse.errors import ConfigurationError
from mpisparse.wire.encoded import Encoded, Rooms, Span, check, encode, settle_span, span_nbytes
from mpisparse.wire.own import OwnByOwner
from mpisparse.wire.reduction import NOT_A_NUMBER, Reduced, Reducer

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.exchange import Exchange
    from mpisparse.comm.regions import Region
    from mpisparse.wire.codecs.protocol import Codec

BLOCK = 64  # neighbours with the same owner, if elements are selected


@dataclass(frozen=True)
class AtFixedOwners(Reducer):
    """Base of the reducers below. error: this rank's e; n: elements of the vector; rate: a factor on the mean.

    rooms: reused memory for received bytes, if none of them are kept.
    """

    codec: Codec
    error: Any
    n: int
    rate: float = 1.0
    rooms: Rooms | None = None

    def state(self) -> State:
        return {"error": self.error}

    def check(self, state: State) -> None:
        error = np.asarray(state["error"])
        if error.shape != (len(self.error),) or not np.isfinite(error).all():
            raise ConfigurationError(f"the owner's error in the state must be {len(self.error)} finite numbers")

    def loaded(self, state: State) -> Reducer:
        saved = np.asarray(state["error"])
        self.error[:] = saved if isinstance(self.error, np.ndarray) else torch.from_numpy(saved)
        return self

    def _error(self, saved: Any, count: int) -> Floats:
        """A saved e that replaces the present one when a delivery is applied."""
        error: Floats = np.array(saved, dtype=np.float32)
        if error.shape != (count,) or not np.isfinite(error).all():
            raise ValueError(f"the owner's error must be {count} finite numbers")
        return error

    def owned(self, rank: int, size: int) -> Any:
        """The elements whose e a rank of `size` keeps, in the order of e: a slice, or an ascending index."""
        raise NotImplementedError

    def give(self, backend: Backend, vector: Any, rank: int, size: int) -> None:
        """Add this rank's e to a vector, as one of `size` summands."""
        owned, error = self.owned(rank, size), backend.from_host(self.error) * np.float32(size)
        if isinstance(owned, slice):
            backend.add(vector[owned], error)
        else:
            backend.add_at(vector, backend.from_host(owned), error)

    def regrouped(self, errors: Mapping[int, Floats], rank: int, size: int) -> Floats:
        """The e of one of `size` ranks, from those of all former ranks."""
        every: Floats = np.zeros(self.n, dtype=np.float32)
        for old, error in errors.items():
            every[self.owned(old, len(errors))] = error
        mine: Floats = every[self.owned(rank, size)].copy()
        return mine

    def moved(
        self, fresh: Reducer, exchange: Exchange, backend: Backend, rank: int, size: int
    ) -> Callable[[Floats], object]:
        """With weights, e goes to the new owners: it belongs to the shared weights, not to any rank's vector."""
        assert isinstance(fresh, AtFixedOwners)
        every: Floats = np.zeros(self.n, dtype=np.float32)
        every[self.owned(rank, size)] = backend.to_host(self.error)
        exchange.allreduce_(every)  # at most one rank has an e for each element
        mine = every[self.owned(exchange.rank, exchange.size)]
        return lambda acc: fresh.loaded({"error": mine})

    def recalled(self, state: State, residual: Floats) -> State | None:
        """Nothing: the vector still holds what was sent, and does not hold the result."""
        return None

    def _exchange(self, exchange: Exchange, backend: Backend, out: Encoded, error: Any, left: Any) -> Encoded:
        """Send each span to its owner; returns the answers of all owners. Collective.

        error: this rank's e at its span; left: where its new e goes.
        """
        rank, size, spans = exchange.rank, exchange.size, out.spans
        if self.codec.variable:
            table = exchange.allgather(np.array(out.sizes, dtype=np.int64))
            received, counts = exchange.route(out.payload, table), table[:, rank].tolist()
        else:
            into = self._room(backend, "received", size * out.sizes[rank])
            received, counts = exchange.alltoallv(out.payload, out.sizes, out.starts, into), [out.sizes[rank]] * size
        ends = np.cumsum([0, *counts]).tolist()
        rows = [received[ends[r] : ends[r + 1]] for r in range(size)]
        back, bad = self._reduce(backend, rows, spans[rank], size, error, left)
        sizes = [span_nbytes(self.codec, span) for span in spans]
        if self.codec.variable:
            reports = exchange.allgather(np.array([len(back), bad], dtype=np.int64))
            if (reports[:, 1] >= 0).any():
                raise Overflow(int(reports[:, 1].max()))
            sizes = reports[:, 0].tolist()
        arrived = Encoded(self.codec, back, spans, sizes)
        into = self._room(backend, "received", sum(sizes))
        arrived = arrived._replace(payload=exchange.allgatherv(back, sizes, arrived.starts, into))
        self._check_finite(exchange, backend, arrived, bad)
        return arrived

    @np.errstate(over="ignore", invalid="ignore")
    def _reduce(
        self, backend: Backend, rows: Sequence[Any], span: Span, size: int, error: Any, left: Any
    ) -> tuple[Any, int]:
        """Sum the values of this rank's span in rank order; return the bytes of u, and its first non-finite index or -1."""
        back = self._room(backend, "back", span_nbytes(self.codec, span))
        written, bad = settle_span(self.codec, backend, rows, span, size / self.rate, error, left, back)
        if bad >= 0:
            backend.fill(back, NOT_A_NUMBER)
        return back[:written], bad

    def _room(self, backend: Backend, name: str, nbytes: int) -> Any:
        return backend.empty(nbytes, np.uint8) if self.rooms is None else self.rooms.of(name, nbytes)

    def _check_finite(self, exchange: Exchange, backend: Backend, arrived: Encoded, bad: int) -> None:
        """Raise Overflow on all ranks if an owner's sum is not finite: its bytes decode to NaN from the first on."""
        heads = backend.empty(4 * len(arrived.spans), np.uint8)
        backend.fill(heads, 0)
        for i, (at, span) in enumerate(zip(arrived.starts, arrived.spans, strict=True)):
            if span[1] > span[0]:
                heads[4 * i : 4 * i + 4] = arrived.payload[at : at + 4]
        spoiled = (backend.to_host(heads).reshape(-1, 4) == NOT_A_NUMBER).all(axis=1)
        for i in np.flatnonzero(spoiled).tolist():
            at, size, span = arrived.starts[i], arrived.sizes[i], arrived.spans[i]
            first = arrived._replace(payload=arrived.payload[at : at + size], spans=[span], sizes=[size])
            *_, values = next(first.values(backend))
            if np.isnan(backend.to_host(values[:1])[0]):
                raise Overflow(int(exchange.allreduce_(np.array([bad], dtype=np.int64), "max")[0]))


@dataclass(frozen=True)
class WholeAtOwners(AtFixedOwners):
    """Every element of the vector in every exchange; each rank owns an even stretch.

    spare: memory for the next e. target: where the mean of gradients is written; without it the vector holds weights,
    and `Reduced.mean` stays encoded.
    """

    spare: Any = None
    target: Callable[[], torch.Tensor] | None = None

    def reduce(self, exchange: Exchange, backend: Backend, index: Any, values: Any, regions: Sequence[Region]) -> Reduced:
        spans = [(region.lo, region.hi) for region in even_regions(self.n, exchange.size)]
        own = values if isinstance(values, Encoded) else encode(self.codec, backend, values, spans)
        left = self.spare if self.spare is not None else backend.empty(len(self.error), np.float32)
        arrived = self._exchange(exchange, backend, own, self.error, left)
        if self.target is None:
            return Reduced(index, arrived, None, own=own, error=left)
        mean = backend.array_of(self.target())
        arrived.write(backend, mean)
        return Reduced(index, mean, None, own=own, error=left)

    def after(self, backend: Backend, reduced: Reduced) -> Reducer:
        return replace(self, error=reduced.error, spare=self.error)

    def packed(self, reduced: Reduced) -> State:
        mean, own = reduced.mean, reduced.own
        sizes = {"mean_sizes": list(mean.sizes), "own_sizes": list(own.sizes)}
        return {"mean": mean.payload, "own": own.payload, **sizes, "error": reduced.error}

    def unpacked(self, state: State, size: int) -> Reduced:
        spans = [(region.lo, region.hi) for region in even_regions(self.n, size)]
        mean, own = (encoded_in(state, name, self.codec, spans) for name in ("mean", "own"))
        return Reduced(range(self.n), mean, None, own=own, error=self._error(state["error"], len(self.error)))  # type: ignore[arg-type]

    def owned(self, rank: int, size: int) -> slice:
        region = even_regions(self.n, size)[rank]
        return slice(region.lo, region.hi)

    def moved(
        self, fresh: Reducer, exchange: Exchange, backend: Backend, rank: int, size: int
    ) -> Callable[[Floats], object]:
        if self.target is None:
            return super().moved(fresh, exchange, backend, rank, size)
        return Reducer.moved(self, fresh, exchange, backend, rank, size)

    def at_rest(self, state: State, residual: Floats, rank: int, size: int) -> State:
        """Move the owner's e to its residual, times `size`, since the mean divides it by the number of ranks."""
        residual[self.owned(rank, size)] += np.asarray(state["error"]) * np.float32(size)
        return {**state, "error": np.zeros(0, dtype=np.float32)}


@dataclass(frozen=True)
class PartAtOwners(AtFixedOwners):
    """A part of the vector in each exchange (`index` is a Subset); each rank owns an even stretch of the vector.

    e is in the order of the vector, so any parts may follow each other.
    """

    def reduce(self, exchange: Exchange, backend: Backend, index: Any, values: Any, regions: Sequence[Region]) -> Reduced:
        spans = self._spans(index, exchange.size)
        own = encode(self.codec, backend, values, spans)
        places = index_on(backend, index, *spans[exchange.rank]) - self.owned(exchange.rank, exchange.size).start
        left = backend.empty(len(places), np.float32)
        try:
            arrived = self._exchange(exchange, backend, own, backend.values_at(self.error, places), left)
        except Overflow as overflow:
            at = overflow.args[0]
            raise Overflow(int(index.index(at, at + 1)[0])) from None
        return Reduced(index, arrived, None, own=own, error=(places, left))

    def after(self, backend: Backend, reduced: Reduced) -> Reducer:
        backend.put(self.error, *reduced.error)
        return self

    def packed(self, reduced: Reduced) -> State:
        mean, own, (places, left), part = reduced.mean, reduced.own, reduced.error, reduced.index
        sizes = {"mean_sizes": list(mean.sizes), "own_sizes": list(own.sizes)}
        where = {"places": places, "every": part.every, "phase": part.phase}  # type: ignore[attr-defined]
        return {"mean": mean.payload, "own": own.payload, **sizes, "error": left, **where}

    def unpacked(self, state: State, size: int) -> Reduced:
        part = Part(self.n, int(state["every"]), int(state["phase"]))
        places = np.asarray(state["places"], dtype=np.int64)
        outside = len(places) and not 0 <= places.min() <= places.max() < len(self.error)
        if not 0 <= part.phase < part.every or outside:
            raise ValueError("a part in flight is not one of this vector")
        mean, own = (encoded_in(state, name, self.codec, self._spans(part, size)) for name in ("mean", "own"))
        error = places, self._error(state["error"], len(places))
        return Reduced(part, mean, None, own=own, error=error)  # type: ignore[arg-type]

    def _spans(self, part: Subset, size: int) -> list[Span]:
        """The place of each rank's stretch in a part."""
        return [(part.below(region.lo), part.below(region.hi)) for region in even_regions(self.n, size)]

    def owned(self, rank: int, size: int) -> slice:
        region = even_regions(self.n, size)[rank]
        return slice(region.lo, region.hi)


@dataclass(frozen=True)
class SelectedAtOwners(AtFixedOwners):
    """The same selected elements of all ranks; every rank owns every size-th block."""

    def reduce(self, exchange: Exchange, backend: Backend, index: Any, values: Any, regions: Sequence[Region]) -> Reduced:
        kernels: Any = backend
        order, counts, places = kernels.by_owner(index, BLOCK, exchange.size, exchange.rank)
        ends = np.cumsum(counts).tolist()
        spans = list(zip([0, *ends[:-1]], ends, strict=True))
        own = encode(self.codec, backend, backend.values_at(values, order), spans)
        left = backend.empty(len(places), np.float32)
        try:
            arrived = self._exchange(exchange, backend, own, backend.values_at(self.error, places), left)
        except Overflow as overflow:
            at = int(backend.pick(order, np.array([overflow.args[0]]))[0])
            raise Overflow(int(backend.pick(index, np.array([at]))[0])) from None
        mean, sent = (backend.empty(len(index), np.float32) for _ in range(2))
        backend.put(mean, order, arrived.decoded(backend))
        backend.put(sent, order, own.decoded(backend))
        return Reduced(index, mean, None, own=sent, error=(places, left))

    def after(self, backend: Backend, reduced: Reduced) -> Reducer:
        backend.put(self.error, *reduced.error)
        return self

    def packed(self, reduced: Reduced) -> State:
        places, left = reduced.error
        return {"index": reduced.index, "mean": reduced.mean, "own": reduced.own, "places": places, "error": left}

    def unpacked(self, state: State, size: int) -> Reduced:
        index, places = (np.asarray(state[key], dtype=np.int64) for key in ("index", "places"))
        mean, own = (np.asarray(state[key], dtype=np.float32) for key in ("mean", "own"))
        if mean.shape != index.shape or own.shape != index.shape or not np.isfinite(mean - own).all():
            raise ValueError(f"the sent and returned values of {len(index)} elements must be as many finite numbers")
        if len(places) and not 0 <= places.min() <= places.max() < len(self.error):
            raise ValueError("an owner's error is of elements that it does not own")
        return Reduced(index, mean, None, own=own, error=(places, self._error(state["error"], len(places))))

    def owned(self, rank: int, size: int) -> Ints:
        index: Ints = np.arange(self.n)
        mine: Ints = index[index // BLOCK % size == rank]
        return mine


@dataclass(frozen=True)
class OwnAtOwners(SelectedAtOwners):
    """Each rank's own elements; every rank owns an even stretch of the vector, or rank 0 all of it (one_server).

    received: the mean is over the ranks that sent an element, instead of over all. `Reduced.own` lies where the mean does.
    """

    received: bool = False
    one_server: bool = False

    def reduce(self, exchange: Exchange, backend: Backend, index: Any, values: Any, regions: Sequence[Region]) -> Reduced:
        """The regions must be those of owned()."""
        messages, start = OwnByOwner(self.codec), self.owned(exchange.rank, exchange.size).start

        def answer(union: Ints, total: Floats, senders: Floats) -> Floats:
            mean: Floats = np.float32(self.rate) * total / (senders if self.received else np.float32(exchange.size))
            mean += self.error[union - start]
            return mean

        outcome = messages.travel(exchange, backend, index, values, regions, answer)
        own = np.zeros(len(outcome.index), dtype=np.float32)
        own[np.searchsorted(outcome.index, index)] = messages.arrived(backend, outcome, index, regions)
        return Reduced(
            outcome.index, outcome.values, None, nbytes=outcome.nbytes, index_nbytes=outcome.index_nbytes, own=own,
            error=(outcome.mine - start, outcome.left),
        )  # fmt: skip

    def owned(self, rank: int, size: int) -> slice:  # type: ignore[override]  # a stretch
        if self.one_server:
            return slice(0, self.n) if rank == 0 else slice(self.n, self.n)
        region = even_regions(self.n, size)[rank]
        return slice(region.lo, region.hi)


def encoded_in(state: State, name: str, codec: Codec, spans: Sequence[Span]) -> Encoded:
    """Encoded values from a state; raises ValueError unless they fit the spans."""
    encoded = Encoded(codec, np.asarray(state[name], dtype=np.uint8), spans, list(map(int, state[f"{name}_sizes"])))
    check(encoded)
    return encoded


def owned_count(n: int, size: int, rank: int) -> int:
    """How many of n elements a rank owns if elements are selected."""
    whole, rest = divmod(n, BLOCK * size)
    return whole * BLOCK + min(BLOCK, max(0, rest - rank * BLOCK))
