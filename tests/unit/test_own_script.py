"""A user's own loop: checkpoint.every and should_stop, in one process and in jobs that are signalled and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpisparse
from mpisparse import checkpoint
from mpisparse.checkpoint import store
from mpisparse.comm import stop_together
from mpisparse.errors import CheckpointError, ConfigurationError

TIMEOUT = 900.0  # seconds, for a job that takes a few


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Listen anew in each test, and restore the handlers after it; there is no Slurm job."""
    for name in ("SLURM_JOB_ID", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    monkeypatch.setattr(stop_together, "_listener", None)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


class Loop:
    """A model that trains on one rank."""

    def __init__(self, directory: Path, **options: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.2), nn.Linear(9, 3))
        self.sync = mpisparse.GradientSync(self.model, density=0.1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        mpisparse.attach(self.optimizer, self.sync)
        self.saves = checkpoint.every(directory, model=self.model, optimizer=self.optimizer, sync=self.sync, **options)

    def train(self, total: int, signalled_at: int = -1) -> list[float]:
        for step in range(self.saves.step, total):
            self.optimizer.zero_grad()
            self.model(torch.randn(5, 6)).square().mean().backward()
            self.optimizer.step()
            if step == signalled_at:
                os.kill(os.getpid(), signal.SIGUSR1)
            self.saves.step_done()
        self.saves.finish()
        self.sync.close()
        return [float(p.detach().double().sum()) for p in self.model.parameters()]


def found(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in store.found(directory))


def test_checkpoints_come_every_so_many_steps_and_at_the_end(tmp_path: Path) -> None:
    Loop(tmp_path / "all", steps=3, keep=None).train(8)
    assert found(tmp_path / "all") == [3, 6, 8]
    Loop(tmp_path / "two", steps=2).train(8)
    assert found(tmp_path / "two") == [6, 8]
    Loop(tmp_path / "none").train(8)
    assert found(tmp_path / "none") == [8], "no interval: one at the end"
    Loop(tmp_path / "seconds", seconds=1e-9, keep=None).train(3)
    assert found(tmp_path / "seconds") == [1, 2, 3]
    Loop(tmp_path / "later", seconds=1e9).train(3)
    assert found(tmp_path / "later") == [3]


def test_a_loop_that_was_stopped_goes_on_to_the_same_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = Loop(tmp_path / "whole").train(9)
    stopped = Loop(tmp_path / "stopped", steps=100)
    stopped.saves.extra["best"] = 0.25
    with pytest.raises(SystemExit) as left:
        stopped.train(9, signalled_at=4)
    stopped.sync.close()
    assert left.value.code == 85
    assert found(tmp_path / "stopped") == [5]
    assert "mpisparse: asked to stop; start the same command again to continue from step 5" in capsys.readouterr().err
    stop_together._listener = None
    again = Loop(tmp_path / "stopped", steps=100)
    assert again.saves.step == 5
    assert again.saves.extra == {"best": 0.25}
    assert f"mpisparse: continues from step 5, {tmp_path / 'stopped'}" in capsys.readouterr().err
    assert again.train(9) == expected
    finished = Loop(tmp_path / "stopped", steps=100)
    assert finished.saves.step == 9
    assert finished.train(9) == expected, "nothing is left to do"


def test_should_stop_hears_signals_and_stays(tmp_path: Path) -> None:
    assert not mpisparse.should_stop()
    os.kill(os.getpid(), signal.SIGTERM)
    assert mpisparse.should_stop()
    assert mpisparse.should_stop()
    loop = Loop(tmp_path)
    assert mpisparse.should_stop(loop.sync), "of the same process"
    loop.sync.close()


def test_after_the_death_of_rank_0_another_watches_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() - 1))
    listener = stop_together.listen()
    assert not listener.asked(1, 60.0), "rank 0 does that"
    assert not listener.asked(0, 0.0), "nobody is to watch it"
    assert listener.asked(0, 60.0), "rank 0 has died, and this rank has its number"
    assert not listener.asked(0, 0.0), "who asks does not want that"
    assert listener.asked(0, 60.0)


