"""docs/howto/choosing.md says what the records in docs/results say, and what it recommends is the best at its bytes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mpisparse.bench.converge.cases import ALONE, DENSE, read_cases

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "howto" / "choosing.md").read_text()
EDGE = "†"  # the best learning rate is the smallest or the largest tried
BASELINES = ("diloco", "sparseloco", "demo")
RESULTS = sorted(path.stem for path in (DOCS / "results").glob("*.toml"))


def records(name: str) -> dict[str, dict[str, Any]]:
    lines = (DOCS / "results" / f"{name}.jsonl").read_text().splitlines()
    return {record["case"]: record for record in map(json.loads, lines)}


def rows(name: str) -> dict[str, list[str]]:
    """Return the cells of a table, by case, from the one that follows the name of its records; the exchange comes first."""
    text = PAGE[PAGE.index(f"results/{name}.jsonl") :]
    table = re.search(r"(^\|.*\n)+", text, re.MULTILINE)
    assert table is not None
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.group(0).splitlines()[2:]]
    return {case.strip("`"): [exchange, *rest] for exchange, case, *rest in cells}


def recommended(name: str) -> set[str]:
    """Return the cases of a table whose exchange is in bold."""
    return {case for case, (exchange, *_) in rows(name).items() if exchange.startswith("**")}


@pytest.mark.parametrize("name", RESULTS)
def test_every_figure_is_that_of_the_record(name: str) -> None:
    found, table = records(name), rows(name)
    assert set(table) == set(found)
    for case, (_, size, loss, *share) in table.items():
        if found[case]["edge"] == "diverged":
            assert size == "diverged", case
            continue
        assert float(size) == pytest.approx(found[case]["bytes"], rel=0.02), case
        assert float(loss) == pytest.approx(found[case]["test"], abs=6e-4), case
        if case not in (ALONE, DENSE):
            assert float(share[0].split()[0]) == pytest.approx(found[case]["captured"], abs=6e-3), case
        assert (EDGE in table[case][-1]) == (found[case]["edge"] == "edge"), case


@pytest.mark.parametrize("name", RESULTS)
def test_the_cases_are_those_of_the_file_that_the_command_reads(name: str) -> None:
    cases = {case.name: json.loads(json.dumps(case.definition())) for case in read_cases(DOCS / "results" / f"{name}.toml")}
    found = records(name)
    assert set(cases) | {ALONE, DENSE} == set(found)
    for case, definition in cases.items():
        assert definition == {key: found[case][key] for key in definition}
    assert f"results/{name}.toml" in PAGE


@pytest.mark.parametrize("name", RESULTS)
def test_what_is_recommended_beats_one_worker_alone_in_every_run_and_the_baselines_at_no_more_bytes(name: str) -> None:
    found = records(name)
    ours = [found[case] for case in recommended(name)]
    theirs = [r for case, r in found.items() if case.startswith(BASELINES) and r["edge"] != "diverged"]
    assert len(ours) >= 2
    assert theirs
    for record in ours:
        assert record["beats_alone"] == record["seeds"], record["case"]
        near = [r for r in theirs if r["bytes"] <= 1.1 * record["bytes"] and r is not record]
        assert all(record["test"] < r["test"] for r in near), record["case"]


def test_the_runs_of_the_larger_gpt_are_those_of_its_table() -> None:
    """One seed: of each case the run with the least validation loss, marked if no larger or no smaller rate was tried."""
    runs = [json.loads(line) for line in (DOCS / "results" / "gpt-mini" / "runs.jsonl").read_text().splitlines()]
    cases = {
        case.name: json.loads(json.dumps(case.definition())) for case in read_cases(DOCS / "results/gpt-mini/cases.toml")
    }
    by_case = {name: [run for run in runs if run["case"] == name] for name in {run["case"] for run in runs}}
    best = {name: min(tried, key=lambda run: float(run["validation"])) for name, tried in by_case.items()}
    alone, dense = (best[name]["test"] for name in (ALONE, DENSE))
    table = rows("gpt-mini/runs")
    assert set(table) == set(best) == set(cases) | {ALONE, DENSE}
    for name, (_, rate, size, loss, share) in table.items():
        run, rates = best[name], [each["lr"] for each in by_case[name]]
        assert name in (ALONE, DENSE) or run["definition"] == cases[name]
        assert float(rate) == run["lr"], name
        assert float(size) == pytest.approx(run["bytes"], rel=0.02), name
        assert float(loss) == pytest.approx(run["test"], abs=6e-4), name
        if name not in (ALONE, DENSE):
            assert float(share.split()[0]) == pytest.approx((alone - run["test"]) / (alone - dense), abs=6e-3), name
        assert (EDGE in share) == (run["lr"] in (min(rates), max(rates))), name
