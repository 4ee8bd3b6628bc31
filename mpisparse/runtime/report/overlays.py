"""The charts that overlay all runs: loss and metric, density, traffic, time."""

from __future__ import annotations

import numpy as np

from mpisparse.measures import detail, details_in_order
from mpisparse.runtime.report.chart import BYTES_X, STEPS_X, TIME_X, Chart, Sheet, Trace, ratio
from mpisparse.runtime.report.units import nbytes

AGAINST = {STEPS_X: "by steps", TIME_X: "by time", BYTES_X: "by bytes received"}


def loss(sheet: Sheet) -> list[str]:
    """Draw the loss against steps, time and bytes."""
    evaluated = any(run.metric and np.isfinite(run.evals[run.metric]["loss"]).any() for run in sheet.runs)
    on = sorted({run.data[run.metric] for run in sheet.runs if run.metric and run.data[run.metric]})
    dashed = "; dashed: evaluation" + (f" on {' or '.join(on)} data" if on else "")
    note = "training, mean; band: range over ranks" + (dashed if evaluated else "")
    figures = []
    for axis, against in AGAINST.items():
        traces = [*sheet.traces(axis, "loss", spread=True), *_evals(sheet, axis, "loss", "evaluation")]
        empty = "nothing was received" if axis == BYTES_X else "no loss is finite"
        chart = Chart(f"Loss {against}", note, axis, "number", traces, log=None, crosses=True, empty=empty)
        figures.append(sheet.figure(chart))
    return figures


def metrics(sheet: Sheet) -> list[str]:
    """Draw each metric against steps, time and bytes; nothing before the first evaluation."""
    figures = []
    for name in dict.fromkeys(name for run in sheet.runs for name in run.evals):
        better = next((run.higher_is_better[name] for run in sheet.runs if name in run.evals), True)
        note = f"evaluation; {'higher' if better else 'lower'} is better"
        for axis, against in AGAINST.items():
            traces = _evals(sheet, axis, "metric", "run", name)
            empty = "nothing was received" if axis == BYTES_X and traces else "no value is finite"
            title = f"{name[:1].upper()}{name[1:]} {against}"
            figures.append(sheet.figure(Chart(title, note, axis, "number", traces, log=None, empty=empty)))
    return figures


def density(sheet: Sheet) -> list[str]:
    """Draw actual and set density, the deviation between them, and the threshold."""
    actual = sheet.traces(STEPS_X, "density", exchanged=True)
    chosen = [_styled(trace, "set") for trace in sheet.traces(STEPS_X, "set_density")]
    apart = [
        Trace(i, run.name, run.steps["step"], ratio(run.exchanged("density"), run.steps["set_density"]) - 1)
        for i, run in enumerate(sheet.runs)
    ]
    threshold = [_positive(trace) for trace in sheet.traces(STEPS_X, "threshold", exchanged=True)]
    threshold = [trace for trace in threshold if np.isfinite(trace.y).any()]
    charts = (
        Chart("Density", "share of elements selected; dashed: set", STEPS_X, "number", [*chosen, *actual], log=None),
        Chart("Deviation of density", "actual over set, minus one", STEPS_X, "percent", apart, levels=((0.0, ""),)),
        Chart(
            "Threshold", "smallest magnitude that is selected; log scale", STEPS_X, "number", threshold, log=True,
            empty="no scheme with a threshold",
        ),
    )  # fmt: skip
    return [sheet.figure(chart) for chart in charts]


def traffic(sheet: Sheet) -> list[str]:
    """Draw bytes per step and in total, compared with a dense exchange, and the imbalance."""
    per_step = [_positive(trace) for trace in sheet.traces(STEPS_X, "bytes_received", spread=True)]
    per_step = [trace for trace in per_step if np.isfinite(trace.y).any()]
    dense = _dense(sheet)
    so_far = [
        _positive(Trace(i, run.name, run.steps["step"], run.received()))
        for i, run in enumerate(sheet.runs)
        if run.received()[-1] > 0
    ]
    dense_so_far = [
        Trace(i, run.name, run.steps["step"], run.dense(), style="dense")
        for i, run in enumerate(sheet.runs)
        if run.dense()[-1] > 0
    ]
    balance = sheet.traces(STEPS_X, "imbalance", exchanged=True)
    none = "nothing was received"
    charts = (
        Chart(
            "Bytes per step", "received per rank; log scale", STEPS_X, "bytes", per_step, log=True, empty=none,
            levels=dense,
        ),
        Chart(
            "Total bytes", "received per rank; dashed: dense; log scale", STEPS_X, "bytes", [*dense_so_far, *so_far],
            log=True, empty=none,
        ),
        Chart("Imbalance", "busiest rank over the mean, minus one", STEPS_X, "percent", balance),
    )  # fmt: skip
    return [sheet.figure(chart) for chart in charts]


def speculation(sheet: Sheet) -> list[str]:
    """Draw granularity, corrections and drift on rank 0; nothing if no run uses scheme speculative."""
    fine, moved, back, drift, after = (
        [trace for trace in sheet.traces(STEPS_X, f"speculation.{name}") if np.isfinite(trace.y).any()]
        for name in ("fine", "updated", "corrected", "drift", "drift_after")
    )
    if not fine:
        return []
    charts = (
        Chart("Granularity", "share of layers filtered weight by weight, on rank 0", STEPS_X, "percent", fine),
        Chart(
            "Corrections", "weights reset to the global ones, on rank 0; dashed: weights moved ahead", STEPS_X, "number",
            [*(_styled(trace, "set") for trace in moved), *back],
        ),
        Chart(
            "Drift", "largest distance from the global weights, on rank 0; dashed: after correction", STEPS_X, "number",
            [*(_styled(trace, "set") for trace in after), *drift],
        ),
    )  # fmt: skip
    return [sheet.figure(chart) for chart in charts]


def details(sheet: Sheet) -> list[str]:
    """Draw each number that only some schemes report; nothing if there is none."""
    charts = []
    for name in details_in_order(name for run in sheet.runs for name in run.details):
        about = detail(name)
        traces = [trace for trace in sheet.traces(STEPS_X, f"details.{name}") if np.isfinite(trace.y).any()]
        charts.append(Chart(about.label, about.meaning, STEPS_X, about.kind, traces, empty="no value is finite"))
    return [sheet.figure(chart) for chart in charts]


def _dense(sheet: Sheet) -> tuple[tuple[float, str], ...]:
    """Return the bytes of a dense exchange, at most three different values, labelled where there is room."""
    values = sorted({float(v) for run in sheet.runs for v in np.unique(run.steps["bytes_dense"]) if v > 0}, reverse=True)[:3]
    return tuple(
        (value, "" if i and values[i - 1] < 2 * value else f"dense {nbytes(value)}") for i, value in enumerate(values)
    )


def _evals(sheet: Sheet, axis: str, column: str, style: str, name: str | None = None) -> list[Trace]:
    traces = []
    for i, run in enumerate(sheet.runs):
        metric = run.metric if name is None else name
        if metric is None or metric not in run.evals:
            continue
        evals = run.evals[metric]
        x = sheet.along(run, axis, evals["step"], evals["time"])
        traces.append(Trace(i, run.name, x, evals[column], style=style))
    return [trace for trace in traces if np.isfinite(trace.y).any()]


def _styled(trace: Trace, style: str) -> Trace:
    return Trace(trace.run, trace.name, trace.x, trace.y, style=style)


def _positive(trace: Trace) -> Trace:
    y = np.where(trace.y > 0, trace.y, np.nan)
    return Trace(trace.run, trace.name, trace.x, y, trace.low, trace.high, trace.style)
