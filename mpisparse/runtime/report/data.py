"""The page's JSON block: the tables of each run, downsampled, and the charts that refer to their columns."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mpisparse.arrays import Doubles
from mpisparse.runtime.report.chart import AXES, BYTES_X, STEP_TABLE, STEPS_X, TIME_X, Chart, Trace, peak
from mpisparse.runtime.report.groups import Group
from mpisparse.runtime.report.run import Run
from mpisparse.runtime.report.scale import WIDE, is_wide
from mpisparse.runtime.report.thin import Columns

POINTS, LEAST, ALL = 1000, 150, 4000  # rows per table: at most, at least, and about so many in all runs
MARKS = 400  # events per run and kind that are marked in a chart
FLAT = 0.0025  # bands that are thinner than this share of the values' range are left out
QUIET = ("start", "checkpoint", "end")  # events shown as a short tick; others span the whole height
ESCAPED = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}  # so that no text can end the block


class Block:
    """Collects tables and charts."""

    def __init__(self, runs: Sequence[Run], groups: Sequence[Group]) -> None:
        self.runs, self.groups = runs, groups
        self.points = min(POINTS, max(LEAST, ALL // max(1, len(runs))))
        self._columns: dict[tuple[int, str], Columns] = {}
        self._tables: list[dict[str, dict[str, Any]]] = [{} for _ in runs]
        self._charts: dict[str, dict[str, Any]] = {}
        self._logs = {axis: axis == BYTES_X and self._far_apart() for axis in AXES}

    def add(self, chart: Chart) -> bool:
        """Add a chart, unless it would be empty; return whether it was added."""
        if chart.empty or (chart.along == BYTES_X and not any(run.received()[-1] > 0 for run in self.runs)):
            return False
        shown = [trace.y for trace in chart.traces] + [v for t in chart.traces for v in (t.low, t.high) if v is not None]
        log = is_wide(shown) if chart.log is None else chart.log
        encoded: dict[str, Any] = {
            "title": chart.title, "shape": chart.shape, "along": chart.along, "kind": chart.kind, "log": log,
            "levels": [list(level) for level in chart.levels], "lines": [self._line(t, chart.crosses) for t in chart.traces],
        }  # fmt: skip
        if chart.cut:
            stacked = chart.shape == "stack"
            encoded["cut"] = rounded(peak(np.sum(shown, axis=0) if stacked else np.concatenate(shown)))
        if chart.heat is not None:
            encoded["heat"] = chart.heat
        self._charts[chart.mark] = encoded
        return True

    def text(self, **more: Any) -> str:
        """Return the block as JSON, safe inside a script element."""
        groups = {i: place for place, group in enumerate(self.groups) for i in group.runs}
        block = {
            "axes": {axis: self._axis(axis) for axis in AXES},
            "groups": [group.name for group in self.groups],
            "runs": [
                {"name": run.name, "group": groups[i], "tables": self._tables[i], "events": self._events(run)}
                for i, run in enumerate(self.runs)
            ],
            "charts": self._charts,
            **more,
        }
        return json.dumps(block, allow_nan=False, ensure_ascii=False, separators=(",", ":")).translate(ESCAPED)

    def _line(self, trace: Trace, crosses: bool) -> dict[str, Any]:
        """Put a trace's values into the run's table; return what refers to them."""
        table, columns = self._table(trace.run, trace.table)
        if trace.column not in table:
            mean = columns.mean(trace.y)
            table[trace.column] = numbers(mean)
            low = columns.low(trace.y if trace.low is None else trace.low)
            high = columns.high(trace.y if trace.high is None else trace.high)
            if not trace.colour and _apart(low, mean, high):  # bands of a run's many parts would hide each other
                table |= {f"{trace.column}.low": numbers(low), f"{trace.column}.high": numbers(high)}
        if crosses and (bad := np.flatnonzero(columns.bad(trace.y)).tolist()):
            table[f"{trace.column}.bad"] = bad
        line = {"run": trace.run, "name": trace.name, "table": trace.table, "y": trace.column, "style": trace.style}
        return line | {"colour": trace.colour} if trace.colour else line

    def _table(self, index: int, name: str) -> tuple[dict[str, Any], Columns]:
        """Return a run's table, with its places along every axis, and its downsampling."""
        run = self.runs[index]
        rows = run.steps if name == STEP_TABLE else run.evals[name.removeprefix("eval ")]
        if name not in self._tables[index]:
            columns = Columns.along(rows["step"], self.points)
            self._columns[index, name] = columns
            places = {axis: along(run, axis, rows["step"], rows["time"]) for axis in AXES}
            self._tables[index][name] = {f"x.{axis}": numbers(columns.last(x)) for axis, x in places.items()}
        return self._tables[index][name], self._columns[index, name]

    def _far_apart(self) -> bool:
        ends = [float(run.received()[-1]) for run in self.runs if run.received()[-1] > 0]
        return bool(ends) and max(ends) / min(ends) > WIDE

    def _axis(self, axis: str) -> dict[str, Any]:
        """Return an axis with its range over all runs, which all charts share."""
        kind, label = AXES[axis]
        tables = [(run, table) for run in self.runs for table in (run.steps, *run.evals.values())]
        values = np.concatenate([np.empty(0), *(along(run, axis, table["step"], table["time"]) for run, table in tables)])
        values = values[np.isfinite(values)]
        log = self._logs[axis]
        low = float(values[values > 0].min()) if log else 0.0
        high = float(values.max()) if len(values) and values.max() > low else low + 1.0
        return {"kind": kind, "label": label, "log": log, "range": [low, high]}

    def _events(self, run: Run) -> dict[str, Any]:
        """Return where events are marked, along every axis: quiet ones, and others."""
        marks = {}
        for name, quiet in (("quiet", True), ("loud", False)):
            events = [event for event in run.events if (event.kind in QUIET) == quiet and math.isfinite(event.step)]
            step, time = (np.array([getattr(e, what) for e in events], dtype=np.float64) for what in ("step", "time"))
            columns = Columns.along(np.maximum.accumulate(step), MARKS) if events else Columns(np.arange(0), 0)
            marks[name] = {axis: numbers(columns.last(along(run, axis, step, time))) for axis in AXES}
        return marks


def along(run: Run, axis: str, step: Doubles, time: Doubles) -> Doubles:
    """Return the values along an axis of steps of a run that were done at these times."""
    if axis == BYTES_X:
        return np.interp(step, run.steps["step"], run.received())
    return {STEPS_X: step, TIME_X: time}[axis]


def numbers(values: Iterable[float]) -> list[float | int | None]:
    """Return values for JSON: whole numbers exactly, others with seven digits, None for those that are not finite."""
    return [rounded(float(value)) for value in values]


def rounded(value: float) -> float | int | None:
    """Return a value for JSON."""
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else float(f"{value:.7g}")


def _apart(low: Doubles, mean: Doubles, high: Doubles) -> bool:
    """Return whether a band from low to high would be seen around the mean."""
    wide = np.nanmax(high - low, initial=0.0)
    return bool(wide > FLAT * (np.nanmax(high, initial=-math.inf) - np.nanmin(low, initial=math.inf)) and wide > 0)
