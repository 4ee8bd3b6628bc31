"""States on another number of ranks: who takes over from whom, and what must stay the same."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpisparse.arrays import Floats


def sources(old: int, new: int, rank: int) -> list[int]:
    """The old ranks that a new rank takes over from."""
    return [rank % old] if new > old else list(range(rank, old, new))


def share_in_shift(old: int, new: int, source: int) -> float:
    """The factor of an old rank's vector in (mean of the old ranks - mean of the sources of the new ranks).

    A new rank's source is the first of its sources(). The sum is exactly zero if all are taken over equally often.
    """
    takers = sum(sources(old, new, rank)[0] == source for rank in range(new))
    return (new - takers * old) / (old * new)


def merge_residuals(residuals: Mapping[int, Floats], old: int, new: int, rank: int) -> Floats:
    """This rank's residual among `new` ranks, from those of `old`: (1 / ranks) x their sum stays the same.

    With fewer ranks, rank r takes over from r, r + new, r + 2 new, ...; with more, the new ranks r, r + old, ... share
    the residual of an old rank evenly. Either way it is scaled by new / old. `residuals` holds those of sources().
    """
    total = np.zeros(len(next(iter(residuals.values()))), dtype=np.float64)
    for source in sources(old, new, rank):
        sharers = len(range(source, new, old)) if new > old else 1
        total += residuals[source].astype(np.float64) * (new / old / sharers)
    merged: Floats = total.astype(np.float32)
    return merged
