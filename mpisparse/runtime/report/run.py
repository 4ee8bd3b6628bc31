"""One run: its settings, measurements and events."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mpisparse.arrays import Doubles
from mpisparse.runtime.report.step_table import StepTable

SPREADS = {
    name: (f"{name}.min", f"{name}.mean", f"{name}.max")
    for name in ("loss", "bytes_received", "index_bytes", "control_bytes")
}
SINGLES = (
    "step", "time", "lr", "density", "set_density", "threshold", "bytes_dense", "imbalance", "skipped", "every"
)  # fmt: skip
AHEAD = ("fine", "updated", "corrected", "drift", "drift_after")  # fields of scheme speculative, stored as speculation.NAME


@dataclass(frozen=True)
class Event:
    """Something that happened between steps: start, resume, checkpoint, signal, stop, end, ..."""

    step: float
    time: float
    kind: str
    text: str


@dataclass
class Run:
    """One run: its settings, measurements and events.

    Keys of evaluations are the name of their data, which old runs lack, and of their metric: "validation accuracy".
    """

    path: Path
    name: str
    settings: dict[str, object]
    steps: StepTable = field(default_factory=StepTable)
    evals: dict[str, StepTable] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    higher_is_better: dict[str, bool] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    borders: list[array[float]] = field(default_factory=list)
    workloads: list[array[float]] = field(default_factory=list)

    @property
    def metric(self) -> str | None:
        """The name of the metric that was evaluated most often, or None."""
        return max(self.evals, key=lambda name: len(self.evals[name]), default=None)

    def weights(self) -> Doubles:
        """Return how many steps each line stands for."""
        every = self.steps["every"]
        return np.where(np.isfinite(every), every, 1.0)

    def received(self) -> Doubles:
        """Return the bytes that one rank has received by each line."""
        return self._summed("bytes_received.mean")

    def dense(self) -> Doubles:
        """Return the bytes that one rank would have received by each line in a dense exchange."""
        return self._summed("bytes_dense")

    def _summed(self, name: str) -> Doubles:
        return np.cumsum(np.nan_to_num(self.steps[name], posinf=0.0) * self.weights())

    def exchanged(self, name: str) -> Doubles:
        """Return a column of the steps, NaN where nothing was exchanged: skipped steps, and those between exchanges."""
        nothing = (self.steps["skipped"] == 1.0) | (self.steps["density"] == 0.0)
        return np.where(nothing, math.nan, self.steps[name])

    def add_step(self, record: dict[str, Any]) -> None:
        """Add a step. If it is not after the last one, the run was resumed: forget this step and all later ones first."""
        row = {name: record[name] for name in SINGLES if name in record}
        for name in SPREADS:
            row |= _spread(name, record.get(name))
        ahead = record.get("speculation") or {}
        row |= {f"speculation.{name}": ahead[name] for name in AHEAD if name in ahead}
        for name, value in (record.get("details") or {}).items():
            if value is None or isinstance(value, int | float):
                row["details." + name] = value
                if name not in self.details:
                    self.details.append(name)
        for phase, value in (record.get("seconds") or {}).items():
            row["seconds." + phase] = value["mean"] if isinstance(value, dict) else value
            if phase not in self.phases:
                self.phases.append(phase)
        borders, workloads = (array("d", record.get(name) or ()) for name in ("borders", "workloads"))
        self._rewind(record["step"])
        self.steps.append(row)
        self.borders.append(borders)
        self.workloads.append(workloads)

    def add_eval(self, record: dict[str, Any]) -> None:
        """Add an evaluation; it replaces those of the same and of later steps."""
        name = " ".join(str(word) for word in (record.get("data"), record.get("metric_name") or "metric") if word)
        table = self.evals.setdefault(name, StepTable())
        table.keep(table.before(record["step"]))
        table.append({key: record.get(key) for key in ("step", "time", "loss", "metric")})
        self.data[name] = str(record.get("data") or "")
        self.higher_is_better[name] = bool(record.get("higher_is_better", True))

    def add_event(self, record: dict[str, Any]) -> None:
        """Add an event; none is ever replaced."""
        step, time = (math.nan if record.get(name) is None else float(record[name]) for name in ("step", "time"))
        self.events.append(Event(step, time, str(record.get("event") or "event"), str(record.get("text") or "")))

    def _rewind(self, step: float) -> None:
        """Forget this and later steps, and later evaluations."""
        count = self.steps.before(step)
        if count == len(self.steps):
            return
        self.steps.keep(count)
        del self.borders[count:], self.workloads[count:]
        for table in self.evals.values():
            table.keep(table.before(math.nextafter(step, math.inf)))


def _spread(name: str, value: Any) -> dict[str, Any]:
    least, mean, most = SPREADS[name]
    if isinstance(value, dict):
        return {least: value.get("min"), mean: value.get("mean"), most: value.get("max")}
    return {least: value, mean: value, most: value}
