"""How many runs of each case diverge at each learning rate: what bench converge --stability says of its runs.

A run may also be stuck: its loss stays near that of the beginning, as where all units of a layer have died.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mpisparse.bench.converge.plan import ConvergePlan, Record
from mpisparse.runtime.table import formatted

STUCK = 0.9  # a run whose validation loss ends above so much of that of the beginning has learnt next to nothing
COLUMNS = {
    "case": "",
    "lr": ".4g",
    "runs": "d",
    "diverged": "d",
    "stuck": "d",
    "validation": ".4f",
    "worst": ".4f",
    "bytes": ".4g",
}


def summary(plan: ConvergePlan, done: Mapping[tuple[str, float, int], Record]) -> list[Record]:
    """Return a record for each case at each learning rate; losses are of the runs that did not diverge."""
    return [_record(plan, case, rate, done) for case in plan.cases for rate in plan.grid.start()]


def _record(plan: ConvergePlan, case: Any, rate: float, done: Mapping[tuple[str, float, int], Record]) -> Record:
    runs = [done[plan.run(case, rate, seed).key] for seed in range(plan.seeds)]
    ended = [run for run in runs if not run["diverged"]]
    losses = [run["validation"] for run in ended]
    stuck = sum(run["validation"] > STUCK * run["validation_by_step"][0] for run in ended)
    told = {"validation": statistics.fmean(losses), "worst": max(losses)} if losses else {}
    first = {key: runs[0][key] for key in ("workers", "parameters")}
    return {
        "case": case.name, **case.definition(), "lr": rate, "runs": len(runs), "diverged": len(runs) - len(losses),
        "stuck": stuck, **told, "bytes": statistics.fmean(run["bytes"] for run in runs), "steps": plan.settings.steps,
        **first,
    }  # fmt: skip


def markdown(records: Sequence[Record]) -> str:
    """Return tables with a row for each case and a column for each rate: runs that diverged, that are stuck, and losses."""
    rates = list(dict.fromkeys(record["lr"] for record in records))
    names = list(dict.fromkeys(record["case"] for record in records))
    found = {(record["case"], record["lr"]): record for record in records}
    tables = []
    for key, form in (("diverged", "d"), ("stuck", "d"), ("validation", ".3f")):
        columns = {"case": ""} | {f"{rate:g}": form for rate in rates}
        rows = [{"case": name} | {f"{rate:g}": found[name, rate].get(key) for rate in rates} for name in names]
        heads, *cells = formatted(rows, columns)
        lines = [heads, ["---"] * len(heads), *cells]
        tables.append("".join(f"| {' | '.join(line)} |\n" for line in lines))
    return "\n".join(tables)
