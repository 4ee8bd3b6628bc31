"""Adapt k to how training goes: send more when the metric stagnates or falls, less while it rises fast.

Progress is measured over a window of the last metrics, not against the best ever: after a setback, a metric that
recovers is progress long before it is the best again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from mpisparse.arrays import State
from mpisparse.core.stages import Stage
from mpisparse.errors import ConfigurationError


@dataclass(frozen=True)
class AdaptiveK(Stage):
    """A factor on k that follows the observed metrics; larger metrics are better.

    A metric worse than the last by more than the share `slow` raises k by `factor` at once. A metric better than all of
    the `patience` + 1 before it by the share `fast` lowers k. A gain of no more than `slow` over `patience` metrics raises
    k, unless k has changed since. The factor on k stays in [least, most].
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

    observes = True

    @property
    def k_scale(self) -> float:
        return self.scale

    def observe(self, metric: float) -> AdaptiveK:
        """The stage after a metric was observed; one that is not a number counts as a fall."""
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

    def _times(self, factor: float) -> AdaptiveK:
        return replace(self, scale=min(self.most, max(self.least, self.scale * factor)), since=0)

    def details(self) -> dict[str, float]:
        return {"k_scale": self.scale}

    def state(self) -> State:
        recent = np.array(self.recent, dtype=np.float64)
        return {"demand.scale": self.scale, "demand.recent": recent, "demand.since": self.since}

    def upgraded(self, state: State) -> State:
        """Earlier versions saved the best metric ever instead of a window; the window then begins with the last metric."""
        last = state.get("demand.last")
        if not isinstance(last, int | float) or "demand.recent" in state:
            return state
        return {**state, "demand.recent": np.array([last] if math.isfinite(last) else []), "demand.since": 0}

    def check(self, state: State, n: int) -> None:
        self.loaded(state)

    def loaded(self, state: State) -> AdaptiveK:
        """The stage that a state describes; raises ConfigurationError if the state is invalid."""
        scale, since = float(state["demand.scale"]), int(state["demand.since"])
        recent = tuple(np.asarray(state["demand.recent"], dtype=np.float64).reshape(-1).tolist())
        fits = len(recent) <= self.patience + 1 and since >= 0 and all(map(math.isfinite, recent))
        known = min(since + 1, self.patience) <= len(recent) or since == 0
        if not self.least <= scale <= self.most or not fits or not known:
            raise ConfigurationError(
                f"the adaptive k in the state must have a scale in [{self.least}, {self.most}] and the last "
                f"{self.patience + 1} finite metrics at most: got scale {scale}, metrics {recent}, {since} since a change"
            )
        return replace(self, scale=scale, recent=recent, since=since)


def _gain(metric: float, before: float) -> float:
    return (metric - before) / max(abs(before), 1e-12)
