"""The headline: what each run reached, and at what price, in numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from mpisparse.runtime.report.read import Run
from mpisparse.runtime.report.units import nbytes, number, percent, seconds

SETTINGS = (
    "model", "data", "scheme", "density", "codec", "ranks", "seed", "batch_size", "optimizer", "lr", "momentum",
    "weight_decay", "schedule", "warmup", "density_warmup", "clip", "accumulation", "epochs", "steps", "target",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A value, as people read it, and what more there is to say."""

    value: float
    text: str
    aside: str = ""


NOTHING = Cell(math.nan, "–")


def headline(runs: Sequence[Run]) -> list[tuple[str, list[Cell]]]:
    """List the rows of the table: a label, and a cell for each run. Rows that say nothing for any run are left out."""
    names = {run.metric for run in runs if run.metric}
    metric = names.pop() if len(names) == 1 else "metric"
    rows: list[tuple[str, Callable[[Run], Cell]]] = [
        (f"Final {metric}", _final_metric),
        (f"Best {metric}", _best_metric),
        *((f"Final {name}", partial(_final_other, name)) for name in _others(runs)),
        ("Final loss", lambda run: _plain(run.steps["loss.mean"][-1])),
        ("Final evaluation loss", _final_evaluation_loss),
        ("Steps", lambda run: _plain(run.steps["step"][-1])),
        ("Time of training", lambda run: _cell(run.steps["time"][-1], seconds)),
        ("Bytes received by a rank", lambda run: _cell(_bytes(run, "bytes_received.mean"), nbytes)),
        ("Bytes of dense exchange", lambda run: _cell(_bytes(run, "bytes_dense"), nbytes)),
        ("Fewer bytes than dense", _times_fewer),
        ("Mean density", _density),
        ("Mean imbalance", lambda run: _cell(_mean(run, "imbalance"), percent)),
        ("Steps skipped", _skipped),
    ]
    table = [(label, [cell(run) for run in runs]) for label, cell in rows]
    return [(label, cells) for label, cells in table if any(cell is not NOTHING for cell in cells)]


def settings(runs: Sequence[Run]) -> tuple[list[str], list[str]]:
    """Split the names of settings: those of most interest or that differ between runs, and the others."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    first = [name for name in SETTINGS if name in names]
    rest = [name for name in names if name not in SETTINGS]
    return [*first, *(name for name in rest if differs(runs, name))], [name for name in rest if not differs(runs, name)]


def differs(runs: Sequence[Run], name: str) -> bool:
    """Say whether runs have different values of a setting."""
    return len({repr(run.settings.get(name)) for run in runs}) > 1


def _final_metric(run: Run) -> Cell:
    if run.metric is None:
        return NOTHING
    rows = run.evals[run.metric]
    return _plain(rows["metric"][-1], f"at step {number(rows['step'][-1])}")


def _others(runs: Sequence[Run]) -> list[str]:
    """The metrics that are not what runs were steered by, such as those on test data at the end."""
    return list(dict.fromkeys(name for run in runs for name in run.evals if name != run.metric))


def _final_other(name: str, run: Run) -> Cell:
    if name not in run.evals or name == run.metric:
        return NOTHING
    rows = run.evals[name]
    return _plain(rows["metric"][-1], f"at step {number(rows['step'][-1])}, loss {number(rows['loss'][-1])}")


def _best_metric(run: Run) -> Cell:
    if run.metric is None:
        return NOTHING
    rows = run.evals[run.metric]
    values = rows["metric"] if run.higher_is_better[run.metric] else -rows["metric"]
    values = np.where(np.isfinite(values), values, -math.inf)
    best = int(values.argmax())
    return _plain(rows["metric"][best], f"at step {number(rows['step'][best])}") if np.isfinite(values[best]) else NOTHING


def _final_evaluation_loss(run: Run) -> Cell:
    losses = run.evals[run.metric]["loss"] if run.metric else np.empty(0)
    aside = f"{run.data[run.metric]} data" if run.metric and run.data[run.metric] else ""
    return NOTHING if np.isnan(losses).all() else _plain(losses[-1], aside)


def _times_fewer(run: Run) -> Cell:
    received, dense = _bytes(run, "bytes_received.mean"), _bytes(run, "bytes_dense")
    if not (received > 0 and dense > 0):
        return NOTHING
    return Cell(dense / received, f"{number(dense / received, 3)}×")


def _density(run: Run) -> Cell:
    actual, chosen = _mean(run, "density"), _mean(run, "set_density")
    aside = f"set {number(chosen)}, {percent(actual / chosen - 1, signed=True)}" if chosen > 0 else ""
    return _cell(actual, number, aside)


def _skipped(run: Run) -> Cell:
    count = np.count_nonzero(run.steps["skipped"] == 1.0)
    return _plain(float(count)) if count else NOTHING


def _bytes(run: Run, name: str) -> float:
    values = run.steps[name]
    return math.nan if np.isnan(values).all() else float(np.nansum(values * run.weights()))


def _mean(run: Run, name: str) -> float:
    """Average over the steps that were not skipped, each line counted for the steps it stands for."""
    values, weights = run.exchanged(name), run.weights()
    here = np.isfinite(values)
    return float(np.average(values[here], weights=weights[here])) if here.any() else math.nan


def _cell(value: float, says: Callable[[float], str], aside: str = "") -> Cell:
    return NOTHING if math.isnan(value) else Cell(float(value), says(float(value)), aside)


def _plain(value: float, aside: str = "") -> Cell:
    """A number that is shown even where it is NaN, for that is what the run came to."""
    return Cell(float(value), number(float(value)), aside)
