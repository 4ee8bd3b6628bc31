"""Where the time goes: means of phases, time per step, and each run's phases stacked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpisparse.arrays import Doubles
from mpisparse.measures import in_order, phase
from mpisparse.runtime.report.chart import STEPS_X, Chart, Trace
from mpisparse.runtime.report.run import Run
from mpisparse.runtime.report.units import seconds

MOMENT = 1e-4  # share of a step's time below which a phase counts as not used


def phases_of(run: Run) -> list[str]:
    """List a run's phases that take time, from the bottom of its stack to the top."""
    means = {name: mean_seconds(run, name) for name in run.phases}
    least = MOMENT * sum(means.values())
    return in_order(name for name, mean in means.items() if mean > least)


def mean_seconds(run: Run, name: str) -> float:
    """Return the mean time of a phase over the timed steps; a step without the phase counts as zero."""
    values, weights = _times(run, name), run.weights()
    timed = np.isfinite([run.steps[f"seconds.{each}"] for each in run.phases]).any(axis=0) if run.phases else values > 0
    return float(np.average(values[timed], weights=weights[timed])) if timed.any() else 0.0


def totals(runs: Sequence[Run]) -> list[Chart]:
    """Show the time per step."""
    note = "all phases, mean over ranks; rare peaks are cut"
    found = [Trace(i, run.name, "seconds", _total(run)) for i, run in enumerate(runs) if phases_of(run)]
    return [Chart("Time per step", note, STEPS_X, "seconds", found, cut=True)]


def means(runs: Sequence[Run]) -> dict[str, object] | None:
    """Return the mean time of each phase in each run that uses it, for bars; None if nothing was timed."""
    used = [phases_of(run) for run in runs]
    names = in_order(name for each in used for name in each)
    values = [
        [mean_seconds(run, name) if name in mine else None for name in names] for run, mine in zip(runs, used, strict=True)
    ]
    return {"names": names, "meanings": [phase(name).meaning for name in names], "values": values} if names else None


def in_words(runs: Sequence[Run]) -> str:
    """Describe the mean time of each phase."""
    return " ".join(f"{run.name}: {_means(run)}." for run in runs if phases_of(run))


def stacked(runs: Sequence[Run], index: int) -> Chart:
    """Show a run's phases over its steps, stacked."""
    run = runs[index]
    found = [Trace(index, name, f"seconds.{name}", _times(run, name), colour=phase(name).colour) for name in phases_of(run)]
    words = f"Mean over all steps: {_means(run)}."
    note = "mean over ranks, stacked; rare peaks are cut"
    return Chart("Time per phase", note, STEPS_X, "seconds", found, shape="stack", cut=True, words=words)


def _means(run: Run) -> str:
    return ", ".join(f"{name} {seconds(mean_seconds(run, name))}" for name in phases_of(run))


def _times(run: Run, name: str) -> Doubles:
    return np.nan_to_num(run.steps[f"seconds.{name}"], posinf=0.0, neginf=0.0)


def _total(run: Run) -> Doubles:
    total: Doubles = np.sum([_times(run, name) for name in run.phases], axis=0)
    return total
