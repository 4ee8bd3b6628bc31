"""What a rank sends of a step and what comes back: only what each rank filtered, summed by whoever serves the region.

All that ranks must know of each other travels with it, so that no rank waits for another before it goes on: whether each
could go on, the losses, and which parameters had a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpisparse.arrays import Bools, Bytes, Floats, Ints
from mpisparse.core.records import Region
from mpisparse.schemes.speculative.wire import pack, unpack

if TYPE_CHECKING:
    from mpisparse.comm.exchange import Exchange
    from mpisparse.wire.codecs import Codec

HEAD = 7  # whole numbers before the counts: status, detail, k, the bits of loss, confidence and seconds, what is frozen
NOTHING: Ints = np.empty(0, dtype=np.int64)
NO_VALUES: Floats = np.empty(0, dtype=np.float32)
NO_BYTES: Bytes = np.empty(0, dtype=np.uint8)
ARRAYS = {
    "used": np.bool_, "workloads": np.int64, "index": np.int64, "left_index": np.int64,
    "mean": np.float32, "left": np.float32,
}  # fmt: skip


@dataclass(frozen=True)
class Parcel:
    """A rank's part of a step. loss and confidence: NaN where unknown; regions, counts and payloads are of rank 0, 1, ...

    trouble: why this rank cannot go on, where the status does not say it.
    """

    step: int
    status: int
    detail: int
    k: int
    used: Bools
    loss: float
    confidence: float
    seconds: float
    regions: list[Region]
    counts: list[int]
    payloads: list[Bytes]
    trouble: str = ""
    frozen: int = 0

    def row(self) -> Bytes:
        """What every rank gets of it."""
        numbers = np.array([self.loss, self.confidence, self.seconds])
        head = [self.status, self.detail, self.k, *numbers.view(np.int64).tolist(), self.frozen]
        places = np.array([*head, *self.counts, *map(len, self.payloads)], dtype=np.int64)
        return np.concatenate([places.view(np.uint8), np.packbits(self.used)])


@dataclass(frozen=True)
class Result:
    """What came of a step, the same on all ranks but for what this rank's own sums left over, and the bytes.

    refused: (status, detail) of every rank if one could not go on. failure: what went wrong on the way, else empty. nbytes:
    of indices and values, sent by a rank on average.
    """

    step: int
    ks: tuple[int, ...]
    used: Bools
    loss: float
    confidence: float
    seconds: float
    workloads: Ints
    refused: tuple[tuple[int, int], ...] = ()
    failure: str = ""
    overflow: int = -1
    index: Ints = field(default_factory=lambda: NOTHING)
    mean: Floats = field(default_factory=lambda: NO_VALUES)
    left_index: Ints = field(default_factory=lambda: NOTHING)
    left: Floats = field(default_factory=lambda: NO_VALUES)
    nbytes: int = 0
    nbytes_sent: int = 0
    nbytes_received: int = 0
    frozen: tuple[int, ...] = ()

    def state(self) -> dict[str, Any]:
        """The result as arrays and scalars."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def of(cls, state: dict[str, Any]) -> Result:
        """The result that state() gave."""
        values: dict[str, Any] = dict(state)
        values |= {name: np.asarray(state[name], dtype=kind) for name, kind in ARRAYS.items()}
        return cls(
            **{
                **values,
                "refused": tuple(map(tuple, state["refused"])),
                "ks": tuple(state["ks"]),
                "frozen": tuple(state.get("frozen", ())),
            }
        )


def fill(backend: Any, codec: Codec, regions: list[Region], index: Ints, values: Floats) -> tuple[list[int], list[Bytes]]:
    """Counts and payloads of the regions; `values` becomes what was not sent."""
    cuts = np.searchsorted(index, [*(r.lo for r in regions), regions[-1].hi]).tolist()
    counts, payloads = [], []
    for region, a, b in zip(regions, cuts[:-1], cuts[1:], strict=True):
        encoded = np.empty(codec.nbytes(b - a), dtype=np.uint8)
        codec.encode(backend, values[a:b], encoded)
        counts.append(b - a)
        payloads.append(np.concatenate([pack(backend, index[a:b], region.lo, region.hi), encoded]) if b > a else encoded)
    return counts, payloads


