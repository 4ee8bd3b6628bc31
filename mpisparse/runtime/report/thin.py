"""Downsampling: neighbouring rows of a long table become one column with their mean, minimum and maximum."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mpisparse.arrays import Bools, Doubles, Ints


@dataclass(frozen=True)
class Columns:
    """Which rows share a column: the first row of each column, and the number of all rows."""

    firsts: Ints
    rows: int

    @classmethod
    def along(cls, x: Doubles, count: int) -> Columns:
        """Divide rows in ascending order of x into at most `count` columns of equal width; few rows have one each."""
        if len(x) <= count:
            return cls(np.arange(len(x)), len(x))
        width = float(x[-1] - x[0]) or 1.0
        bins = np.clip((x - x[0]) / width * count, 0, count - 1).astype(np.int64)
        return cls(np.flatnonzero(np.diff(bins, prepend=-1)), len(x))

    def last(self, values: Doubles) -> Doubles:
        """Return the value in the last row of each column."""
        ends = np.append(self.firsts[1:], self.rows) - 1 if self.rows else self.firsts
        last: Doubles = values[ends]
        return last

    def mean(self, values: Doubles) -> Doubles:
        """Return the mean of the finite values in each column; NaN if it has none."""
        finite = np.isfinite(values)
        total, count = self._reduce(np.add, np.where(finite, values, 0.0)), self._reduce(np.add, finite.astype(np.float64))
        mean: Doubles = np.divide(total, count, out=np.full(total.shape, math.nan), where=count > 0)
        return mean

    def low(self, values: Doubles) -> Doubles:
        """Return the smallest finite value in each column; NaN if it has none."""
        return self._extreme(np.minimum, values, math.inf)

    def high(self, values: Doubles) -> Doubles:
        """Return the largest finite value in each column; NaN if it has none."""
        return self._extreme(np.maximum, values, -math.inf)

    def bad(self, values: Doubles) -> Bools:
        """Return whether a column has a value that is not finite."""
        return self._reduce(np.add, (~np.isfinite(values)).astype(np.float64)) > 0

    def _extreme(self, ufunc: np.ufunc, values: Doubles, none: float) -> Doubles:
        found = self._reduce(ufunc, np.where(np.isfinite(values), values, none))
        return np.where(np.isfinite(found), found, math.nan)

    def _reduce(self, ufunc: np.ufunc, values: Doubles) -> Doubles:
        reduced: Doubles = ufunc.reduceat(values, self.firsts, axis=0) if len(values) else values
        return reduced
