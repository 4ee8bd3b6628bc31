"""Learning rate, density and examples of a step, as functions of the step or the position in the data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpisparse.arrays import Ints


def lr_factor(step: int, total: int, kind: str, warmup: int, drop_at: Sequence[float]) -> float:
    """Return the learning rate at a step (from 0) as a fraction of its peak."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    if kind == "cosine":
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    if kind == "step":
        return float(0.1 ** sum(step >= point * total for point in drop_at))
    return 1.0


@dataclass
class Position:
    """Position of a run in its data: all ranks together have used `offset` examples of `epoch`."""

    epoch: int = 0
    offset: int = 0


class Order:
    """The order of examples: shuffled by (seed, epoch) and assigned to ranks by position."""

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self.seed = seed
        self._epoch = -1
        self._order: Ints = np.empty(0, dtype=np.int64)

    def take(self, position: Position, share: int, rank: int, size: int) -> tuple[Ints, int]:
        """Return this rank's `share` examples of the next global batch and their epoch; advance the position.

        The end of an epoch is skipped if it does not fill a global batch.
        """
        if position.offset + share * size > self.count:
            position.epoch, position.offset = position.epoch + 1, 0
        if position.epoch != self._epoch:
            generator = np.random.Generator(np.random.Philox(key=[self.seed, position.epoch]))
            self._order, self._epoch = generator.permutation(self.count), position.epoch
        start = position.offset + rank * share
        position.offset += share * size
        return self._order[start : start + share], position.epoch

    def steps_per_epoch(self, share: int, size: int) -> int:
        """Return how many global batches an epoch has."""
        return self.count // (share * size)

    def steps_left(self, position: Position, epochs: int, share: int, size: int) -> int:
        """Return how many global batches remain until `epochs` epochs are complete. Earlier ones may have been larger."""
        later, here = epochs - position.epoch - 1, (self.count - position.offset) // (share * size)
        return max(0, here + later * self.steps_per_epoch(share, size)) if later >= 0 else 0
