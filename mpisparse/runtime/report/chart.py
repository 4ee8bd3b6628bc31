"""A chart: runs overlaid along one axis, each in its colour, with events as thin marks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape

import numpy as np

from mpisparse.arrays import Doubles
from mpisparse.runtime.report import svg
from mpisparse.runtime.report.read import Run
from mpisparse.runtime.report.scale import WIDE, Axis, fit
from mpisparse.runtime.report.svg import Frame, Look
from mpisparse.runtime.report.thin import Thinned, thin
from mpisparse.runtime.report.units import say

COLOURS = 8  # further runs repeat them with broken lines
QUIET = ("start", "checkpoint", "end")  # events shown as a short tick; others span the whole height
TALL, OFTEN = 1.6, 98  # a rare peak is more than TALL times the OFTENth percentile
BYTES_X, STEPS_X, TIME_X = "bytes", "steps", "time"
AXES = {
    STEPS_X: ("count", "steps"),
    TIME_X: ("seconds", "training time"),
    BYTES_X: ("bytes", "bytes received per rank"),
}


@dataclass(frozen=True)
class Trace:
    """One series of one run, optionally with its range over ranks. `style` is run, evaluation, set or dense."""

    run: int
    name: str
    x: Doubles
    y: Doubles
    low: Doubles | None = None
    high: Doubles | None = None
    style: str = "run"

    @property
    def look(self) -> Look:
        name = self.name if self.style == "run" else f"{self.name}, {self.style}"
        return Look(f"{run_classes(self.run)} {self.style}", name)


@dataclass(frozen=True)
class Chart:
    """What one chart shows.

    log: use a log scale for y; None: only if values range widely. crosses: mark non-finite values. cut: let rare peaks
    exceed the frame, so that they do not flatten the rest.
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
    empty: str = "no values"


