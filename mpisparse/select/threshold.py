"""Density control: the threshold at which k elements are selected. Pure functions and records.

A controller proposes a ladder of rungs (ascending thresholds; the lowest is the floor of the pass that collects
candidates). Given the counts at every rung, summed over ranks, it answers with the rung to use, with a finer ladder
inside the same candidates, or with neither: then k lies below the floor, and a histogram of all magnitudes places a new
ladder. Decisions depend on integer counts alone, so all ranks take the same ones.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import numpy as np

from mpisparse.arrays import Floats, Ints

Rungs = Floats
Counts = Ints

RUNGS = 256
TOLERANCE = 0.01
TINY = float(np.uint32(1).view(np.float32))
HUGE = float(np.finfo(np.float32).max)
HISTOGRAM_SHIFT = 20

SPAN_LEAST, SPAN_MOST = math.log(1.6), math.log(8.0)
SLOPE_LEAST, SLOPE_MOST = 0.5, 64.0
FIRST_GROWTH = 0.5  # log of the growth of magnitudes in the second step: sqrt 2 for independent gradients, 2 for equal ones


@dataclass(frozen=True)
class Choice:
    """A rung to select from; or a finer ladder to count next; or neither: k lies below the ladder."""

    rung: int | None = None
    finer: Rungs | None = None


class Controller(Protocol):
    """Density control, as data in and data out; `after` returns the controller of the next step.

    `holds`: exactly k elements are selected in every step: ties beyond k are dropped and a shortage is filled up
    (mpisparse.select.fill). `at_least_one`: a rank that selects nothing in its region sends the region's first element.
    """

    @property
    def holds(self) -> bool: ...
    @property
    def at_least_one(self) -> bool: ...
    def ladder(self, k: int) -> Rungs: ...
    def choose(self, rungs: Rungs, counts: Counts, k: int) -> Choice: ...
    def locate(self, histogram: Counts, k: int) -> Rungs: ...
    def after(self, rungs: Rungs, counts: Counts, rung: int, k: int) -> Controller: ...
    def state(self) -> dict[str, float]: ...


def spread(low: float, high: float, count: int = RUNGS) -> Rungs:
    """Space rungs geometrically from low to high; low itself is the first."""
    low = min(max(low, TINY), HUGE)
    high = min(max(high, low), HUGE)
    start, stop = math.log(low), math.log(high)
    exponents = np.arange(count) * ((stop - start) / max(1, count - 1)) + start  # as np.linspace, in a third of its time
    exponents[-1] = stop
    rungs: Rungs = np.exp(exponents).astype(np.float32)
    np.minimum(np.maximum(rungs, np.float32(low), out=rungs), np.float32(high), out=rungs)
    rungs[0] = low
    differs = rungs[1:] != rungs[:-1]
    return rungs if differs.all() else rungs[np.append(True, differs)]


def nearest_rung(counts: Counts, k: int) -> int:
    """The rung whose count is nearest to k; of two equally near, the one that selects more."""
    return int(np.argmin(np.abs(counts - k)))


def is_close(count: int, k: int) -> bool:
    """Whether a count is within the tolerance of k."""
    return count > 0 and abs(count - k) <= max(1.0, TOLERANCE * k)


def choose_rung(rungs: Rungs, counts: Counts, k: int) -> Choice:
    """Take the rung that gives k, or narrow the ladder to the two around it.

    If no float lies between these two, elements are tied at the lower one, which is taken and selects more than k.
    """
    if len(rungs) == 0 or (counts[0] < k and not is_close(int(counts[0]), k) and rungs[0] > TINY):
        return Choice()
    best = nearest_rung(counts, k)
    if is_close(int(counts[best]), k) or counts[0] <= k:
        return Choice(rung=best)
    below = int(np.searchsorted(-counts, -k, side="right")) - 1
    low = float(rungs[below])
    high = float(rungs[below + 1]) if below + 1 < len(rungs) else HUGE
    finer = spread(low, high)
    if len(finer) == 1 or (len(finer) == 2 and below + 1 < len(rungs)):
        return Choice(rung=below)
    return Choice(finer=finer)


def locate_rungs(histogram: Counts, k: int) -> Rungs:
    """Place a ladder by the histogram of all magnitudes: from the highest bin edge that k elements reach, two bins up."""
    tails = np.cumsum(histogram[::-1])[::-1]
    enough = np.flatnonzero(tails >= k)
    top = int(enough[-1]) if len(enough) else 0
    if top == 0:
        return spread(TINY, _bin_edge(1))
    return spread(_bin_edge(top), _bin_edge(min(top + 2, len(histogram) - 1)))


def bin_of(magnitude: float) -> int:
    """The bin of a histogram that holds a magnitude."""
    return int(np.float32(magnitude).view(np.uint32)) >> HISTOGRAM_SHIFT


def _bin_edge(index: int) -> float:
    edge = float(np.uint32(index << HISTOGRAM_SHIFT).view(np.float32))
    return edge if math.isfinite(edge) else HUGE


@dataclass(frozen=True)
class TailAware:
    """A ladder around the threshold extrapolated from the last ones, spaced by the tail's slope, as wide as its past errors.

    Rungs are placed so that counts, not thresholds, are evenly spaced: near k the count falls as threshold ** -slope.
    """

    threshold: float = 0.0
    slope: float = 3.0
    trend: float = 0.0
    error: float = 0.1
    last_k: int = 0
    steps: int = 0
    prior: float = FIRST_GROWTH

    holds: ClassVar[bool] = True
    at_least_one: ClassVar[bool] = False

    def ladder(self, k: int) -> Rungs:
        if self.threshold <= 0.0:
            return np.empty(0, dtype=np.float32)
        centre = self._expected(k)
        span = min(max(SPAN_LEAST, 2.5 * self.error * self.slope), SPAN_MOST) / self.slope
        return spread(centre * math.exp(-span), centre * math.exp(span))

    def _expected(self, k: int) -> float:
        trend = self.prior if self.steps == 1 else self.trend
        return self.threshold * math.exp(trend + math.log(self.last_k / k) / self.slope)

    def choose(self, rungs: Rungs, counts: Counts, k: int) -> Choice:
        return choose_rung(rungs, counts, k)

    def locate(self, histogram: Counts, k: int) -> Rungs:
        return locate_rungs(histogram, k)

    def after(self, rungs: Rungs, counts: Counts, rung: int, k: int) -> TailAware:
        chosen = float(rungs[rung])
        slope = self._measured_slope(rungs, counts, rung)
        if self.threshold <= 0.0 or self.last_k != k:
            return replace(self, threshold=chosen, slope=slope, last_k=k, steps=self.steps + 1)
        miss = min(abs(math.log(chosen / self._expected(k))), 1.0)
        move = max(-1.0, min(1.0, math.log(chosen / self.threshold)))
        trend, error = 0.7 * self.trend + 0.3 * move, 0.8 * self.error + 0.2 * miss
        return TailAware(chosen, slope, trend, error, k, self.steps + 1, self.prior)

    def _measured_slope(self, rungs: Rungs, counts: Counts, rung: int) -> float:
        """Fit the tail between the rungs that select from a third fewer to half as many again."""
        here = int(counts[rung])
        near = np.flatnonzero((counts <= here + here // 2) & (counts >= here - here // 3) & (counts > 0))
        if here < 8 or len(near) < 2:
            return self.slope
        low, high = int(near[0]), int(near[-1])
        width = math.log(float(rungs[high]) / float(rungs[low]))
        if width <= 0.0 or counts[low] == counts[high]:
            return self.slope
        slope = math.log(int(counts[low]) / int(counts[high])) / width
        return min(max(0.5 * self.slope + 0.5 * slope, SLOPE_LEAST), SLOPE_MOST)

    def state(self) -> dict[str, float]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Paper:
    """The paper's online threshold scaling: one rung, scaled by a fixed factor after each step."""

    threshold: float = 0.0
    prior: float = 0.0

    holds: ClassVar[bool] = False
    at_least_one: ClassVar[bool] = True

    def ladder(self, k: int) -> Rungs:
        start = 1.0 / (2.0 * math.sqrt(k))
        return np.array([self.threshold or start], dtype=np.float32)

    def choose(self, rungs: Rungs, counts: Counts, k: int) -> Choice:
        return Choice(rung=0)

    def locate(self, histogram: Counts, k: int) -> Rungs:
        raise AssertionError("the paper's controller always has a threshold")

    def after(self, rungs: Rungs, counts: Counts, rung: int, k: int) -> Paper:
        return replace(self, threshold=float(rungs[0]) * paper_factor(int(counts[0]) / k))

    def state(self) -> dict[str, float]:
        return {"threshold": self.threshold, "prior": self.prior}


