"""`mpisparse train` with a scheme and a codec from outside the package: metrics, report, resume, inspect, refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TINY = """
import torch
from torch.utils.data import TensorDataset

def model():
    return torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))

def data():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(160, 12, generator=draw)
    both = TensorDataset(x, x[:, :4].argmax(1))
    return both, both
"""
TRAIN = ["train", "--model", "tiny:model", "--data", "tiny:data", "--batch-size", "8", "--density", "0.1", "--out", "run"]
MINE = ["--import", "outside.registered", "--scheme", "census", "--codec", "upper16"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a workload, and a run of ten steps in two parts."""
    home = tmp_path_factory.mktemp("outside")
    (home / "tiny.py").write_text(TINY)
    for steps in ("6", "10"):
        done = mpisparse(home, *TRAIN, *MINE, "--option", "share=0.25", "--steps", steps)
        assert done.returncode == 0, done.stderr
    return home


def mpisparse(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mpisparse", *words]
    return subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=600)


def test_metrics_have_its_phase_and_its_detail(home: Path) -> None:
    lines = [json.loads(line) for line in (home / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, 11))
    assert all(line["seconds"]["head_count"]["max"] > 0 for line in steps)
    assert [line["details"]["waiting_elements"] > 0 for line in steps] == [False] + 9 * [True]
    assert "probe" not in steps[0]["seconds"], "a phase that this scheme does not have"


def test_the_report_shows_them(home: Path) -> None:
    done = mpisparse(home, "report", "run")
    assert done.returncode == 0, done.stderr
    page = (home / "run" / "report.html").read_text()
    assert "<b>Waiting elements</b>" in page
    key = page.partition('class="phases">')[2].partition("</p>")[0]
    assert ">head_count</span>" in key
    assert key.index(">reduce<") < key.index(">head_count<") < key.index(">compute<")
    assert 'data-name="head_count" style="--c:hsl(' in page


def test_settings_say_where_it_comes_from(home: Path) -> None:
    config = (home / "run" / "config.toml").read_text()
    assert 'imports = ["outside.registered"]' in config
    done = mpisparse(home, "train", "--config", "run/config.toml", "--out", "again", "--steps", "1")
    assert done.returncode == 0, done.stderr


def test_a_checkpoint_can_be_inspected(home: Path) -> None:
    done = mpisparse(home, "inspect", "run", "--verify", "--import", "outside.registered")
    assert (done.returncode, "DAMAGED" in done.stdout) == (0, False), done.stdout + done.stderr
    assert "census on 1 ranks" in done.stdout
    assert "all verified" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--scheme", "census"], "unknown scheme 'census'; "),
        ([*MINE, "--option", "shere=1"], "unknown option 'shere' for scheme \"census\"; choose from: accumulate, "),
        ([*MINE, "--codec", "upper17"], "unknown codec 'upper17'; did you mean 'upper16'?"),
        (["--import", "outside.nothing"], "imports: tried to import 'outside.nothing', but there is no module"),
        (["--import", "outside/registered.py"], "imports: expected the name of a module, package.module, got"),
    ],
)
def test_refusals(home: Path, words: list[str], said: str) -> None:
    done = mpisparse(home, *TRAIN, *words, "--steps", "1", "--resume", "never")
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