@dataclass
class Sheet:
    """The runs of a page, and what all their charts share: the horizontal axes and the resolution."""

    runs: Sequence[Run]
    columns: int = field(init=False)

    def __post_init__(self) -> None:
        self.columns = min(220, max(60, 900 // len(self.runs)))

    def extent(self, axis: str) -> list[Doubles]:
        """Return the first and last value of each run along an axis, so that all charts share its range."""
        return [self.along(run, axis, run.steps["step"], run.steps["time"])[[0, -1]] for run in self.runs]

    def along(self, run: Run, axis: str, step: Doubles, time: Doubles) -> Doubles:
        """Return the values along an axis of steps of a run that were done at these times."""
        if axis == BYTES_X:
            return np.interp(step, run.steps["step"], run.received())
        return step if axis == STEPS_X else time

    def traces(self, axis: str, name: str, *, spread: bool = False, exchanged: bool = False) -> list[Trace]:
        """Return a column of every run that has values in it; `spread` adds minimum and maximum over ranks."""
        traces = []
        for i, run in enumerate(self.runs):
            column = f"{name}.mean" if spread else name
            y = run.exchanged(column) if exchanged else run.steps[column]
            x = self.along(run, axis, run.steps["step"], run.steps["time"])
            around = (run.steps[f"{name}.min"], run.steps[f"{name}.max"]) if spread else (None, None)
            traces.append(Trace(i, run.name, x, y, *around))
        return [trace for trace in traces if not np.isnan(trace.y).all()]

    def figure(self, chart: Chart) -> str:
        """Draw a chart as a figure with its caption."""
        frame = self._frame(chart)
        if frame is None:
            return figure(chart.title, chart.note, svg.nothing(chart.title, chart.empty))
        thinned = [self._thin(frame, trace) for trace in chart.traces]
        pairs = list(zip(chart.traces, thinned, strict=True))
        drawn = [self._marks(frame, chart.along)]
        drawn += [svg.draw_band(frame, points, trace.look) for trace, points in pairs if trace.style == "run"]
        drawn += [svg.draw_level(frame, value, Look("", name)) for value, name in chart.levels]
        drawn += [svg.draw_line(frame, points, trace.look) for trace, points in pairs]
        if chart.crosses:
            drawn += [svg.draw_crosses(frame, points.bad, trace.look) for trace, points in pairs]
        return figure(chart.title, chart.note, svg.picture(chart.title, describe(chart), frame, drawn))

    def _frame(self, chart: Chart) -> Frame | None:
        edges = [v for trace in chart.traces for v in (trace.y, trace.low, trace.high) if v is not None]
        if chart.cut and edges:
            edges = [np.minimum(edge, peak(np.concatenate(edges))) for edge in edges]
        x = x_axis(chart.along, self.extent(chart.along), [trace.x for trace in chart.traces])
        y = fit([*edges, *(np.array([value]) for value, _ in chart.levels)] if chart.traces else [], log=chart.log, pad=0.05)
        return Frame(x, replace(y, kind=chart.kind)) if x and y else None

    def _thin(self, frame: Frame, trace: Trace) -> Thinned:
        low, high = (trace.y if v is None else v for v in (trace.low, trace.high))
        return thin(frame.x.fraction(trace.x), trace.y, low, high, self.columns)

    def _marks(self, frame: Frame, axis: str) -> str:
        return "".join(event_marks(self, run, frame, axis, Look(run_classes(i))) for i, run in enumerate(self.runs))


def x_axis(axis: str, reach: Sequence[Doubles], more: Sequence[Doubles] = ()) -> Axis | None:
    """Fit a horizontal axis from zero to the end of the runs; log scale for bytes if runs differ widely."""
    kind, name = AXES[axis]
    ends = [float(part[-1]) for part in reach if part[-1] > 0]
    log = axis == BYTES_X and bool(ends) and max(ends) / min(ends) > WIDE
    fitted = fit([*reach, *more] if log else [*reach, *more, np.zeros(1)], log=log)
    empty = not ends if axis == BYTES_X else np.isnan(np.concatenate(reach)).all()
    return None if empty or fitted is None else replace(fitted, kind=kind, name=name)


def event_marks(sheet: Sheet, run: Run, frame: Frame, axis: str, look: Look) -> str:
    """Mark a run's events along an axis."""
    parts = []
    for tall in (False, True):
        events = [event for event in run.events if (event.kind in QUIET) != tall]
        step = np.array([event.step for event in events], dtype=np.float64)
        time = np.array([event.time for event in events], dtype=np.float64)
        fractions = frame.x.fraction(sheet.along(run, axis, step, time))
        parts.append(svg.draw_marks(frame, fractions, replace(look, classes=look.classes + " tall" * tall), tall=tall))
    return "".join(parts)


def run_classes(run: int) -> str:
    """Return the CSS classes of a run: its own, by which it is hidden, its colour, and how its lines are broken."""
    return f"r{run} c{run % COLOURS}" + (f" b{run // COLOURS % 4}" if run >= COLOURS else "")


def figure(title: str, note: str, picture: str, classes: str = "") -> str:
    """Return a figure with its caption."""
    caption = f"<figcaption><b>{escape(title)}</b> <span>{escape(note)}</span></figcaption>"
    return (
        f'<figure class="{classes}">{caption}{picture}</figure>\n' if classes else f"<figure>{caption}{picture}</figure>\n"
    )


def describe(chart: Chart) -> str:
    """Describe a chart in words: first, last, minimum and maximum of each series."""
    parts = [f"{chart.note}. Horizontal: {AXES[chart.along][1]}."]
    for trace in chart.traces:
        values = trace.y[np.isfinite(trace.y)]
        if len(values):
            first, last, low, high = (say(chart.kind, float(v)) for v in (values[0], values[-1], values.min(), values.max()))
            parts.append(f"{trace.look.name}: from {first} to {last}, between {low} and {high}.")
        if chart.crosses and (bad := int(np.count_nonzero(~np.isfinite(trace.y)))):
            parts.append(f"{trace.look.name}: {bad} not finite.")
    return " ".join(parts)


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
