"""Charts: what they show, in the browser as in words. Values stay in the tables of their runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from mpisparse.arrays import Doubles
from mpisparse.runtime.report.run import Run
from mpisparse.runtime.report.units import say

STEP_TABLE = "steps"  # the table of a run's steps; those of its evaluations have the names of their metrics
TALL, OFTEN = 1.6, 98  # a rare peak is more than TALL times the OFTENth percentile
BYTES_X, STEPS_X, TIME_X = "bytes", "steps", "time"
AXES = {
    STEPS_X: ("count", "steps"),
    TIME_X: ("seconds", "training time"),
    BYTES_X: ("bytes", "bytes received per rank"),
}


@dataclass(frozen=True)
class Trace:
    """One column of a run's table, optionally with its range over ranks. `style` is run, evaluation, set or dense."""

    run: int
    name: str
    column: str
    y: Doubles
    low: Doubles | None = None
    high: Doubles | None = None
    style: str = "run"
    table: str = STEP_TABLE
    colour: str = ""  # if not that of the run

    @property
    def label(self) -> str:
        return self.name if self.style == "run" else f"{self.name}, {self.style}"


@dataclass(frozen=True)
class Chart:
    """What one chart shows.

    shape: lines; stack, where values add up; edges of areas; or heat, with the cells in `heat`. log: begin with a log
    scale; None: only if values range widely. crosses: mark non-finite values. cut: let rare peaks exceed the frame, so
    that they do not flatten the rest. words: a description in place of that of the traces.
    """

    title: str
    note: str
    along: str
    kind: str
    traces: Sequence[Trace]
    log: bool | None = False
    levels: tuple[tuple[float, str], ...] = ()
    crosses: bool = False
    cut: bool = False
    shape: str = "lines"
    heat: object = None
    words: str = ""

    @property
    def mark(self) -> str:
        """Return a name for the chart that stays the same while a run goes on."""
        words = "".join(c if c.isalnum() else "-" for c in self.title.lower())
        return f"{words}-{self.traces[0].run}" if self.shape != "lines" or self.words else words

    @property
    def empty(self) -> bool:
        return self.heat is None and not any(np.isfinite(trace.y).any() for trace in self.traces)


def traces(runs: Sequence[Run], name: str, *, spread: bool = False, exchanged: bool = False) -> list[Trace]:
    """Return a column of every run that has values in it; `spread` adds minimum and maximum over ranks."""
    found = []
    for i, run in enumerate(runs):
        column = f"{name}.mean" if spread else name
        y = run.exchanged(column) if exchanged else run.steps[column]
        around = (run.steps[f"{name}.min"], run.steps[f"{name}.max"]) if spread else (None, None)
        found.append(Trace(i, run.name, name, y, *around))
    return [trace for trace in found if not np.isnan(trace.y).all()]


def figure(title: str, note: str, body: str, attributes: str = "") -> str:
    """Return a figure with its caption."""
    caption = f"<figcaption><b>{escape(title)}</b> <span>{escape(note)}</span></figcaption>"
    return f"<figure{attributes}>{caption}{body}</figure>\n"


def describe(chart: Chart) -> str:
    """Describe a chart in words: first, last, minimum and maximum of each series."""
    parts = [f"{chart.note}. Horizontal: {AXES[chart.along][1]}.", chart.words]
    for trace in () if chart.words else chart.traces:
        values = trace.y[np.isfinite(trace.y)]
        if len(values):
            first, last, low, high = (say(chart.kind, float(v)) for v in (values[0], values[-1], values.min(), values.max()))
            parts.append(f"{trace.label}: from {first} to {last}, between {low} and {high}.")
        if chart.crosses and (bad := int(np.count_nonzero(~np.isfinite(trace.y)))):
            parts.append(f"{trace.label}: {bad} not finite.")
    return " ".join(part for part in parts if part)


def peak(values: Doubles) -> float:
    """Return the highest value to fit into the frame: the maximum, unless it is a rare peak."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return math.inf
    often, highest = float(np.percentile(finite, OFTEN)), float(finite.max())
    return 1.2 * often if highest > TALL * often > 0 else highest


def ratio(above: Doubles, below: Doubles) -> Doubles:
    """Divide; NaN where the divisor is zero or not finite."""
    divided: Doubles = np.divide(above, below, out=np.full(len(above), math.nan), where=(below > 0) & (below < math.inf))
    return divided
