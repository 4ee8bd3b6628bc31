"""Benchmarks and runs as a user starts them: those that end badly on one rank, and those on one rank or on several in turn.

tests/parallel/test_bench.py has the others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpisparse.runtime.cli import main

MPIRUN = Path(sys.executable).with_name("mpirun")

pytestmark = pytest.mark.skipif(not MPIRUN.exists(), reason=f"there is no mpirun beside {sys.executable}")


def job(*words: object) -> None:
    """Run `mpisparse` on two ranks; fails with what it prints if it does not end well."""
    settings = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_mpi_yield_when_idle": "1",
        "MPISPARSE_PROGRESS": "plain",
    }  # fmt: skip
    command = [str(MPIRUN), "-n", "2", sys.executable, "-m", "mpisparse.runtime.cli", *map(str, words)]
    ended = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=900, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


FACTORIES = """
import torch

def model(sizes):
    return torch.nn.Linear(4, 2)

def model_bad(sizes):
    from mpi4py import MPI
    if MPI.COMM_WORLD.rank == 1:
        raise OSError("no such file on this rank")
    return model(sizes)

def data():
    inputs = torch.randn(200, 4, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())
    return data, data
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "benched.py").write_text(FACTORIES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MPISPARSE_PROGRESS", "plain")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("benched", None)


TRAIN = ("train", "--model", "benched:model", "--data", "benched:data")


def train(*words: object) -> None:
    """Train on one rank, in this process."""
    assert main([str(word) for word in (*TRAIN, *words)]) == 0


def test_a_factory_that_fails_on_one_rank_ends_the_bench(factories: Path) -> None:
    bad = ("--models", "benched:model_bad=benched:data", "--cases", "dense", "--seeds", 1, "--steps", 2)
    with pytest.raises(AssertionError, match="no such file on this rank"):
        job("bench", "train", *bad, "--out", factories / "runs")


def test_epochs_are_epochs_on_another_number_of_ranks(factories: Path) -> None:
    out = factories / "run"
    train("--batch-size", 8, "--epochs", 2, "--out", out)
    job(*TRAIN, "--batch-size", 8, "--epochs", 4, "--out", out)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    epochs = [line["epoch"] for line in lines if line["kind"] == "step"]
    assert [epochs.count(e) for e in range(5)] == [22, 22, 11, 11, 0], "of the 180 examples that are not held out"


def test_accumulation_fills_epochs(factories: Path) -> None:
    train("--batch-size", 8, "--accumulation", 13, "--epochs", 3, "--out", factories / "run")
    lines = [json.loads(line) for line in (factories / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines if line["kind"] == "step"] == [0, 1, 2]


def test_a_run_begun_from_another_goes_on_from_its_own_checkpoints(factories: Path) -> None:
    one, two = factories / "one", factories / "two"
    train("--steps", 5, "--out", one)
    train("--steps", 10, "--resume", one, "--out", two)
    train("--steps", 12, "--resume", one, "--out", two)
    lines = [json.loads(line) for line in (two / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(6, 13))


def test_a_target_may_be_raised(factories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = factories / "run"
    train("--steps", 4, "--eval-every", 1, "--target", 0.01, "--out", out)
    assert "target 0.01 reached" in capsys.readouterr().out
    train("--steps", 4, "--eval-every", 1, "--target", 1.5, "--out", out)
    assert "reached" not in capsys.readouterr().out
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2, 3, 4]


def test_groups_of_the_ablation_are_those_of_the_command_line() -> None:
    from mpisparse.bench import parsers
    from mpisparse.bench.ablation import GROUPS

    assert tuple(GROUPS) == parsers.GROUPS


def test_ddp_whose_records_cannot_be_written_ends(tmp_path: Path) -> None:
    config = tmp_path / "ddp.toml"
    config.write_text('model = "digits-cnn"\nsteps = 4\nbatch_size = 4\n')
    with pytest.raises(AssertionError, match="expected a file that can be written"):
        job("bench", "ddp", "--config", config, "--cases", "dense", "--out", config / "no")
