"""Where the time goes: means of phases, time per step, and each run's phases stacked."""

from __future__ import annotations

from html import escape

import numpy as np

from mpisparse.arrays import Doubles
from mpisparse.measures import in_order, phase
from mpisparse.runtime.report import svg
from mpisparse.runtime.report.chart import STEPS_X, Chart, Sheet, Trace, event_marks, figure, peak, run_classes, x_axis
from mpisparse.runtime.report.read import Run
from mpisparse.runtime.report.scale import Axis
from mpisparse.runtime.report.svg import Frame, Look
from mpisparse.runtime.report.thin import thin
from mpisparse.runtime.report.units import seconds

LABELLED = 4  # maximum number of runs that leaves room for numbers


def phases_of(run: Run) -> list[str]:
    """List a run's phases from the bottom of its stack to the top: the exchange, then what takes most of the time."""
    return in_order(run.phases)


def all_phases(sheet: Sheet) -> list[str]:
    """List the phases of all runs in the same order."""
    return in_order(name for run in sheet.runs for name in run.phases)


def key(name: str) -> str:
    """Return the legend entry of a phase: its name in its colour, with its meaning as a tooltip."""
    about = phase(name)
    return f'<span style="--c:{about.colour}" title="{escape(about.meaning or name)}">{escape(name)}</span>'


def mean_seconds(run: Run, name: str) -> float:
    """Return the mean time of a phase over the timed steps; a step without the phase counts as zero."""
    values, weights = run.steps[f"seconds.{name}"], run.weights()
    timed = np.isfinite([run.steps[f"seconds.{each}"] for each in run.phases]).any(axis=0) if run.phases else values > 0
    return float(np.average(np.nan_to_num(values)[timed], weights=weights[timed])) if timed.any() else 0.0


def overview(sheet: Sheet) -> list[str]:
    """Draw the mean time of each phase, the time per step, and the learning rate."""
    totals = [Trace(i, run.name, run.steps["step"], _total(run)) for i, run in enumerate(sheet.runs) if run.phases]
    rates = sheet.traces(STEPS_X, "lr")
    note = "all phases, mean over ranks; rare peaks are cut"
    whole = Chart("Time per step", note, STEPS_X, "seconds", totals, cut=True, empty="no times")
    rate = Chart("Learning rate", "as set", STEPS_X, "number", rates, log=None, empty="no learning rate")
    return [_bars(sheet), sheet.figure(whole), sheet.figure(rate)]


def stacked(sheet: Sheet, index: int) -> str:
    """Draw a run's phases over its steps, stacked."""
    run = sheet.runs[index]
    names = phases_of(run)
    title, note = "Time per phase", "mean over ranks, stacked"
    along = x_axis(STEPS_X, [run.steps["step"]])
    if not names or along is None:
        return figure(title, note, svg.nothing(title, "no times"))
    values = np.stack([np.nan_to_num(run.steps[f"seconds.{name}"], posinf=0.0) for name in names], axis=1)
    columns = thin(along.fraction(run.steps["step"]), values, values, values, sheet.columns)
    tops = np.cumsum(columns.mean, axis=1)
    height, highest = peak(tops[:, -1]), float(tops[:, -1].max())
    frame = Frame(along, Axis(0.0, 1.05 * height or 1.0, kind="seconds"))
    floor = np.zeros(len(tops))
    drawn = [
        svg.draw_area(
            frame, columns.fractions, (tops[:, i - 1] if i else floor, tops[:, i]), Look("", name, phase(name).colour)
        )
        for i, name in enumerate(names)
    ]
    drawn.append(event_marks(sheet, run, frame, STEPS_X, Look("ink")))
    if highest > height:
        note += f"; the longest, {seconds(highest)}, is cut"
    means = ", ".join(f"{name} {seconds(mean_seconds(run, name))}" for name in names)
    return figure(title, note, svg.picture(f"{title}: {run.name}", f"Mean over all steps: {means}.", frame, drawn))


def _total(run: Run) -> Doubles:
    total: Doubles = np.nansum([run.steps[f"seconds.{name}"] for name in run.phases], axis=0)
    return total


def _bars(sheet: Sheet) -> str:
    """Draw a bar per phase and run, followed by its time."""
    title, note = "Mean time of each phase", "per step, over all steps and ranks"
    names = all_phases(sheet)
    if not names:
        return figure(title, note, svg.nothing(title, "no times"))
    means = [[mean_seconds(run, name) for run in sheet.runs] for name in names]
    longest = max(max(row) for row in means) or 1.0
    left, room = 80.0, svg.WIDTH - 80.0 - 62.0
    labelled = len(sheet.runs) <= LABELLED
    least = 9.0 if labelled else 3.0
    thick = min(14.0, max(least, (svg.HEIGHT - 8) / (len(names) * (len(sheet.runs) + 0.6))))
    size = f' style="font-size:{min(11.0, thick + 0.5):.1f}px"'
    parts, y = [], 4.0
    for name, row in zip(names, means, strict=True):
        middle = y + thick * len(row) / 2
        parts.append(f'<text class="y" x="{left - 6:g}" y="{middle:.1f}">{escape(name)}</text>')
        for i, value in enumerate(row):
            classes, width = run_classes(i), max(0.5, room * value / longest)
            bar = (
                f'<rect class="bar" x="{left:g}" y="{y:.1f}" width="{width:.1f}" height="{thick - min(1, thick / 5):.1f}"/>'
            )
            said = (
                f'<text class="value" x="{left + width + 4:.1f}" y="{y + thick / 2 - 0.5:.1f}"{size}>{seconds(value)}</text>'
            )
            parts.append(f'<g class="{classes}">{bar}{said if labelled else ""}</g>')
            y += thick
        y += thick * 0.6
    described = "; ".join(
        f"{run.name}: " + ", ".join(f"{name} {seconds(row[i])}" for name, row in zip(names, means, strict=True))
        for i, run in enumerate(sheet.runs)
    )
    return figure(title, note, svg.blank(title, described, "".join(parts), height=max(svg.HEIGHT, y + 4)))
