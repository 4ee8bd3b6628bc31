"""What the runs of bench converge say: a record for each case at its best learning rate, and a table of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mpisparse.bench.converge.cases import ALONE, DENSE, Case
from mpisparse.bench.converge.plan import ConvergePlan, Record
from mpisparse.bench.converge.rates import at_edge, best_rate
from mpisparse.runtime.table import formatted

COLUMNS = {
    "case": "", "bytes": ".4g", "lr": ".4g", "edge": "", "validation": ".4f", "test": ".4f", "test_error": ".4f",
    "captured": ".3f", "captured_error": ".3f", "seeds": "d", "beats_alone": "d", "seconds": ".1f",
}  # fmt: skip


def summary(plan: ConvergePlan, done: Mapping[tuple[str, float, int], Record]) -> list[Record]:
    """Return a record for each case: its best rate, means over seeds, and the share of dense's gain that it captures.

    beats_alone: the number of seeds with a lower test loss than one worker alone has with the same seed.
    """
    alone, dense = (_at_best(plan, _named(plan, name), done) for name in (ALONE, DENSE))
    records = []
    for case in plan.cases:
        runs = _at_best(plan, case, done)
        share, error = captured(_losses(alone), _losses(dense), _losses(runs))
        better = sum(mine < other for mine, other in zip(_losses(runs), _losses(alone), strict=False))
        told = {"captured": share, "captured_error": error, "beats_alone": None if case.name == ALONE else better}
        records.append({**_describe(plan, case, done, runs), **told})
    return records


def captured(alone: Sequence[float], dense: Sequence[float], case: Sequence[float]) -> tuple[float | None, float | None]:
    """Return (alone - case) / (alone - dense) of means over seeds, and its standard error over the seeds.

    Losses are in the order of the seeds, which are the same for all three. None where there is nothing to divide by; no
    error from a single seed. The error is that of a ratio of means: the spread of (alone - case) - ratio x (alone - dense).
    """
    if not len(alone) == len(dense) == len(case) or not case:
        return None, None
    gains = [a - d for a, d in zip(alone, dense, strict=True)]
    shares = [a - c for a, c in zip(alone, case, strict=True)]
    gain = statistics.fmean(gains)
    if gain <= 0:
        return None, None
    ratio = statistics.fmean(shares) / gain
    rest = [share - ratio * each for share, each in zip(shares, gains, strict=True)]
    return ratio, statistics.stdev(rest) / math.sqrt(len(rest)) / gain if len(rest) > 1 else None


def markdown(records: Sequence[Record]) -> str:
    """Return the table in Markdown."""
    heads, *rows = formatted(records, COLUMNS)
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _named(plan: ConvergePlan, name: str) -> Case:
    return next(case for case in plan.cases if case.name == name)


def _at_best(plan: ConvergePlan, case: Case, done: Mapping[tuple[str, float, int], Record]) -> list[Record]:
    """Return the runs of a case at its best rate, in the order of the seeds; empty if it diverged at all rates."""
    best = best_rate(plan.scores(case, done))
    return [] if best is None else [done[plan.run(case, best, seed).key] for seed in range(plan.seeds)]


def _losses(runs: Sequence[Record]) -> list[float]:
    """Return the test losses; none if a run diverged."""
    return [] if any(run["diverged"] for run in runs) else [run["test"] for run in runs]


def _describe(plan: ConvergePlan, case: Case, done: Mapping[tuple[str, float, int], Record], runs: list[Record]) -> Record:
    scores = plan.scores(case, done)
    rates = {f"{rate:g}": None if loss == math.inf else loss for rate, loss in scores.items()}
    record: dict[str, Any] = {"case": case.name, **case.definition(), "seeds": plan.seeds, "validation_by_rate": rates}
    if not _losses(runs):
        return {**record, "edge": "diverged"}
    means = {key: statistics.fmean(run[key] for run in runs) for key in ("bytes", "validation", "test", "train", "seconds")}
    losses = _losses(runs)
    error = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else None
    first = runs[0]
    curves = zip(*(run["validation_by_step"] for run in runs), strict=True)
    return {
        **record, "lr": first["lr"], "edge": "edge" if at_edge(scores) else "", **means, "test_error": error,
        "workers": first["workers"], "steps": first["steps"], "parameters": first["parameters"],
        "evaluated_by_step": [*first["evaluated_by_step"], first["steps"]],
        "validation_by_step": [*map(statistics.fmean, curves), means["validation"]],
    }  # fmt: skip
