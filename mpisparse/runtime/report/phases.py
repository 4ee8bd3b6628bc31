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


def means_of(run: Run) -> dict[str, float]:
    """Return the mean time of each of a run's phases that take time, from the bottom of its stack to the top.

    The mean is over the timed steps; a step without the phase counts as zero.
    """
    times = {name: run.steps[f"seconds.{name}"] for name in in_order(run.phases)}
    timed = np.isfinite(list(times.values())).any(axis=0) if times else np.zeros(len(run.steps), dtype=np.bool_)
    if not timed.any():
        return {}
    weights = run.weights()[timed]
    means = {name: float(np.average(_finite(values)[timed], weights=weights)) for name, values in times.items()}
    least = MOMENT * sum(means.values())
    return {name: mean for name, mean in means.items() if mean > least}


def totals(runs: Sequence[Run]) -> list[Chart]:
    """Show the time per step."""
    note = "all phases, mean over ranks; rare peaks are cut"
    found = [Trace(i, run.name, "seconds", _total(run)) for i, run in enumerate(runs) if run.phases]
    return [Chart("Time per step", note, STEPS_X, "seconds", found, cut=True)]


def means(runs: Sequence[Run]) -> dict[str, object] | None:
    """Return the mean time of each phase in each run that uses it, for bars; None if nothing was timed."""
    used = [means_of(run) for run in runs]
    names = in_order(name for each in used for name in each)
    values = [[each.get(name) for name in names] for each in used]
    return {"names": names, "meanings": [phase(name).meaning for name in names], "values": values} if names else None


def in_words(runs: Sequence[Run]) -> str:
    """Describe the mean time of each phase."""
    return " ".join(f"{run.name}: {said}." for run in runs if (said := _said(means_of(run))))


def stacked(runs: Sequence[Run], index: int) -> Chart:
    """Show a run's phases over its steps, stacked."""
    run = runs[index]
    used = means_of(run)
    found = [
        Trace(index, name, f"seconds.{name}", _finite(run.steps[f"seconds.{name}"]), colour=phase(name).colour)
        for name in used
    ]
    words = f"Mean over all steps: {_said(used)}."
    note = "mean over ranks, stacked; rare peaks are cut"
    return Chart("Time per phase", note, STEPS_X, "seconds", found, shape="stack", cut=True, words=words)


def _said(used: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds(mean)}" for name, mean in used.items())


def _finite(values: Doubles) -> Doubles:
    return np.nan_to_num(values, posinf=0.0, neginf=0.0)


def _total(run: Run) -> Doubles:
    total: Doubles = np.sum([_finite(run.steps[f"seconds.{name}"]) for name in run.phases], axis=0)
    return np.where(total > 0, total, np.nan)  # of a step that was not timed nothing is known
