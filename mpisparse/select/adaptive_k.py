"""How much is to be sent, by how training goes: more when the metric stands still or falls, less while it rises fast.

Progress is measured over a window of the last metrics, not against the best there ever was: after a setback, a metric that
recovers is progress long before it is the best again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpisparse.errors import ConfigurationError


@dataclass(frozen=True)
class Demand:
    """A factor on k, moved by the metrics that are observed; larger ones are better.

    One that is worse than the last by more than the share `slow` raises k by `factor` at once. One that is better than all
    of the `patience` + 1 before it by the share `fast` lowers it. A gain of no more than `slow` over `patience` metrics
    raises it, unless it has changed since. The factor on k stays in [least, most].
    """

    patience: int = 2
    factor: float = 1.5
    least: float = 0.25
    most: float = 4.0
    slow: float = 0.002
    fast: float = 0.02
    scale: float = 1.0
    recent: tuple[float, ...] = ()  # the last metrics, `patience` + 1 at most
    since: int = 0  # metrics since k was last changed

    def after(self, metric: float) -> Demand:
        """The demand once a metric was observed; one that is not a number counts as a fall."""
        if not math.isfinite(metric):
            return self._times(self.factor) if self.recent else self
        seen = replace(self, recent=(*self.recent, metric)[-self.patience - 1 :], since=self.since + 1)
        if not self.recent:
            return replace(seen, since=0)
        if _gain(metric, self.recent[-1]) < -self.slow:
            return seen._times(self.factor)
        if _gain(metric, max(self.recent)) > self.fast:
            return seen._times(1 / self.factor)
        if seen.since >= self.patience and _gain(metric, self.recent[-self.patience]) <= self.slow:
            return seen._times(self.factor)
        return seen

    def _times(self, factor: float) -> Demand:
        return replace(self, scale=min(self.most, max(self.least, self.scale * factor)), since=0)

    def state(self) -> dict[str, Any]:
        """What moves."""
        return {"scale": self.scale, "recent": np.array(self.recent, dtype=np.float64), "since": self.since}

    def load(self, state: dict[str, Any]) -> Demand:
        """This demand as state() left it; raises ConfigurationError if it could not have."""
        scale, since = float(state["scale"]), int(state["since"])
        recent = tuple(np.asarray(state["recent"], dtype=np.float64).reshape(-1).tolist())
        fits = len(recent) <= self.patience + 1 and since >= 0 and all(map(math.isfinite, recent))
        known = min(since + 1, self.patience) <= len(recent) or since == 0
        if not self.least <= scale <= self.most or not fits or not known:
            raise ConfigurationError(
                f"the demand in the state is not one in [{self.least}, {self.most}] with the last {self.patience + 1} "
                f"metrics at most: scale {scale}, metrics {recent}, the last {since} since a change"
            )
        return replace(self, scale=scale, recent=recent, since=since)


def _gain(metric: float, before: float) -> float:
    return (metric - before) / max(abs(before), 1e-12)


def with_window(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state of GradientSync in today's terms: earlier versions saved the best metric ever in place of a window.

    The window then begins with the last metric.
    """
    old = dict(state)
    last = old.get("step.demand.last")
    if isinstance(last, int | float) and "step.demand.recent" not in old:
        old |= {"step.demand.recent": np.array([last] if math.isfinite(last) else []), "step.demand.since": 0}
    return old
