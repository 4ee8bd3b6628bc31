"""bench converge --stability: how many runs diverge at each learning rate."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from mpisparse.runtime.cli import main

MODEL = """
import torch

def model(sizes):
    return torch.nn.Linear(6, 3)

def data():
    inputs = torch.randn(400, 6, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))
    return data, data
"""
SMALL = (
    "bench", "converge", "--model", "steady:model", "--data", "steady:data", "--steps", "12", "--warmup", "2",
    "--batch-size", "4", "--workers", "2", "--seeds", "2", "--case", "few: scheme=topk density=0.2",
)  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "steady.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_stability_runs_every_seed_at_every_rate(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And counts what diverges; what is there already is not run again."""
    words = [*SMALL, "--stability", "--rates", "3", "--lr", "1", "--lr-factor", "1000", "--out", "out", "--json"]
    assert main(words) == 0
    said = capsys.readouterr()
    records = {(r["case"], r["lr"]): r for r in map(json.loads, said.out.splitlines())}
    assert [*records] == list(itertools.product(("alone", "dense", "few"), (0.001, 1.0, 1000.0)))
    assert all(r["runs"] == 2 for r in records.values())
    for case in ("alone", "dense", "few"):
        assert [records[case, rate]["diverged"] for rate in (0.001, 1000.0)] == [0, 2]
        assert [records[case, rate]["stuck"] for rate in (0.001, 1000.0)] == [2, 0]
        assert records[case, 0.001]["validation"] <= records[case, 0.001]["worst"]
        assert "validation" not in records[case, 1000.0]
    assert said.err.count("runs done") == 3 * 3 * 2
    assert [records["dense", 1.0][name] for name in ("diverged", "stuck")] == [0, 0]
    table = (home / "out" / "table.md").read_text()
    assert "| dense | 0 | " in table
    assert "| 2 |" in table
    runs = sorted((home / "out" / "runs").iterdir())
    runs[0].unlink()
    assert main(words) == 0
    again = capsys.readouterr()
    assert again.err.count("runs done") == 1
    assert again.out == said.out