def test_the_end_of_a_job_stops_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 1e6))
    assert not mpisparse.should_stop()
    monkeypatch.setattr(stop_together, "_listener", None)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() - 1))
    assert not mpisparse.should_stop(stop_before=0), "then the clock is not watched"
    monkeypatch.setattr(stop_together, "_listener", None)
    loop = Loop(tmp_path)
    with pytest.raises(SystemExit):
        loop.train(5)
    loop.sync.close()
    assert found(tmp_path) == [1]
    assert stop_together.listen().why == "the job's time limit is near"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"steps": 0}, "steps must be a whole number >= 1, or None, got 0"),
        ({"steps": 2.5}, "steps must be a whole number"),
        ({"steps": True}, "steps must be a whole number"),
        ({"seconds": 0}, "seconds must be a number above 0, got 0"),
        ({"seconds": float("nan")}, "seconds must be a number above 0, got nan"),
        ({"seconds": "60"}, "seconds must be a number above 0, got '60'"),
        ({"stop_before": -1}, "stop_before must be a number 0 or more, got -1"),
        ({"stop_before": None}, "stop_before must be a number"),
    ],
)
def test_refused(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(ConfigurationError, match=says):
        checkpoint.every(tmp_path, model=nn.Linear(2, 2), **options)
    assert signal.getsignal(signal.SIGUSR1) == before
    assert not list(tmp_path.iterdir())


def test_another_model_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, step=1, model=nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match="is of another model"):
        checkpoint.every(tmp_path, model=nn.Linear(3, 2))


def test_signals_need_the_main_thread(tmp_path: Path) -> None:
    errors: list[Exception] = []

    def call() -> None:
        try:
            checkpoint.every(tmp_path, model=nn.Linear(2, 2))
        except ConfigurationError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "only a program's main thread can listen to signals" in str(errors[0])


def test_a_checkpoint_that_fails_warns_and_the_last_one_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = checkpoint.every(tmp_path, model=nn.Linear(2, 2), steps=1)
    saves.step_done()
    monkeypatch.setattr(store, "complete", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.warns(UserWarning, match="No space left"):
        saves.step_done()
    with pytest.raises(CheckpointError, match="No space left"):
        saves.finish()
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(CheckpointError, match="No space left"):
        saves.step_done()
    assert found(tmp_path) == [1]


def test_a_full_disk_is_not_tried_in_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = checkpoint.every(tmp_path, model=nn.Linear(2, 2), seconds=1000.0)
    monkeypatch.setattr(store, "complete", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    saves._last -= 2000.0
    with pytest.warns(UserWarning, match="No space left"):
        saves.step_done()
    saves.step_done()  # filterwarnings: a warning would be an error


# Jobs

SCRIPT = """
import os, signal, sys
import torch
import mpisparse

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 4))
sync = mpisparse.GradientSync(model, density=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
mpisparse.attach(optimizer, sync)
torch.manual_seed(sync.rank)
saves = mpisparse.checkpoint.every(sys.argv[1], steps=4, model=model, optimizer=optimizer, sync=sync)
began = saves.step
for step in range(saves.step, 12):
    optimizer.zero_grad()
    model(torch.randn(6, 12)).square().mean().backward()
    optimizer.step()
    if step == 6 and began == 0 and len(sys.argv) > 2 and sync.rank == sync.size - 1:
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))
    saves.step_done()
saves.finish()
"""


def job(script: Path, *words: object, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    mpirun = Path(sys.executable).with_name("mpirun")
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    allowed |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_mpi_yield_when_idle": "1"}
    return subprocess.run(
        [mpirun, "-n", str(ranks), sys.executable, script, *map(str, words)],
        env={**os.environ, **allowed}, capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip


def test_a_job_of_several_ranks_stops_together_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT)
    whole = job(script, tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    stopped = job(script, tmp_path / "stopped", "SIGUSR1")  # one rank is asked
    assert stopped.returncode == 85, stopped.stdout + stopped.stderr
    assert found(tmp_path / "stopped") == [4, 7]
    again = job(script, tmp_path / "stopped", "SIGUSR1")
    assert again.returncode == 0, again.stderr
    assert "continues from step 7" in again.stderr
    for name in ("whole", "stopped"):
        checkpoint.export(tmp_path / name, tmp_path / f"{name}.pt")
    models = [torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "stopped")]
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
