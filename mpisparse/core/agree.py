"""What all ranks must know before anything is sent: that each can go on, and their counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpisparse.arrays import Bools, Ints

if TYPE_CHECKING:
    from mpisparse.comm.exchange import Exchange
    from mpisparse.model.layout import Gradients


FINE, NONFINITE, NO_BACKWARD, STALE, BROKEN = range(5)


class StepRefused(Exception):  # noqa: N818 - not an error yet: sync.py turns it into one with the parameters' names
    """Some rank cannot go on; known to all ranks. `statuses` holds (status, detail) of every rank."""

    def __init__(self, statuses: Sequence[tuple[int, int]]) -> None:
        super().__init__(statuses)
        self.statuses = statuses


class DensityDiffers(Exception):  # noqa: N818 - as above
    """The ranks were set to different densities; carries each rank's k."""


class FrozenDiffers(Exception):  # noqa: N818 - as above
    """The ranks have frozen different parameters."""


class Overflow(Exception):  # noqa: N818 - as above
    """The sum over ranks is beyond what float32 holds, at the flat index that it carries; known to all ranks."""


@dataclass
class Inputs:
    """What a rank brings to a step; gradients are None where they are in the accumulator already."""

    gradients: Gradients | None
    k: int
    unused: Bools
    status: int = FINE
    detail: int = 0
    frozen: int = 0  # a digest of which parameters are frozen
    trouble: str = ""  # why this rank cannot go on, where its status is BROKEN

    def note_nonfinite(self, index: int) -> None:
        """Remember the first non-finite element for the agreement that follows."""
        if index >= 0 and self.status == FINE:
            self.status, self.detail = NONFINITE, index


def share_readiness(exchange: Exchange, inputs: Inputs) -> Bools | None:
    """Raise everywhere if any rank cannot go on or is set to another density, before anything is added. Collective.

    Returns which parameters had a gradient on some rank; None if all had one on all.
    """
    mine = [inputs.status, inputs.detail, inputs.k, int(inputs.unused.any()), inputs.frozen]
    rows = exchange.allgather(np.array(mine, dtype=np.int64))
    _refuse(rows)
    if (rows[:, 4] != inputs.frozen).any():
        raise FrozenDiffers
    if (rows[:, 2] != inputs.k).any():
        raise DensityDiffers(rows[:, 2].tolist())
    if not rows[:, 3].any():
        return None
    bits = exchange.allreduce_(np.packbits(~inputs.unused), "or")
    return np.unpackbits(bits, count=len(inputs.unused)).astype(bool)


def share_counts(exchange: Exchange, inputs: Inputs, counts: Ints, n: int) -> Ints:
    """Gather counts (of at most n), a row for each rank; raise everywhere if any has seen a non-finite value. Collective."""
    kind = np.uint32 if n < 2**32 else np.uint64
    header = np.array([inputs.status, inputs.detail], dtype=np.int64)
    rows = exchange.allgather(np.concatenate([header.view(np.uint8), counts.astype(kind).view(np.uint8)]))
    _refuse(np.ascontiguousarray(rows[:, : header.nbytes]).view(np.int64))
    gathered = np.ascontiguousarray(rows[:, header.nbytes :]).view(kind).astype(np.int64)
    return gathered.reshape(exchange.size, len(counts))


def _refuse(rows: Ints) -> None:
    """Raise StepRefused unless every rank's status, first in its row, is fine."""
    if rows[:, 0].any():
        raise StepRefused([(int(status), int(detail)) for status, detail in rows[:, :2]])
