"""Phases and details are declared once, and those that are not declared show up all the same."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mpisparse
from mpisparse.comm.virtual import run_virtual
from mpisparse.measures import DETAILS, PHASES, PREDICTED, detail, details_in_order, in_order, phase
from mpisparse.runtime.metrics import finite, step_fields
from mpisparse.runtime.report import write
from mpisparse.runtime.report.phases import means_of
from mpisparse.runtime.report.read import read_runs

PACKAGE = Path(mpisparse.__file__).parent
NAMES = [each.name for each in PHASES]


def lapped() -> set[str]:
    """The names that the package's own code gives to Clock.lap."""
    calls = [
        node
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and "lap" in (getattr(node.func, "attr", ""), getattr(node.func, "id", ""))
    ]
    words = [word for call in calls for arg in call.args for word in ast.walk(arg)]
    return {word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)}


def test_every_phase_is_declared_and_every_declared_one_is_measured() -> None:
    assert sorted(lapped()) == sorted(NAMES)
    assert len({each.colour for each in PHASES}) == len(NAMES)


def details_of(scheme: str, steps: int, comm: Any = None) -> dict[str, float]:
    """Return what the last step of a scheme tells besides its statistics."""
    model = torch.nn.Linear(30, 20)
    sync = mpisparse.GradientSync(model, scheme=scheme, density=0.1, comm=comm, timeout=0)
    for step in range(steps):
        model.zero_grad()
        generator = torch.Generator().manual_seed(2 * step + sync.rank)
        model(torch.randn(4, 30, generator=generator)).square().mean().backward()
        sync.step()
    sync.close()
    return sync.stats.details


@pytest.mark.filterwarnings('ignore:scheme "predictive" without validation')
def test_every_detail_is_declared() -> None:
    chosen = run_virtual(2, lambda comm: details_of("auto", 6, comm))[0]
    known = {each.name for each in DETAILS}
    predicted = {name for name in chosen if name.startswith(PREDICTED)} - known  # one for each exchange
    assert details_of("predictive", 1).keys() | chosen.keys() - predicted == known - {"mirror_bytes"}  # of copies
    assert {"predicted_dense fp32", "predicted_dense int4"} < predicted
    assert {detail(name).kind for name in predicted} == {"seconds"}


def test_a_line_has_all_that_the_stats_say() -> None:
    details = {"share": np.float32(0.5), "odd": np.float32("nan")}
    stats = mpisparse.Stats(1, 0.1, 0.2, 7, 3.0, 100, 200, 0.0, {"reduce": 0.1}, details=details)  # type: ignore[arg-type]
    line = json.loads(json.dumps(finite(step_fields(stats, ["reduce"], np.array([[0.5, 100.0, 200.0, 90.0, 30.0, 0.1]])))))
    assert set(line) == {each.name for each in dataclasses.fields(stats)} - {"step", "speculation"} | {"loss"}
    assert line["details"] == {"share": 0.5, "odd": None}
    assert line["control_bytes"] == {"min": 30.0, "mean": 30.0, "max": 30.0}
    assert line["seconds"] == {"reduce": {"min": 0.1, "mean": 0.1, "max": 0.1}}


def test_an_unknown_name_speaks_for_itself() -> None:
    assert phase("sort") != phase("merge")
    assert phase("sort") == phase("sort")
    assert phase("sort").exchange
    assert phase("sort").colour.startswith("hsl(")
    assert (detail("lost_and_found").label, detail("lost_and_found").kind) == ("Lost and found", "number")
    assert detail("").label == ""


def test_order() -> None:
    assert in_order(reversed(NAMES)) == NAMES
    assert in_order(["compute", "zip", "reduce", "data", "apply", "wait"]) == [
        "wait", "reduce", "apply", "zip", "data", "compute",
    ]  # fmt: skip
    assert details_in_order(["b", "k_scale", "a", "ranking"]) == ["ranking", "k_scale", "a", "b"]


def test_the_page_shows_names_of_any_kind(tmp_path: Path) -> None:
    lines = [{"kind": "step", "step": 1, "time": 0.1, "loss": 1.0, "seconds": {"compute": 0.3}}]
    odd = '<b class="x">'
    seconds = {"compute": 0.1, odd: 0.2}
    lines.append(
        {"kind": "step", "step": 2, "time": 0.2, "loss": 1.0, "seconds": seconds, "details": {odd: 3, "text": "no"}}
    )
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run,) = read_runs([tmp_path])
    assert (run.phases, run.details) == (["compute", odd], [odd])
    means = means_of(run)
    assert means[odd] == pytest.approx(0.1), "a step before the first that has a phase has none of it"
    assert means["compute"] == pytest.approx(0.2)
    page = write([tmp_path]).read_text()
    assert odd not in page
    assert json.dumps(odd).replace("<", r"\u003c").replace(">", r"\u003e") in page
