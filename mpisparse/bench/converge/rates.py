"""Which learning rates to try: a few to begin with, then further out until the best is not at the edge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """Rates around `middle`, each `factor` times the one before; `count` to begin with, at most `most`."""

    middle: float
    factor: float
    count: int
    most: int

    def start(self) -> list[float]:
        """Return the rates to begin with."""
        first = -(self.count // 2)
        return [_neat(self.middle * self.factor**i) for i in range(first, first + self.count)]

    def wanted(self, scores: Mapping[float, float], start: Sequence[float] = ()) -> list[float]:
        """Return the rates to try next, given the loss at each rate that was tried; infinite where training diverged.

        None are left when the best is between others, or when there are `most`.
        """
        missing = [rate for rate in start or self.start() if rate not in scores]
        if missing or len(scores) >= self.most:
            return missing
        best = best_rate(scores)
        if best is None or best == min(scores):
            return [_neat(min(scores) / self.factor)]
        return [_neat(max(scores) * self.factor)] if best == max(scores) else []


def best_rate(scores: Mapping[float, float]) -> float | None:
    """Return the rate with the lowest loss, of equal ones the smallest; None if training diverged at all of them."""
    loss, rate = min(((loss, rate) for rate, loss in scores.items()), default=(math.inf, 0.0))
    return rate if loss < math.inf else None


def at_edge(scores: Mapping[float, float]) -> bool:
    """Tell whether the best rate is the smallest or the largest tried, so that a better one may be beyond."""
    best = best_rate(scores)
    return best is None or best in (min(scores), max(scores))


def _neat(rate: float) -> float:
    """Round to five digits, so that the same rate has the same name in every run."""
    return float(f"{rate:.5g}")
