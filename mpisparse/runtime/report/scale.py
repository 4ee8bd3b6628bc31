"""Axes: from values to fractions of the axis, and where the ticks are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mpisparse.arrays import Doubles
from mpisparse.runtime.report.units import number, pick, power, say

WIDE = 25.0  # ratio of maximum to minimum above which a log scale reads better


@dataclass(frozen=True)
class Axis:
    """An axis from lo to hi; `kind` is bytes, seconds, percent, count or number, `name` the label."""

    lo: float
    hi: float
    log: bool = False
    kind: str = "number"
    name: str = ""

    def fraction(self, values: Doubles) -> Doubles:
        """Map values to fractions of the axis, 0 at lo and 1 at hi; NaN for values that a log axis cannot show."""
        if not self.log:
            return (values - self.lo) / (self.hi - self.lo)
        positive = np.where(values > 0, values, math.nan)
        return np.asarray(np.log(positive / self.lo) / math.log(self.hi / self.lo))

    def ticks(self, count: int = 5) -> list[tuple[float, str]]:
        """Return about `count` round values with their labels."""
        decades = _decades(self.lo, self.hi, count) if self.log else []
        if len(decades) >= 2:
            return [(value, self._decade_label(value)) for value in decades]
        factor, unit = pick(self.kind, max(abs(self.lo), abs(self.hi)))
        least = 1.0 if self.kind == "count" and not unit else 0.0
        return _even_ticks(self.lo / factor, self.hi / factor, (factor, unit), count, least)

    def _decade_label(self, value: float) -> str:
        if self.kind in ("bytes", "seconds", "percent"):
            return say(self.kind, value)
        return number(value) if 1e-3 <= value < 1e4 else power(value)


def fit(values: Iterable[Doubles], *, log: bool | None = False, pad: float = 0.0) -> Axis | None:
    """Fit an axis to all finite values; None if there are none. log None: a log scale only if the range is wide.

    A linear axis begins at zero if the smallest value is small compared with the largest.
    """
    finite = [part[np.isfinite(part)] for part in values]
    if log is None:
        log = is_wide(finite)
    if log:
        finite = [part[part > 0] for part in finite]
    finite = [part for part in finite if len(part)]
    if not finite:
        return None
    lo, hi = min(float(part.min()) for part in finite), max(float(part.max()) for part in finite)
    return _padded_log(lo, hi, pad) if log else _padded_linear(lo, hi, pad)


def is_wide(values: Iterable[Doubles]) -> bool:
    """Return whether a log scale reads better: all finite values are positive and range widely."""
    parts = [finite for part in values if len(finite := part[np.isfinite(part)])]
    if not parts or min(part.min() for part in parts) <= 0:
        return False
    return bool(max(part.max() for part in parts) / min(part.min() for part in parts) > WIDE)


def _padded_linear(lo: float, hi: float, pad: float) -> Axis:
    if hi == lo:
        return Axis(lo - 0.1 * abs(lo), hi + 0.1 * abs(hi)) if hi else Axis(0.0, 1.0)
    room = (hi - lo) * pad
    from_zero = 0 <= lo <= 0.35 * hi
    return Axis(0.0 if from_zero else lo - room, hi + room)


def _padded_log(lo: float, hi: float, pad: float) -> Axis:
    if hi / lo < 1.2:
        return Axis(lo / 1.5, hi * 1.5, log=True)
    room = (hi / lo) ** pad
    return Axis(lo / room, hi * room, log=True)


def _even_ticks(lo: float, hi: float, unit: tuple[float, str], count: int, least: float) -> list[tuple[float, str]]:
    """Return ticks between two values in a unit, at multiples of a round number that is at least `least`."""
    factor, name = unit
    rough = max((hi - lo) / count, least)
    tens = 10.0 ** math.floor(math.log10(rough))
    nice = next(nice for nice in (1.0, 2.0, 2.5, 5.0, 10.0) if nice * tens >= rough * 0.999)
    step = nice * tens
    decimals = max(0, -math.floor(math.log10(step) + 1e-9) + (nice == 2.5))
    gap = name if name in ("", "k", "M", "G") else f" {name}"
    numbers = range(math.ceil(lo / step - 1e-9), math.floor(hi / step + 1e-9) + 1)
    return [(i * step * factor, _even_label(i * step, decimals) + gap * (i != 0)) for i in numbers]


def _even_label(value: float, decimals: int) -> str:
    if value == 0:
        return "0"
    if decimals > 4 or abs(value) >= 1e6:
        return power(value, 3)
    return f"{value:,.{decimals}f}".replace("-", "−")


def _decades(lo: float, hi: float, count: int) -> list[float]:
    """Return powers of ten, thinned to about `count`, or with multiples in between if there is room."""
    first, last = math.floor(math.log10(lo)), math.ceil(math.log10(hi))
    stride = max(1, math.ceil(math.log10(hi / lo) / (count + 1)))
    for mantissas in ((1,), (1, 3), (1, 2, 5)):
        values = [m * 10.0**e for e in range(first, last + 1) if e % stride == 0 for m in mantissas]
        inside = [value for value in values if lo * 0.999 <= value <= hi * 1.001]
        if len(inside) >= 3 or stride > 1:
            return inside
    return inside
