"""Loops of users on several ranks: all stop at the step at which one was asked to, and raise together what one got wrong."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from mpi4py import MPI
from ranks import everywhere, raised
from torch import nn

import mpisparse
from mpisparse import checkpoint
from mpisparse.checkpoint import store
from mpisparse.comm import stop_together

pytestmark = pytest.mark.mpi


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    monkeypatch.setattr(stop_together, "_listener", None)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_one_rank_is_asked_and_all_stop(comm: MPI.Intracomm) -> None:
    before = mpisparse.should_stop()
    if comm.rank == comm.size - 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    assert everywhere(comm, not before)
    assert everywhere(comm, mpisparse.should_stop())


def test_all_leave_with_the_same_code_after_a_checkpoint(comm: MPI.Intracomm, directory: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    sync = mpisparse.GradientSync(model, density=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpisparse.attach(optimizer, sync)
    saves = checkpoint.every(directory, model=model, optimizer=optimizer, sync=sync, steps=2)
    code: object = None
    try:
        for step in range(9):
            optimizer.zero_grad()
            model(torch.randn(3, 6)).square().mean().backward()
            optimizer.step()
            if step == 4 and comm.rank == comm.size - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            saves.step_done()
    except SystemExit as left:
        code = left.code
    comm.barrier()
    found = sorted(path.name for path in store.found(directory))
    sync.close()
    assert everywhere(comm, code == 85)
    assert everywhere(comm, found == [store.name_of(4), store.name_of(5)])


def test_what_one_rank_gets_wrong_all_raise(comm: MPI.Intracomm, directory: Path) -> None:
    model = nn.Linear(2, 2)
    last = comm.rank == comm.size - 1
    wrong = {"steps": 0} if last else {"steps": 3}
    said = raised(comm, mpisparse.ConfigurationError, lambda: checkpoint.every(directory, model=model, **wrong))
    assert "steps must be a whole number >= 1" in said
    if comm.size > 1:
        steps = 5 if last else 3
        said = raised(comm, mpisparse.ConfigurationError, lambda: checkpoint.every(directory, model=model, steps=steps))
        assert "the ranks differ: rank 0 has steps=3" in said
    assert everywhere(comm, not list(directory.glob("step-*")))
