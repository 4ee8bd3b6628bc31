"""docs/results/predicting.md says what its records say, of the cases that its commands run."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from mpisparse.bench.converge.cases import read_cases

RESULTS = Path(__file__).parents[2] / "docs" / "results"
CASES = {"gpt-nano": "cases.toml", "resnet20": "resnet20.toml"}


def records(model: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / "predicting" / f"{model}.jsonl").read_text().splitlines()]


def part(model: str) -> str:
    """The page's section about a model."""
    sections = (RESULTS / "predicting.md").read_text().split("\n## ")
    return next(section for section in sections if section.startswith(model))


@pytest.mark.parametrize("model", CASES)
def test_every_figure_is_that_of_the_record(model: str) -> None:
    section = part(model)
    for record in records(model):
        losses = f"{record['lr']:g} | {record['validation']:.3f} | {record['test']:.3f}"
        assert f"| `{record['case']}` | {record['bytes']:.3g} | {losses} |" in section
        assert not record["edge"]
        assert record["seeds"] == 2
        if record["case"] not in ("alone", "dense"):
            assert f"| {record['captured']:.2f} ± {record['captured_error']:.2f} |" in section


@pytest.mark.parametrize("model", CASES)
def test_the_cases_are_those_of_the_file_that_the_command_reads(model: str) -> None:
    file = RESULTS / "predicting" / CASES[model]
    cases = {case.name: json.loads(json.dumps(case.definition())) for case in read_cases(file)}
    found = {record["case"]: record for record in records(model)}
    assert set(cases) | {"alone", "dense"} == set(found)
    for name, definition in cases.items():
        assert definition == {key: found[name][key] for key in definition}


def mean(values: list[float]) -> str:
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values) / math.sqrt(len(values)):.3f}"


def test_four_seeds() -> None:
    """Means of the runs, and what prediction lost on the same seeds."""
    section, runs = part("resnet20"), dict[str, dict[int, dict[str, Any]]]()
    for run in records("resnet20-seeds"):
        runs.setdefault(run["case"], {})[run["seed"]] = run
    own, gradients = "drift-0.0107-own-predicted", "exdyna-0.0075-int8-predicted"
    against = {"drift-0.0107-own": own, "exdyna-0.01-int8": gradients, "exdyna-0.0108-int8": gradients}
    assert set(runs) == {*against, own, gradients}
    for case, of in runs.items():
        assert sorted(of) == [0, 1, 2, 3]
        lost = mean([runs[against[case]][seed]["test"] - of[seed]["test"] for seed in of]) if case in against else ""
        received = f"{statistics.fmean(run['bytes'] for run in of.values()):.3g}"
        assert f"| `{case}` | {received} | {mean([run['test'] for run in of.values()])} | {lost} |" in section


def test_how_well_nets_ranked() -> None:
    """Of the lessons but the first, before which nets know nothing."""
    section, lessons = part("Why"), records("rankings")
    assert len(lessons) == 6
    for lesson in lessons:
        record = next(record for record in records(lesson["model"]) if record["case"] == lesson["case"])
        assert lesson["lr"] == record["lr"]
        ranked = " | ".join(f"{statistics.fmean(lesson[key][1:]):.2f}" for key in ("ranking", "ranking_by_magnitude"))
        captured = f"{record['captured']:.2f} ± {record['captured_error']:.2f}"
        assert re.search(rf"\| {lesson['model']} \| [^|]* \| {re.escape(f'{ranked} | {captured}')} \|", section)
