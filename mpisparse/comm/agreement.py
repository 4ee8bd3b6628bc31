"""What all ranks must know before anything is sent: that each can go on, and what each has counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpisparse.arrays import Bools, Ints

if TYPE_CHECKING:
    from mpisparse.comm.exchange import Exchange

FINE, NONFINITE, NO_BACKWARD, STALE, BROKEN = range(5)


class Refusal(Exception):  # noqa: N818 - not an error yet: GradientSync turns it into one with the parameters' names
    """Why a step cannot be done. All ranks raise it in the same step."""


class StepRefused(Refusal):
    """Some rank cannot go on. `statuses`: (status, detail) per rank; `trouble`: this rank's own words, or empty."""

    def __init__(self, statuses: Sequence[tuple[int, int]], trouble: str = "") -> None:
        super().__init__(statuses, trouble)
        self.statuses = statuses
        self.trouble = trouble


class DensityDiffers(Refusal):
    """The ranks were set to different densities; args[0] is k per rank."""


class FrozenDiffers(Refusal):
    """The ranks have frozen different parameters."""


class Overflow(Refusal):
    """The sum over ranks does not fit into float32 at the flat index args[0]."""


class Notice(NamedTuple):
    """What a rank tells the others before a step: whether it can go on, and what must be equal on all ranks.

    detail: the flat index that a status is about. unused: parameters without a gradient. frozen: a digest of which
    parameters are frozen. trouble: why the rank cannot go on, in words, where the status is BROKEN.
    """

    k: int
    unused: Bools
    status: int = FINE
    detail: int = 0
    frozen: int = 0
    trouble: str = ""

    def nonfinite(self, index: int) -> Notice:
        """Return this notice with a first non-finite element noted; -1 is none."""
        if index < 0 or self.status != FINE:
            return self
        return self._replace(status=NONFINITE, detail=index)


def share_readiness(exchange: Exchange, notice: Notice) -> Bools | None:
    """Raise on all ranks if any cannot go on, or if densities or frozen parameters differ. Collective.

    Returns which parameters had a gradient on some rank; None if all parameters had one on all ranks.
    """
    mine = [notice.status, notice.detail, notice.k, int(notice.unused.any()), notice.frozen]
    rows = exchange.allgather(np.array(mine, dtype=np.int64))
    _refuse(rows, notice)
    if (rows[:, 4] != notice.frozen).any():
        raise FrozenDiffers
    if (rows[:, 2] != notice.k).any():
        raise DensityDiffers(rows[:, 2].tolist())
    if not rows[:, 3].any():
        return None
    bits = exchange.allreduce_(np.packbits(~notice.unused), "or")
    return np.unpackbits(bits, count=len(notice.unused)).astype(bool)


def share_counts(exchange: Exchange, notice: Notice, counts: Ints, most: int) -> Ints:
    """Gather counts, one row per rank; raise on all ranks if any has seen a non-finite value. Collective.

    No count exceeds `most`.
    """
    kind = np.uint32 if most < 2**32 else np.uint64
    header = np.array([notice.status, notice.detail], dtype=np.int64)
    rows = exchange.allgather(np.concatenate([header.view(np.uint8), counts.astype(kind).view(np.uint8)]))
    _refuse(np.ascontiguousarray(rows[:, : header.nbytes]).view(np.int64), notice)
    gathered = np.ascontiguousarray(rows[:, header.nbytes :]).view(kind).astype(np.int64)
    return gathered.reshape(exchange.size, len(counts))


def _refuse(rows: Ints, notice: Notice) -> None:
    """Raise StepRefused unless every rank's status, first in its row, is FINE."""
    if rows[:, 0].any():
        raise StepRefused([(int(status), int(detail)) for status, detail in rows[:, :2]], notice.trouble)
