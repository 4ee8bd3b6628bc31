"""Counts as bytes, for messages that only agree on something: ladders, counts in blocks, histograms.

A row of counts is a row of marks in which each count's items are followed by its end. Either the places of the items travel
or those of the ends, whichever are fewer, as coded indices (mpisparse.backends.gaps): a thousand counts of three hundred
items take a hundred bytes. How many bytes they take at most follows from the number of counts and their sum. A rank that
knows the sums of all ranks thus knows the sizes of their messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpisparse.arrays import Bytes, Ints
from mpisparse.backends.gaps import most_nbytes

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.exchange import Exchange


def room(slots: int, total: int) -> int:
    """Bytes that so many counts with this sum take at most."""
    return most_nbytes(min(slots, total), slots + total)


def encode(backend: Backend, counts: Ints) -> Bytes:
    """Counts as bytes."""
    slots, total = len(counts), int(counts.sum())
    if total < slots:
        places = np.repeat(np.arange(slots), counts) + np.arange(total)
    else:
        places = np.cumsum(counts) + np.arange(slots)
    return backend.encode_indices(places, 0, slots + total)


def padded(coded: Bytes, nbytes: int) -> Bytes:
    """Bytes with zeros behind them up to a size."""
    return np.concatenate([coded, np.zeros(nbytes - len(coded), dtype=np.uint8)])


def decode(backend: Backend, payload: Bytes, slots: int, total: int) -> Ints:
    """The counts that encode() was given."""
    places: Ints = np.empty(min(slots, total), dtype=np.int64)
    used = backend.decode_indices(payload, 0, slots + total, places)
    if total < slots:
        items = places - np.arange(total)
        counts = np.bincount(items, minlength=slots) if used >= 0 else items
    else:
        counts = np.diff(places, prepend=-1) - 1
    if used < 0 or len(counts) != slots or int(counts.sum()) != total:
        raise RuntimeError("the counts of a message do not decode: it is damaged")
    return counts.astype(np.int64)


def gather(exchange: Exchange, backend: Backend, counts: Ints, totals: Ints | None = None) -> Ints:
    """Gather counts, one row per rank; `totals` are their sums.

    If not all ranks know these, they are gathered first, with the sizes of the messages.
    """
    if totals is not None:
        return gather_parts(exchange, backend, counts, totals, [room(len(counts), total) for total in totals.tolist()])
    told = exchange.allgather(np.array([counts.sum(), len(encode(backend, counts))], dtype=np.int64))
    return gather_parts(exchange, backend, counts, told[:, 0], told[:, 1].tolist())


def gather_parts(exchange: Exchange, backend: Backend, counts: Ints, totals: Ints, nbytes: list[int]) -> Ints:
    """As gather(), of those ranks for which there are bytes; the rows of others are zeros."""
    starts = np.cumsum([0, *nbytes]).tolist()
    mine = nbytes[exchange.rank]
    payload = padded(encode(backend, counts), mine) if mine else np.empty(0, dtype=np.uint8)
    gathered = exchange.allgatherv(payload, nbytes, starts[:-1])
    rows = np.zeros((len(nbytes), len(counts)), dtype=np.int64)
    for rank, (start, size) in enumerate(zip(starts[:-1], nbytes, strict=True)):
        if size:
            rows[rank] = decode(backend, gathered[start : start + size], len(counts), int(totals[rank]))
    return rows


def clipped(histogram: Ints, most: int) -> Ints:
    """A histogram whose sums from the top stop at `most`: enough to find where fewer than that are reached."""
    tails = np.minimum(np.cumsum(histogram[::-1]), most)
    return np.diff(tails, prepend=0)[::-1].copy()
