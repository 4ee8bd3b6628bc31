"""Numbers as they come, line by line, and as columns afterwards."""

from __future__ import annotations

import math
from array import array
from typing import Any

import numpy as np

from mpisparse.arrays import Doubles

HUGE = 1e60


class Rows:
    """Numbers by name, a row a line, in ascending order of step; where a row lacks a name it has NaN there."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.values = array("d")

    def append(self, row: dict[str, Any]) -> None:
        """Add a row behind the others; None is NaN."""
        if tuple(row) != self.names:
            self._widen(row)
            row = {name: row.get(name) for name in self.names}
        self.values += array("d", [math.nan if value is None else value for value in row.values()])

    def keep(self, count: int) -> None:
        """Forget all rows but the first count."""
        del self.values[count * len(self.names) :]

    def before(self, step: float) -> int:
        """Count the rows before a step."""
        if not len(self) or self.values[self.names.index("step") - len(self.names)] < step:
            return len(self)
        return int(np.searchsorted(self["step"], step))

    def __getitem__(self, name: str) -> Doubles:
        """Give a column; what no float32 comes near is infinite or zero, lest a picture's arithmetic overflow."""
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
