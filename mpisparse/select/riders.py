"""Counts on a ladder that travel with the roll call, if each rank's region is known before the step.

If borders stay from the last step, all regions are known before any message. So a rank counts first, without adding its
gradient, and sends the counts along with its call and its status. Roll calls have the same length in all entry points. If
a rank's counts do not fit, or it has none to send, all ranks send theirs in a separate message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpisparse.arrays import Bytes, Ints
from mpisparse.select import tallies
from mpisparse.select.candidates import Candidates

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend

HEAD = 2  # numbers before the coded counts: the first count plus one (0: no counts), and the last count
NBYTES = 256  # room for the counts on 256 rungs of 16,000 elements


class Opening(NamedTuple):
    """The candidates found before the gradient is added, and the counts on the ladder as bytes; None: they do not fit."""

    found: Candidates
    rider: Bytes | None


def pack(backend: Backend, counts: Ints) -> Bytes | None:
    """Encode falling counts as bytes of a roll call; None if they do not fit."""
    between, last = counts[:-1], int(counts[-1])
    rider: Bytes = np.zeros(NBYTES, dtype=np.uint8)
    head, room = rider[: 8 * HEAD].view(np.int64), rider[8 * HEAD :]
    if not fits(counts):
        return None
    head[:] = int(counts[0]) + 1, last
    backend.encode_falling(between, last, room)
    return rider


def fits(counts: Ints) -> bool:
    """Tell whether falling counts have room in a roll call."""
    return tallies.room(len(counts) - 1, int(counts[0] - counts[-1])) <= NBYTES - 8 * HEAD


def unpack(backend: Backend, riders: Bytes, rungs: int) -> Ints | None:
    """The counts of all ranks, one row per rank; None unless all ranks sent theirs."""
    heads = np.ascontiguousarray(riders[:, : 8 * HEAD]).view(np.int64)
    if (heads[:, 0] == 0).any():
        return None
    rows: Ints = np.empty((len(riders), rungs), dtype=np.int64)
    rows[:, -1] = heads[:, 1]
    for rider, (first, last), row in zip(riders, heads.tolist(), rows, strict=True):
        if rungs > 1 and not backend.decode_falling(rider[8 * HEAD :], first - 1 - last, last, row[:-1]):
            raise RuntimeError(tallies.DAMAGED)
    return rows