def paper_factor(ratio: float) -> float:
    """The factor on the threshold for actual over wanted count, with the in-band test against 1."""
    if ratio > 1.1:
        return 1.005
    if ratio > 1.0:
        return 1.00125
    return 0.9987 if ratio > 0.909 else 0.995


@dataclass(frozen=True)
class Fixed:
    """No control: the threshold that gave k in the first step is used for ever. For comparison."""

    threshold: float = 0.0
    prior: float = 0.0

    holds: ClassVar[bool] = False
    at_least_one: ClassVar[bool] = False

    def ladder(self, k: int) -> Rungs:
        return np.array([self.threshold] if self.threshold > 0.0 else [], dtype=np.float32)

    def choose(self, rungs: Rungs, counts: Counts, k: int) -> Choice:
        return Choice(rung=0) if self.threshold > 0.0 else choose_rung(rungs, counts, k)

    def locate(self, histogram: Counts, k: int) -> Rungs:
        return locate_rungs(histogram, k)

    def after(self, rungs: Rungs, counts: Counts, rung: int, k: int) -> Fixed:
        return replace(self, threshold=float(rungs[rung]))

    def state(self) -> dict[str, float]:
        return {"threshold": self.threshold, "prior": self.prior}


CONTROLLERS: dict[str, type[TailAware] | type[Paper] | type[Fixed]] = {"tail": TailAware, "paper": Paper, "fixed": Fixed}
