"""A table of numbers that grows line by line and is read by column."""

from __future__ import annotations

import math
from array import array
from typing import Any

import numpy as np

from mpisparse.arrays import Doubles

HUGE = 1e60


class StepTable:
    """Rows of named numbers in ascending order of step; NaN where a row lacks a name."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.values = array("d")

    def append(self, row: dict[str, Any]) -> None:
        """Append a row; None becomes NaN."""
        if tuple(row) != self.names:
            self._widen(row)
            row = {name: row.get(name) for name in self.names}
        self.values += array("d", [math.nan if value is None else value for value in row.values()])

    def keep(self, count: int) -> None:
        """Drop all but the first `count` rows."""
        del self.values[count * len(self.names) :]

    def before(self, step: float) -> int:
        """Count the rows before a step."""
        if not len(self) or self.values[self.names.index("step") - len(self.names)] < step:
            return len(self)
        return int(np.searchsorted(self["step"], step))

    def __getitem__(self, name: str) -> Doubles:
        """Return a column; values far outside float32 become infinite or zero, so that drawing does not overflow."""
        if name not in self.names:
            return np.full(len(self), math.nan)
        column = np.frombuffer(self.values).reshape(len(self), -1)[:, self.names.index(name)].copy()
        column[np.abs(column) > HUGE] *= math.inf
        column[np.abs(column) < 1 / HUGE] = 0.0
        return column

    def __len__(self) -> int:
        return len(self.values) // len(self.names) if self.names else 0

    def _widen(self, row: dict[str, Any]) -> None:
        fresh = tuple(name for name in row if name not in self.names)
        if fresh:
            wide = np.full((len(self), len(self.names) + len(fresh)), math.nan)
            wide[:, : len(self.names)] = np.frombuffer(self.values).reshape(len(self), -1) if len(self) else 0.0
            self.names, self.values = (*self.names, *fresh), array("d", wide.tobytes())
