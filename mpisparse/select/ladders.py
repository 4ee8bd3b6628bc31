"""How the counts of a ladder travel: falling from rung to rung, as bytes of a size that all ranks know beforehand."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpisparse.arrays import Bytes, Ints
from mpisparse.comm.agreement import Notice, refuse
from mpisparse.select import tallies

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.exchange import Exchange


class Ladder(NamedTuple):
    """What all ranks know of a ladder's message before it is sent.

    above: every rank's count at the upper end of a finer ladder; None: the ladder is new. totals: each rank's elements
    between the ends; for a new ladder, how many there is room for. told: the ranks' statuses are known.
    """

    above: list[int] | None
    totals: list[int]
    told: bool


def share_ladder(exchange: Exchange, backend: Backend, notice: Notice, counts: Ints, message: Ladder, most: int) -> Ints:
    """Gather counts that fall from rung to rung, one row per rank; raise on all ranks if any cannot go on. Collective.

    The counts between two rungs travel as bytes of a size that all ranks know beforehand. If a rank has more on a new ladder
    than there is room for, its counts follow in a second message. The counts at the ends of a finer ladder are known. No
    count exceeds `most`.
    """
    rows: Ints = np.empty((exchange.size, len(counts)), dtype=np.int64)
    if message.above is not None:
        spaces = tallies.rooms(len(counts), message.totals)
        gathered, starts = _gather_falling(exchange, backend, counts, message.above[exchange.rank], spaces)
        for rank, (total, above) in enumerate(zip(message.totals, message.above, strict=True)):
            _read_falling(backend, gathered[starts[rank] : starts[rank + 1]], total, above, rows[rank])
        return rows
    slots = max(0, len(counts) - 1)
    spaces = tallies.rooms(slots, message.totals)
    own = [*(() if message.told else (notice.status, notice.detail)), *(counts[[0, -1]].tolist() if len(counts) else ())]
    form = struct.Struct("=" + ("" if message.told else "qq") + ("" if not len(counts) else "II" if most < 2**32 else "QQ"))
    above = own[-1] if len(counts) else 0
    fits = not slots or tallies.room(slots, own[-2] - above) <= spaces[exchange.rank]
    gathered, starts = _gather_falling(exchange, backend, counts[: slots if fits else 0], above, spaces, form.pack(*own))
    heads = [form.unpack_from(gathered.data, start) for start in starts[:-1]]
    if not message.told and any(head[0] for head in heads):
        refuse(np.array([head[:2] for head in heads]), notice)
    if not len(counts):
        return rows
    totals = [head[-2] - head[-1] for head in heads]
    late = late_sizes(slots, totals, spaces)
    rows[:, -1] = [head[-1] for head in heads]
    for rank, total in enumerate(totals):
        if not late[rank]:
            coded = gathered[starts[rank] + form.size : starts[rank + 1]]
            _read_falling(backend, coded, total, heads[rank][-1], rows[rank, :-1])
    if any(late):
        gathered, starts = _gather_falling(exchange, backend, counts[: slots if late[exchange.rank] else 0], above, late)
        for rank, total in enumerate(totals):
            if late[rank]:
                _read_falling(backend, gathered[starts[rank] : starts[rank + 1]], total, heads[rank][-1], rows[rank, :-1])
    return rows


def _gather_falling(
    exchange: Exchange, backend: Backend, counts: Ints, above: int, spaces: Sequence[int], head: bytes = b""
) -> tuple[Bytes, list[int]]:
    """Gather messages of a head and falling counts; also return the start of each, and the end of the last."""
    sizes = [len(head) + space for space in spaces]
    payload: Bytes = np.empty(sizes[exchange.rank], dtype=np.uint8)
    payload[: len(head)] = np.frombuffer(head, dtype=np.uint8)
    backend.encode_falling(counts, above, payload[len(head) :])
    starts = tallies.starts_of(sizes)
    return exchange.allgatherv(payload, sizes, starts[:-1]), starts


def _read_falling(backend: Backend, coded: Bytes, total: int, above: int, row: Ints) -> None:
    """Decode a rank's falling counts into its row."""
    if not backend.decode_falling(coded, total, above, row):
        raise RuntimeError(tallies.DAMAGED)


def late_sizes(slots: int, totals: Sequence[int], spaces: Sequence[int]) -> list[int]:
    """Bytes of the second messages, from ranks whose counts may not fit into the first."""
    return [size if size > space else 0 for size, space in zip(tallies.rooms(slots, totals), spaces, strict=True)]
