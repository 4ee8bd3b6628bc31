"""Partitions of a run: their borders over time, and how many elements are selected in each."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from itertools import groupby

import numpy as np

from mpisparse.arrays import Doubles
from mpisparse.runtime.report.chart import STEPS_X, Chart, Trace
from mpisparse.runtime.report.run import Run
from mpisparse.runtime.report.thin import Columns
from mpisparse.runtime.report.units import number, percent

COLUMNS, LINES, BORDERS, CELLS = 110, 16, 32, 128
Stretch = tuple[Doubles, Doubles]  # steps, and a matrix with a row per step


def borders(runs: Sequence[Run], index: int) -> Chart:
    """Show a run's partitions as areas between their borders."""
    run = runs[index]
    stretches = _stretches(run, run.borders)
    most = max((matrix.shape[1] - 1 for _, matrix in stretches), default=0)
    chosen = _side_by_side(run, [(steps, matrix[:, _chosen(matrix.shape[1] - 1)]) for steps, matrix in stretches])
    found = [
        Trace(index, f"border {i}", f"border {i}", chosen[:, i], colour=_hue(max(0, i - 1), chosen.shape[1] - 1))
        for i in range(chosen.shape[1])
    ]
    note = f"first element of each of {most} partitions"
    if most > BORDERS:
        note += f"; {chosen.shape[1] - 1} bands of {math.ceil(most / BORDERS)}"
    last = stretches[-1][1][-1] if stretches else np.empty(0)
    words = f"At the last step: {', '.join(number(v) for v in last[:64].tolist())}."
    return Chart("Partition borders", note, STEPS_X, "count", found, shape="edges", words=words)


def workloads(runs: Sequence[Run], index: int) -> Chart:
    """Show the selected elements of each partition relative to their mean: as lines, or as a heat map if there are many."""
    run, title = runs[index], "Workload of each partition"
    stretches = [(steps, _relative_to_mean(matrix)) for steps, matrix in _stretches(run, run.workloads)]
    finite = np.concatenate([np.empty(0), *(matrix[np.isfinite(matrix)] for _, matrix in stretches)])
    if not len(finite):
        return Chart(title, "", STEPS_X, "percent", [])
    words = f"Between {percent(float(finite.min()))} and {percent(float(finite.max()))} of the mean."
    most = max(matrix.shape[1] for _, matrix in stretches)
    if most > LINES:
        limit = max(0.1, float(np.percentile(np.abs(finite - 1), 99)))
        note = f"orange above, blue below the mean of {most}; full colour at {percent(limit)}"
        place = Trace(index, run.name, "step", run.steps["step"])
        heat = {"limit": limit, "most": most, "stretches": [_cells(steps, matrix) for steps, matrix in stretches]}
        return Chart(title, note, STEPS_X, "count", [place], shape="heat", heat=heat, words=words)
    matrix = _side_by_side(run, stretches)
    found = [
        Trace(index, f"partition {i + 1}", f"workload {i + 1}", matrix[:, i], colour=_hue(i, most)) for i in range(most)
    ]
    note = "selected, relative to the mean" + ("; first partition blue, last orange" if most > 1 else "")
    return Chart(title, note, STEPS_X, "percent", found, levels=((1.0, ""),), words=words)


def _stretches(run: Run, lists: Sequence[array[float]]) -> list[Stretch]:
    """Split the steps where the number of ranks changes, as after a resume; leave out steps without a list."""
    steps, stretches, at = run.steps["step"], [], 0
    for width, group in groupby(lists, key=len):
        same = list(group)
        if width:
            matrix = np.frombuffer(b"".join(same), dtype=np.float64).reshape(len(same), width)
            stretches.append((steps[at : at + len(same)], matrix))
        at += len(same)
    return stretches


def _side_by_side(run: Run, stretches: Sequence[Stretch]) -> Doubles:
    """Return one matrix with a row for each step of the run, NaN where a stretch has fewer columns."""
    steps = run.steps["step"]
    whole = np.full((len(steps), max((matrix.shape[1] for _, matrix in stretches), default=0)), math.nan)
    for mine, matrix in stretches:
        at = int(np.searchsorted(steps, mine[0]))
        whole[at : at + len(mine), : matrix.shape[1]] = matrix
    return whole


def _relative_to_mean(matrix: Doubles) -> Doubles:
    mean = matrix.mean(axis=1, keepdims=True)
    relative: Doubles = np.divide(matrix, mean, out=np.full(matrix.shape, math.nan), where=mean > 0)
    return relative


def _chosen(count: int) -> list[int]:
    """Choose at most BORDERS borders, evenly spaced, including the first and the last."""
    return [*range(0, count, math.ceil(count / BORDERS)), count]


def _cells(steps: Doubles, matrix: Doubles) -> dict[str, object]:
    """Return a heat map: steps of its columns, and each column's workloads above or below the mean."""
    columns = Columns.along(steps, COLUMNS)
    apart = columns.mean(_pooled(matrix)) - 1
    cells = [[None if math.isnan(v) else round(v, 3) for v in row] for row in apart.tolist()]
    return {"steps": columns.last(steps).tolist(), "count": matrix.shape[1], "cells": cells}


def _pooled(matrix: Doubles) -> Doubles:
    """Average neighbouring partitions if there are more than CELLS."""
    count = matrix.shape[1]
    firsts = np.linspace(0, count, min(count, CELLS), endpoint=False).astype(np.int64)
    pooled: Doubles = np.add.reduceat(matrix, firsts, axis=1) / np.diff(firsts, append=count)
    return pooled


def _hue(i: int, count: int) -> str:
    """Return the colour of a partition, from blue through purple to orange: not through green, which few tell from red."""
    return f"hsl({(220 + 175 * i / max(1, count - 1)) % 360:.0f} 65% 55%)"