class Delivery:
    """Takes a parcel through the ranks; received: divide by how many sent an element instead of by the ranks."""

    def __init__(self, exchange: Exchange, backend: Any, codec: Codec, *, received: bool) -> None:
        self.exchange = exchange
        self.backend = backend
        self.codec = codec
        self.received = received

    def run(self, parcel: Parcel) -> Result:
        """Exchange a parcel; collective. An error on a rank comes back to all, and none waits for it."""
        exchange, size = self.exchange, self.exchange.size
        exchange.reset_counters()
        rows = exchange.allgather(parcel.row())
        width = 8 * (HEAD + 2 * size)
        table = np.ascontiguousarray(rows[:, :width]).view(np.int64)
        used = np.bitwise_or.reduce(rows[:, width:], axis=0)
        loss, confidence, seconds = (float(np.mean(table[:, column].view(np.float64))) for column in (3, 4, 5))
        counts, nbytes = table[:, HEAD : HEAD + size], table[:, HEAD + size :]
        result = Result(
            parcel.step, tuple(table[:, 2].tolist()), np.unpackbits(used, count=len(parcel.used)).astype(np.bool_),
            loss, confidence, seconds, counts.sum(axis=1), frozen=tuple(table[:, 6].tolist()),
        )  # fmt: skip
        if table[:, 0].any():
            refused = tuple((int(status), int(detail)) for status, detail in table[:, :2])
            result = replace(result, refused=refused, failure=_first(exchange.gather_texts(parcel.trouble)))
        elif (table[:, 2] == parcel.k).all() and (table[:, 6] == parcel.frozen).all():
            result = self._sum(parcel, counts, nbytes, result)
        return replace(result, nbytes_sent=exchange.nbytes_sent, nbytes_received=exchange.nbytes_received)

    def _sum(self, parcel: Parcel, counts: Ints, nbytes: Ints, result: Result) -> Result:
        """To the regions' owners, who add in rank order, and back to all."""
        exchange, regions = self.exchange, parcel.regions
        mine = exchange.rank
        arrived = exchange.route(np.concatenate(parcel.payloads), nbytes)
        served, error = _Served(NOTHING, result.mean, NO_BYTES), ""
        try:
            served = self._serve(regions[mine], arrived, counts[:, mine].tolist(), nbytes[:, mine].tolist())
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        back = exchange.allgather(
            np.array([len(served.payload), len(served.index), served.bad, bool(error)], dtype=np.int64)
        )
        starts = np.cumsum([0, *back[:, 0]]).tolist()
        gathered = exchange.allgatherv(served.payload, back[:, 0].tolist(), starts[:-1])
        index, mean = result.index, result.mean
        bad, failed = int(back[:, 2].max()), bool(back[:, 3].any())
        if bad < 0 and not failed:
            try:
                index, mean = self._read(regions, gathered, starts, back[:, 1].tolist())
            except Exception as caught:
                error = f"{type(caught).__name__}: {caught}"
        failure = _first(exchange.gather_texts(error))
        moved = int(nbytes.sum() + back[:, 0].sum() * (exchange.size - 1)) // exchange.size
        result = replace(result, failure=failure, overflow=bad, index=index, mean=mean, nbytes=moved)
        return result if self.codec.lossless else replace(result, left_index=served.index, left=served.left)

    def _serve(self, region: Region, arrived: Bytes, counts: list[int], nbytes: list[int]) -> _Served:
        """Add up what the ranks sent of this rank's region."""
        indices, terms, at = [], [], 0
        for count, length in zip(counts, nbytes, strict=True):
            payload, at = arrived[at : at + length], at + length
            index, term = NOTHING, np.empty(count, dtype=np.float32)
            if count:
                size = self.codec.nbytes(count)
                index = unpack(self.backend, payload[: length - size], region.lo, region.hi)
                self.codec.decode(self.backend, payload[length - size :], term)
            indices.append(index)
            terms.append(term)
        union = np.sort(np.concatenate(indices), kind="stable")  # of sorted runs, which that merges
        union = union[np.diff(union, prepend=-1) > 0]
        total, senders = np.zeros((2, len(union)), dtype=np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for index, term in zip(indices, terms, strict=True):
                places = np.searchsorted(union, index)
                total[places] += term
                senders[places] += 1
        if self.received:
            total /= senders
        bad = np.flatnonzero(~np.isfinite(total))[:1]
        if len(bad):
            return _Served(NOTHING, total[:0], NO_BYTES, bad=int(union[bad[0]]))
        encoded = np.empty(self.codec.nbytes(len(union)), dtype=np.uint8)
        self.codec.encode(self.backend, total, encoded)
        payload = np.concatenate([pack(self.backend, union, region.lo, region.hi), encoded])
        return _Served(union, total, payload)

    def _read(self, regions: list[Region], gathered: Bytes, starts: list[int], counts: list[int]) -> tuple[Ints, Floats]:
        """The union of all regions and its mean, from the owners' payloads."""
        indices, means = [], []
        for region, begin, end, count in zip(regions, starts[:-1], starts[1:], counts, strict=True):
            size = self.codec.nbytes(count)
            mean = np.empty(count, dtype=np.float32)
            if count:
                indices.append(unpack(self.backend, gathered[begin : end - size], region.lo, region.hi))
                self.codec.decode(self.backend, gathered[end - size : end], mean)
            means.append(mean)
        mean = np.concatenate(means)
        if not self.received:
            mean /= np.float32(self.exchange.size)
        return np.concatenate([NOTHING, *indices]), mean


def _first(texts: list[str]) -> str:
    """What the first rank that has something to say says."""
    return next((f"on rank {rank}: {text}" for rank, text in enumerate(texts) if text), "")


@dataclass(frozen=True)
class _Served:
    """A region's sums: where, what the codec left over, and as bytes. bad: an index whose sum is beyond float32, or -1."""

    index: Ints
    left: Floats
    payload: Bytes
    bad: int = -1
