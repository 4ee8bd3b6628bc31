"""`mpisparse train` with a scheme and a codec from outside the package: metrics, report, resume, inspect, refusals.

Starting Python and torch takes longer than all that these commands do, so a process runs several of them. The first command
that needs what is outside shows how it gets there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).parents[1]
WORKLOAD = """
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
IN_TURN = """
import contextlib, io, json, sys
from mpisparse.runtime.cli import main
ended = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(words)
    ended.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(ended))
"""
TRAIN = ["train", "--model", "workload:model", "--data", "workload:data", "--batch-size", "8", "--density", "0.1"]
TRAIN += ["--out", "run"]
MINE = ["--import", "outside.registered", "--scheme", "census", "--codec", "upper16"]
RUN = [*TRAIN, *MINE, "--option", "share=0.25", "--steps"]
REFUSED = [*TRAIN, "--steps", "1", "--resume", "never"]


class Ended(NamedTuple):
    """A command that has ended: its exit code and what it printed."""

    code: int
    out: str
    err: str


def mpisparse(home: Path, *commands: list[str]) -> list[Ended]:
    """Run commands in a fresh process, one after the other."""
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}:{home}", "OMP_NUM_THREADS": "1", "MPISPARSE_PROGRESS": "plain"}
    command = [sys.executable, "-c", IN_TURN, json.dumps(commands)]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return [Ended(*each) for each in json.loads(done.stdout.splitlines()[-1])]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a workload."""
    home = tmp_path_factory.mktemp("outside")
    (home / "workload.py").write_text(WORKLOAD)
    return home


def test_runs_and_what_shows_them(home: Path) -> None:
    """Ten steps in two processes; each reads them in its own way."""
    unknown, *wrong_modules, first, wrong_option, wrong_codec = mpisparse(
        home,
        [*REFUSED, "--scheme", "census"],
        [*REFUSED, "--import", "outside.nothing"],
        [*REFUSED, "--import", "outside/registered.py"],
        [*RUN, "6"],
        [*REFUSED, *MINE, "--option", "shere=1"],
        [*REFUSED, *MINE, "--codec", "upper17"],
    )
    assert first.code == 0, first.err
    for refused, said in (
        (unknown, "unknown scheme 'census'; "),
        (wrong_modules[0], "imports: tried to import 'outside.nothing', but there is no module"),
        (wrong_modules[1], "imports: expected the name of a module, package.module, got"),
        (wrong_option, "unknown option 'shere' for scheme \"census\"; choose from: accumulate, "),
        (wrong_codec, "unknown codec 'upper17'; did you mean 'upper16'?"),
    ):
        assert refused.code == 2
        assert said in refused.err
        assert "Traceback" not in refused.err

    inspected, second = mpisparse(home, ["inspect", "run", "--verify", "--import", "outside.registered"], [*RUN, "10"])
    assert (inspected.code, "DAMAGED" in inspected.out) == (0, False), inspected
    assert "census on 1 ranks" in inspected.out
    assert "all verified" in inspected.out
    assert second.code == 0, second.err
    assert_metrics_have_its_phase_and_its_detail(home / "run")

    assert 'imports = ["outside.registered"]' in (home / "run" / "config.toml").read_text()
    report, again = mpisparse(
        home, ["report", "run"], ["train", "--config", "run/config.toml", "--out", "again", "--steps", "1"]
    )
    assert report.code == 0, report.err
    assert_the_report_shows_them(home / "run" / "report.html")
    assert again.code == 0, again.err


def assert_metrics_have_its_phase_and_its_detail(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, 11))
    assert all(line["seconds"]["head_count"]["max"] > 0 for line in steps)
    assert [line["details"]["waiting_elements"] > 0 for line in steps] == [False] + 9 * [True]
    assert "probe" not in steps[0]["seconds"], "a phase that this scheme does not have"


def assert_the_report_shows_them(file: Path) -> None:
    page = file.read_text()
    assert "<b>Waiting elements</b>" in page
    key = page.partition('class="phases">')[2].partition("</p>")[0]
    assert ">head_count</span>" in key
    assert key.index(">reduce<") < key.index(">head_count<") < key.index(">compute<")
    assert "hsl(" in page.partition('"head_count"')[2][:400], "its colour, in the block of JSON"
