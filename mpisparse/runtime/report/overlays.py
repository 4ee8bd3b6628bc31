"""The charts that overlay all runs: loss and metric, density, traffic, and what only some schemes report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mpisparse.measures import detail, details_in_order
from mpisparse.runtime.report.chart import BYTES_X, STEPS_X, TIME_X, Chart, Trace, ratio, traces
from mpisparse.runtime.report.run import Run
from mpisparse.runtime.report.units import nbytes

AGAINST = {STEPS_X: "by steps", TIME_X: "by time", BYTES_X: "by bytes received"}


def loss(runs: Sequence[Run]) -> list[Chart]:
    """Show the loss against steps, time and bytes."""
    evaluated = any(run.metric and np.isfinite(run.evals[run.metric]["loss"]).any() for run in runs)
    on = sorted({run.data[run.metric] for run in runs if run.metric and run.data[run.metric]})
    dashed = "; dashed: evaluation" + (f" on {' or '.join(on)} data" if on else "")
    note = "training, mean; band: range over ranks" + (dashed if evaluated else "")
    shown = [*traces(runs, "loss", spread=True), *_evals(runs, "loss", "evaluation")]
    return [
        Chart(f"Loss {against}", note, axis, "number", shown, log=None, crosses=True) for axis, against in AGAINST.items()
    ]


def metrics(runs: Sequence[Run]) -> list[Chart]:
    """Show each metric against steps, time and bytes; one that was evaluated once, at the end, is in the summary."""
    charts = []
    for name in dict.fromkeys(name for run in runs for name in run.evals):
        better = next((run.higher_is_better[name] for run in runs if name in run.evals), True)
        note = f"evaluation; {'higher' if better else 'lower'} is better"
        shown = _evals(runs, "metric", "run", name)
        if all(len(trace.y) == 1 for trace in shown):
            continue
        for axis, against in AGAINST.items():
            charts.append(Chart(f"{name[:1].upper()}{name[1:]} {against}", note, axis, "number", shown, log=None))
    return charts


def density(runs: Sequence[Run]) -> list[Chart]:
    """Show actual and set density, the deviation between them, and the threshold."""
    chosen = [replace(trace, style="set") for trace in traces(runs, "set_density")]
    apart = [
        Trace(i, run.name, "deviation", ratio(run.exchanged("density"), run.steps["set_density"]) - 1)
        for i, run in enumerate(runs)
    ]
    actual, threshold = traces(runs, "density", exchanged=True), _positive(traces(runs, "threshold", exchanged=True))
    return [
        Chart("Density", "share of elements selected; dotted: set", STEPS_X, "number", [*chosen, *actual], log=None),
        Chart("Deviation of density", "actual over set, minus one", STEPS_X, "percent", apart, levels=((0.0, ""),)),
        Chart("Threshold", "smallest magnitude that is selected", STEPS_X, "number", threshold, log=True),
    ]


def traffic(runs: Sequence[Run]) -> list[Chart]:
    """Show bytes per step and in total, compared with a dense exchange, and the imbalance."""
    totals = [Trace(i, run.name, "received", run.received()) for i, run in enumerate(runs)]
    dense = [Trace(i, run.name, "dense", run.dense(), style="dense") for i, run in enumerate(runs)]
    per_step, so_far = _positive(traces(runs, "bytes_received", spread=True)), _positive(totals)
    balance = traces(runs, "imbalance", exchanged=True)
    return [
        Chart("Bytes per step", "received per rank", STEPS_X, "bytes", per_step, log=True, levels=_dense(runs)),
        Chart("Total bytes", "received per rank; dashed: dense", STEPS_X, "bytes",
              [*_positive(dense), *so_far] if so_far else [], log=True),
        Chart("Imbalance", "busiest rank over the mean, minus one", STEPS_X, "percent", balance),
    ]  # fmt: skip


def speculation(runs: Sequence[Run]) -> list[Chart]:
    """Show granularity, corrections and drift of scheme speculative on rank 0."""
    fine, moved, back, drift, after = (
        traces(runs, f"speculation.{name}") for name in ("fine", "updated", "corrected", "drift", "drift_after")
    )
    return [
        Chart("Granularity", "share of layers filtered weight by weight, on rank 0", STEPS_X, "percent", fine),
        Chart("Corrections", "weights reset to the global ones, on rank 0; dotted: weights moved ahead", STEPS_X, "number",
              [*(replace(trace, style="set") for trace in moved), *back]),
        Chart("Drift", "largest distance from the global weights, on rank 0; dotted: after correction", STEPS_X, "number",
              [*(replace(trace, style="set") for trace in after), *drift]),
    ]  # fmt: skip


def details(runs: Sequence[Run]) -> list[Chart]:
    """Show each number that only some schemes report."""
    charts = []
    for name in details_in_order(name for run in runs for name in run.details):
        about = detail(name)
        charts.append(Chart(about.label, about.meaning, STEPS_X, about.kind, traces(runs, f"details.{name}")))
    return charts


def rates(runs: Sequence[Run]) -> list[Chart]:
    """Show the learning rate."""
    return [Chart("Learning rate", "as set", STEPS_X, "number", traces(runs, "lr"), log=None)]


def _dense(runs: Sequence[Run]) -> tuple[tuple[float, str], ...]:
    """Return the bytes of a dense exchange, at most three different values, labelled where there is room."""
    values = sorted({float(v) for run in runs for v in np.unique(run.steps["bytes_dense"]) if 0 < v < np.inf}, reverse=True)
    return tuple(
        (value, "" if i and values[i - 1] < 2 * value else f"dense {nbytes(value)}") for i, value in enumerate(values[:3])
    )


def _evals(runs: Sequence[Run], column: str, style: str, name: str | None = None) -> list[Trace]:
    found = []
    for i, run in enumerate(runs):
        metric = run.metric if name is None else name
        if metric is not None and metric in run.evals:
            found.append(Trace(i, run.name, column, run.evals[metric][column], style=style, table=f"eval {metric}"))
    return [trace for trace in found if np.isfinite(trace.y).any()]


def _positive(found: list[Trace]) -> list[Trace]:
    """Leave out values that are not positive, and traces of such values alone."""
    kept = [replace(trace, y=np.where(trace.y > 0, trace.y, np.nan)) for trace in found]
    return [trace for trace in kept if np.isfinite(trace.y).any()]
