"""Drift's rate "auto" is what the grid in docs/results/drift-rate supports, and the page says what the records say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpisparse.schemes.drift.options import Drift

RESULTS = Path(__file__).parents[2] / "docs" / "results"
GRIDS = sorted(path.stem for path in (RESULTS / "drift-rate").glob("*.jsonl"))


def cases(grid: str) -> dict[float, dict[str, Any]]:
    """Return the records of a grid by their rate."""
    lines = (RESULTS / "drift-rate" / f"{grid}.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["case"].startswith("rate-")]
    return {record["options"]["rate"]: record for record in records}


@pytest.mark.parametrize("grid", GRIDS)
def test_auto_is_better_than_rate_1_where_the_learning_rate_was_tuned(grid: str) -> None:
    found = cases(grid)
    auto = Drift().factor(int(grid.rsplit("-", 1)[1]))
    ours = next(record for rate, record in found.items() if rate == pytest.approx(auto, abs=0.01))
    assert not any(record["edge"] for record in found.values())
    assert ours["validation"] < found[1]["validation"]


@pytest.mark.parametrize("grid", GRIDS)
def test_the_page_has_every_figure_of_the_grid(grid: str) -> None:
    model, workers = grid.rsplit("-", 1)
    page = (RESULTS / "drift-rate.md").read_text()
    for rate, r in cases(grid).items():
        share = f"{r['captured']:.2f} ± {r['captured_error']:.2f}"
        figures = f"{rate:g} | {r['lr']:g} | {r['validation']:.3f} | {r['test']:.3f} | {share}"
        assert f"| {model} | {workers} | {figures} |" in page


def test_auto_is_1_where_whole_groups_or_all_elements_are_exchanged() -> None:
    assert Drift(by="groups", density=0.17).factor(4) == Drift(density=1.0).factor(4) == 1.0
    assert Drift().factor(1) == 1.0
    assert Drift(rate=1.5).factor(4) == 1.5
