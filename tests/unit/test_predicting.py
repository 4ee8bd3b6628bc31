"""docs/results/predicting.md says what its records say, of the cases that its command runs."""

from __future__ import annotations

import json
from pathlib import Path

from mpisparse.bench.converge.cases import read_cases

RESULTS = Path(__file__).parents[2] / "docs" / "results"
RECORDS = [json.loads(line) for line in (RESULTS / "predicting" / "gpt-nano.jsonl").read_text().splitlines()]


def test_every_figure_is_that_of_the_record() -> None:
    page = (RESULTS / "predicting.md").read_text()
    for record in RECORDS:
        losses = f"{record['lr']:g} | {record['validation']:.3f} | {record['test']:.3f}"
        assert f"| `{record['case']}` | {record['bytes']:.3g} | {losses} |" in page
        assert not record["edge"]
        if record["case"] not in ("alone", "dense"):
            assert f"| {record['captured']:.2f} ± {record['captured_error']:.2f} |" in page


def test_the_cases_are_those_of_the_file_that_the_command_reads() -> None:
    cases = {case.name: json.loads(json.dumps(case.definition())) for case in read_cases(RESULTS / "predicting/cases.toml")}
    found = {record["case"]: record for record in RECORDS}
    assert set(cases) | {"alone", "dense"} == set(found)
    for name, definition in cases.items():
        assert definition == {key: found[name][key] for key in definition}
