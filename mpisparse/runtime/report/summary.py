"""The summary: results and costs of each run in numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from mpisparse.runtime.progress import AS_MUCH, MORE_THAN_DENSE
from mpisparse.runtime.report.groups import Group
from mpisparse.runtime.report.run import Run
from mpisparse.runtime.report.units import nbytes, number, percent, seconds

SETTINGS = (
    "model", "data", "scheme", "density", "codec", "ranks", "seed", "batch_size", "optimizer", "lr", "momentum",
    "weight_decay", "schedule", "warmup", "density_warmup", "clip", "accumulation", "epochs", "steps", "target",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A value, how it is said, and an optional note."""

    value: float
    says: Callable[[float], str] = number
    note: str = ""

    @property
    def text(self) -> str:
        return self.says(self.value)


NOTHING = Cell(math.nan, lambda _: "–")


def headline(runs: Sequence[Run]) -> list[tuple[str, list[Cell]]]:
    """Return the rows of the table, a label and a cell per run, without rows that are empty for all runs."""
    names = {run.metric for run in runs if run.metric}
    metric = names.pop() if len(names) == 1 else "metric"
    rows: list[tuple[str, Callable[[Run], Cell]]] = [
        (f"Final {metric}", _final_metric),
        (f"Best {metric}", _best_metric),
        *((f"Final {name}", partial(_final_other, name)) for name in _others(runs)),
        ("Final loss", lambda run: _plain(run.steps["loss.mean"][-1])),
        ("Final evaluation loss", _final_evaluation_loss),
        ("Steps", lambda run: _plain(run.steps["step"][-1])),
        ("Training time", lambda run: _cell(run.steps["time"][-1], seconds)),
        ("Bytes received per rank", lambda run: _cell(_bytes(run, "bytes_received.mean"), nbytes)),
        ("Of these, indices", lambda run: _cell(_bytes(run, "index_bytes.mean"), nbytes)),
        ("Of these, control messages", lambda run: _cell(_bytes(run, "control_bytes.mean"), nbytes)),
        ("Bytes of a dense exchange", lambda run: _cell(_bytes(run, "bytes_dense"), nbytes)),
        ("Reduction against dense", _times_fewer),
        ("Mean density", _density),
        ("Mean imbalance", lambda run: _cell(_mean(run, "imbalance"), percent)),
        ("Steps skipped", _skipped),
    ]
    table = [(label, [cell(run) for run in runs]) for label, cell in rows]
    return [(label, cells) for label, cells in table if any(cell is not NOTHING for cell in cells)]


def over_seeds(runs: Sequence[Run], groups: Sequence[Group]) -> list[tuple[str, list[Cell]]]:
    """Return the rows of numbers as means over the runs of each group, with their standard deviations."""
    rows = []
    for label, cells in headline(runs):
        means = [_mean_cell([cells[i] for i in group.runs]) for group in groups]
        if any(cell is not NOTHING for cell in means):
            rows.append((label, means))
    return rows


def _mean_cell(cells: Sequence[Cell]) -> Cell:
    """Return the mean of numbers; NOTHING if one is missing, a plain cell if it is alone."""
    values = np.array([cell.value for cell in cells])
    if len(cells) == 1 or not np.isfinite(values).all():
        return cells[0] if len(cells) == 1 else NOTHING
    says, spread = cells[0].says, float(f"{values.std(ddof=1):.2g}")
    return Cell(float(values.mean()), says, f"± {says(spread)}" if spread else "")


def settings(runs: Sequence[Run]) -> tuple[list[str], list[str]]:
    """Split the names of settings: the most important ones and those that differ between runs, and the others."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    first = [name for name in SETTINGS if name in names]
    rest = [name for name in names if name not in SETTINGS]
    apart = [name for name in rest if name != "out" and differs(runs, name)]  # every run has a directory of its own
    return [*first, *apart], [name for name in rest if name not in apart]


def differs(runs: Sequence[Run], name: str) -> bool:
    """Return whether runs have different values of a setting."""
    return len({repr(run.settings.get(name)) for run in runs}) > 1


def _final_metric(run: Run) -> Cell:
    if run.metric is None:
        return NOTHING
    evals = run.evals[run.metric]
    return _plain(evals["metric"][-1], f"at step {number(evals['step'][-1])}")


def _others(runs: Sequence[Run]) -> list[str]:
    """Return the metrics other than the main one, such as those on test data at the end."""
    return list(dict.fromkeys(name for run in runs for name in run.evals if name != run.metric))


def _final_other(name: str, run: Run) -> Cell:
    if name not in run.evals or name == run.metric:
        return NOTHING
    evals = run.evals[name]
    return _plain(evals["metric"][-1], f"at step {number(evals['step'][-1])}, loss {number(evals['loss'][-1])}")


def _best_metric(run: Run) -> Cell:
    if run.metric is None:
        return NOTHING
    evals = run.evals[run.metric]
    values = evals["metric"] if run.higher_is_better[run.metric] else -evals["metric"]
    values = np.where(np.isfinite(values), values, -math.inf)
    best = int(values.argmax())
    return _plain(evals["metric"][best], f"at step {number(evals['step'][best])}") if np.isfinite(values[best]) else NOTHING


def _final_evaluation_loss(run: Run) -> Cell:
    losses = run.evals[run.metric]["loss"] if run.metric else np.empty(0)
    note = f"{run.data[run.metric]} data" if run.metric and run.data[run.metric] else ""
    return NOTHING if np.isnan(losses).all() else _plain(losses[-1], note)


def _times_fewer(run: Run) -> Cell:
    received, dense = _bytes(run, "bytes_received.mean"), _bytes(run, "bytes_dense")
    if not (received > 0 and dense > 0):
        return NOTHING
    note = MORE_THAN_DENSE if received > AS_MUCH * dense else ""
    return Cell(dense / received, lambda times: f"{number(times, 3)}×", note)


def _density(run: Run) -> Cell:
    actual, chosen = _mean(run, "density"), _mean(run, "set_density")
    note = f"set {number(chosen)}, {percent(actual / chosen - 1, signed=True)}" if chosen > 0 else ""
    return _cell(actual, number, note)


def _skipped(run: Run) -> Cell:
    count = np.count_nonzero(run.steps["skipped"] == 1.0)
    return _plain(float(count)) if count else NOTHING


def _bytes(run: Run, name: str) -> float:
    values = run.steps[name]
    return math.nan if np.isnan(values).all() else float(np.nansum(values * run.weights()))


def _mean(run: Run, name: str) -> float:
    """Average over the steps that exchanged something; a line counts for as many steps as it stands for."""
    values, weights = run.exchanged(name), run.weights()
    here = np.isfinite(values)
    return float(np.average(values[here], weights=weights[here])) if here.any() else math.nan


def _cell(value: float, says: Callable[[float], str], note: str = "") -> Cell:
    return NOTHING if math.isnan(value) else Cell(float(value), says, note)


def _plain(value: float, note: str = "") -> Cell:
    """Return a cell that shows its number even if it is NaN, as that is the result of the run."""
    return Cell(float(value), number, note)
