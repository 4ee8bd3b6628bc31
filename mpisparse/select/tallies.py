"""Counts as bytes, for control messages: ladders, counts in blocks, histograms.

A row of counts travels as coded indices (mpisparse.backends.numpy_tallies): a thousand counts of three hundred items take
a hundred bytes. The number of counts and their sum bound the number of bytes, so a rank that knows the sums of all ranks
also knows the sizes of their messages.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from mpisparse.arrays import Bytes, Ints
from mpisparse.backends.gaps import most_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.exchange import Exchange

DAMAGED = "the counts of a message do not decode: it is damaged"


def room(slots: int, total: int) -> int:
    """The largest number of bytes of this many counts with this sum."""
    return most_nbytes(min(slots, total), slots + total)


def rooms(slots: int, totals: Sequence[int]) -> list[int]:
    """The same for counts of several ranks."""
    known = {total: room(slots, total) for total in set(totals)}
    return [known[total] for total in totals]


def encode(backend: Backend, counts: Ints) -> Bytes:
    """Counts as bytes."""
    return backend.encode_counts(counts)


def padded(coded: Bytes, nbytes: int) -> Bytes:
    """Bytes padded with zeros to a size."""
    payload: Bytes = np.zeros(nbytes, dtype=np.uint8)
    payload[: len(coded)] = coded
    return payload


def decode(backend: Backend, payload: Bytes, slots: int, total: int) -> Ints:
    """The counts that encode() encoded."""
    counts: Ints = np.empty(slots, dtype=np.int64)
    if not backend.decode_counts(payload, total, counts):
        raise RuntimeError(DAMAGED)
    return counts


def starts_of(nbytes: Sequence[int]) -> list[int]:
    """The start of every message in a concatenation, and the end of the last."""
    return list(accumulate(nbytes, initial=0))


def gather(exchange: Exchange, backend: Backend, counts: Ints, totals: Ints | None = None) -> Ints:
    """Gather counts, one row per rank; `totals` are their sums.

    If not all ranks know these, they are gathered first, with the sizes of the messages.
    """
    if totals is not None:
        return gather_parts(exchange, backend, counts, totals, rooms(len(counts), totals.tolist()))
    sums_and_sizes = exchange.allgather(np.array([counts.sum(), len(encode(backend, counts))], dtype=np.int64))
    return gather_parts(exchange, backend, counts, sums_and_sizes[:, 0], sums_and_sizes[:, 1].tolist())


def gather_parts(exchange: Exchange, backend: Backend, counts: Ints, totals: Ints, nbytes: list[int]) -> Ints:
    """As gather(), for the ranks whose messages have bytes; the rows of others are zeros."""
    starts, mine = starts_of(nbytes), nbytes[exchange.rank]
    payload = padded(encode(backend, counts), mine) if mine else np.empty(0, dtype=np.uint8)
    gathered = exchange.allgatherv(payload, nbytes, starts[:-1])
    rows = np.zeros((len(nbytes), len(counts)), dtype=np.int64)
    for rank, (start, size) in enumerate(zip(starts[:-1], nbytes, strict=True)):
        if size and not backend.decode_counts(gathered[start : start + size], int(totals[rank]), rows[rank]):
            raise RuntimeError(DAMAGED)
    return rows


def clipped(histogram: Ints, most: int) -> Ints:
    """A histogram whose cumulative count from the top stops at `most`: enough to place any smaller count."""
    tails = np.minimum(np.cumsum(histogram[::-1]), most)
    return np.diff(tails, prepend=0)[::-1].copy()
