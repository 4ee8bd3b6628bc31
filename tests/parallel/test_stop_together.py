"""Loops of users on several ranks: all stop at the step at which one was asked to, and all raise if one makes a mistake."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from ranks import everywhere, raised
from torch import nn

import mpisparse
from mpisparse import checkpoint
from mpisparse.checkpoint import store
from mpisparse.comm import roll_call, stop_together
from mpisparse.errors import CollectiveError

pytestmark = pytest.mark.mpi


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    monkeypatch.setattr(stop_together, "_listener", None)
    monkeypatch.setattr(roll_call, "_open", [])  # exchanges that other tests left open must not count here
    yield
    listener = stop_together._listener
    if listener is not None and listener.world is not None:
        listener.world.close()  # else the next test's ranks would ask in it
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_one_rank_is_asked_and_all_stop(comm: MPI.Intracomm) -> None:
    before = mpisparse.should_stop()
    if comm.rank == comm.size - 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    assert everywhere(comm, not before)
    assert everywhere(comm, mpisparse.should_stop())


def raised_apart(comm: MPI.Intracomm, others: Callable[[], Any]) -> str:
    """Return the error of all ranks when rank 0 alone asks whether to stop. Collective."""
    return raised(comm, CollectiveError, mpisparse.should_stop if comm.rank == 0 else others)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("asked_before", [False, True])
def test_a_rank_that_asks_alone_is_named(comm: MPI.Intracomm, *, asked_before: bool) -> None:
    model = nn.Linear(6, 4)
    if asked_before:  # over an exchange of its own, because there is no other yet
        assert everywhere(comm, not mpisparse.should_stop())
    sync = mpisparse.GradientSync(model, density=0.3)
    model(torch.randn(3, 6)).square().mean().backward()
    for called, place in ((sync.step, "in step 0"), (lambda: sync.average(1.0), "in average")):
        text = raised_apart(comm, called)
        assert text.startswith("rank 0 is in should_stop, rank")
        assert place in text
    assert everywhere(comm, not mpisparse.should_stop())
    sync.step()
    sync.close()
    assert everywhere(comm, not mpisparse.should_stop()), "of a sync that is closed no more"


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_asks_while_others_construct_is_named(comm: MPI.Intracomm) -> None:
    model = nn.Linear(6, 4)
    text = raised_apart(comm, lambda: mpisparse.GradientSync(model))
    assert "rank 0 is in should_stop" in text
    assert "in GradientSync" in text


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
