"""Checkpoints of one file for all ranks, written by a real parallel HDF5 and read with the usual h5py."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import ENVIRONMENT

from mpisparse.checkpoint import h5file, store

Command = Callable[..., list[str]]
SUITE = Path(__file__).parents[1] / "parallel"
TIMEOUT = 1800.0
STEPS = 16
SETTINGS = ["--model", "tiny:model", "--data", "tiny:data", "--batch-size", "4", "--density", "0.05", "--eval-every", "100"]
TINY = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))

def data():
    inputs = torch.randn(640, 12, generator=torch.Generator().manual_seed(1))
    whole = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1))
    return whole, whole
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "tiny.py").write_text(TINY)
    return tmp_path


def run(home: Path, words: list[str], **environment: str) -> str:
    """Run a command to its end; returns its output."""
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(home), **environment}
    ended = subprocess.run(
        words, cwd=home, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-5000:]
    return ended.stdout


def train(out: str, steps: int, *more: str) -> list[str]:
    return ["-m", "mpisparse.runtime.cli", "train", *SETTINGS, "--out", out, "--steps", str(steps), *more]


def last(run: Path) -> tuple[store.Manifest, dict[str, Any]]:
    """Return the newest checkpoint's manifest and the bytes of its arrays by part and name, all verified."""
    path = store.found(run / "checkpoints")[0]
    manifest = store.read_manifest(path)
    content = {}
    for record in manifest.files:
        arrays, _ = h5file.read_file(path / record.name, record)
        content |= {f"{Path(record.name).stem}/{name}": (a.dtype, a.tobytes()) for name, a in arrays.items()}
    return manifest, content


def test_written_by_all_at_once_and_resumed_without_mpi_in_h5py_to_the_last_bit(home: Path, command: Command) -> None:
    run(home, command(2, *train("whole", STEPS, "--driver", "mpio", "--checkpoint-every", "6")))
    one, whole = last(home / "whole")
    assert {Path(r.name).parent.name for r in one.files} == {"all.h5"}
    assert (one.step, one.ranks) == (STEPS, 2)
    assert any(kind == np.float32 for kind, _ in whole.values())
    first = Path("checkpoints") / store.name_of(12)
    shutil.copytree(home / "whole" / first, home / "parts" / first)

    assert not h5py.get_config().mpi, "this h5py is to be one without MPI"
    here = [str(Path(sys.executable).with_name("mpirun")), "-n", "2", sys.executable]
    told = run(home, [*here, *train("parts", STEPS)], PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe")
    assert "r0 | resume: 2 ranks" in told
    files, parts = last(home / "parts")
    assert {Path(r.name).parent.name for r in files.files} == {""}
    assert parts == whole


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_that_holds_for_checkpoints_on_ranks(home: Path, command: Command, ranks: int) -> None:
    words = command(ranks, "-m", "pytest", "--with-mpi", str(SUITE / "test_checkpoint.py"), "-q", "--color=no")
    told = run(home, words, MPISPARSE_TEST_DRIVER="mpio")
    assert "[100%]" in told


def step_of(run: Path) -> int:
    found = store.found(run / "checkpoints")
    return int(found[0].name.removeprefix("step-")) if found else 0


def unfinished(run: Path) -> bool:
    return any((run / "checkpoints").glob(f"{store.UNFINISHED}*"))


def wait_until(condition: Callable[[], bool], job: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert job.poll() is None, "the job ended before it was killed"
        assert time.monotonic() < deadline, "nothing happens"
        time.sleep(0.001)


@pytest.mark.slow
def test_killed_at_any_moment_and_resumed_gives_the_same_bits(home: Path, command: Command) -> None:
    steps, draw, halves = 30, random.Random(5), 0
    run(home, command(2, *train("whole", steps)))
    words = command(2, *train("parts", steps, "--driver", "mpio", "--checkpoint-every", "1"))
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(home)}
    out = home / "parts"
    for inside in (True, False, True):
        begun = step_of(out)
        job = subprocess.Popen(words, cwd=home, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda begun=begun: step_of(out) > begun, job)
        time.sleep(draw.uniform(0.0, 0.05))
        if inside:
            wait_until(lambda: unfinished(out), job)
        ranks = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        assert len(ranks) == 2
        for pid in [*map(int, ranks), job.pid]:
            os.kill(pid, signal.SIGKILL)
        job.wait()
        halves += unfinished(out)
    assert halves > 0, "no kill fell into a checkpoint"
    run(home, words)
    assert not unfinished(out)
    assert last(out)[1] == last(home / "whole")[1]
