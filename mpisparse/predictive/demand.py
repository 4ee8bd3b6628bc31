"""How much is to be sent, by how training goes: more when the metric stands still or falls, less while it rises fast."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from mpisparse.errors import ConfigurationError


@dataclass(frozen=True)
class Demand:
    """A factor on k, moved by the metrics that are observed; larger ones are better.

    A metric that is better than the best by the share `fast` lowers k by `factor`; by less than `slow`, `patience` times in
    a row, raises it; one that is worse than the last by more than `slow` raises it at once. The factor on k stays in
    [least, most].
    """

    patience: int = 2
    factor: float = 1.5
    least: float = 0.25
    most: float = 4.0
    slow: float = 0.002
    fast: float = 0.02
    scale: float = 1.0
    best: float = -math.inf
    last: float = -math.inf
    still: int = 0

    def after(self, metric: float) -> Demand:
        """The demand once a metric was observed; one that is not a number counts as a fall."""
        if self.best == -math.inf:
            return replace(self, best=metric, last=metric) if math.isfinite(metric) else self
        unit = max(abs(self.best), 1e-12)
        gain, fall = (metric - self.best) / unit, (self.last - metric) / unit
        seen = replace(self, best=max(self.best, metric), last=metric) if math.isfinite(metric) else self
        if not math.isfinite(metric) or fall > self.slow:
            return seen._times(self.factor)
        if gain > self.fast:
            return seen._times(1 / self.factor)
        if gain > self.slow:
            return replace(seen, still=0)
        if self.still + 1 >= self.patience:
            return seen._times(self.factor)
        return replace(seen, still=self.still + 1)

    def _times(self, factor: float) -> Demand:
        return replace(self, scale=min(self.most, max(self.least, self.scale * factor)), still=0)

    def state(self) -> dict[str, Any]:
        """What moves."""
        return {name: getattr(self, name) for name in ("scale", "best", "last", "still")}

    def load(self, state: dict[str, Any]) -> Demand:
        """This demand as state() left it; raises ConfigurationError if it could not have."""
        given = {name: type(value)(state[name]) for name, value in self.state().items()}
        if not self.least <= given["scale"] <= self.most or math.isnan(given["best"] + given["last"]) or given["still"] < 0:
            raise ConfigurationError(f"the demand in the state is not one in [{self.least}, {self.most}]: {given}")
        return replace(self, **given)
