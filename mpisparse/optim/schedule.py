"""When gradients are averaged for the variance, and when only the momentum is."""

from __future__ import annotations

from typing import NamedTuple


class Turn(NamedTuple):
    """One step. whole: gradients are averaged and the variance moves, as far as `steps` usual steps would move it."""

    whole: bool
    steps: float = 0.0


class Schedule(NamedTuple):
    """Gradients in the first `warmup` steps, then in `refresh` steps after warmup x 2, 4, 8, ... steps.

    The variance moves in each of these as far as in an equal share of the steps since the last ones, so that old gradients
    are forgotten as fast as in Adam.
    """

    warmup: int
    refresh: int

    def turn(self, step: int) -> Turn:
        """The step of this number, from 0."""
        if step < self.warmup:
            return Turn(whole=True, steps=1.0)
        doublings = (step // self.warmup).bit_length() - 1
        begin = self.warmup << doublings
        if not doublings or step >= begin + self.refresh:
            return Turn(whole=False)
        last = self.warmup if doublings == 1 else begin // 2 + self.refresh
        return Turn(whole=True, steps=(begin + self.refresh - last) / self.refresh)
