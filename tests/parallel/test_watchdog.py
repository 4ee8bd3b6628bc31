"""The watchdog of a GradientSync: when there is one, that it counts steps, and that close() ends it."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import pytest
import torch
from mpi4py import MPI
from ranks import everywhere, loss_of, raised, seeded, small

import mpisparse
from mpisparse import checkpoint

pytestmark = pytest.mark.mpi

NAME = "mpisparse-watchdog"


def watching() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == NAME}


def end_of(threads: set[threading.Thread]) -> bool:
    """Wait until threads have ended; false if they do not."""
    until = time.monotonic() + 600
    while any(thread.is_alive() for thread in threads) and time.monotonic() < until:
        time.sleep(0.01)
    return not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("timeout", [None, 30, 0])
def test_there_is_one_thread_for_several_ranks_until_it_is_closed(comm: MPI.Intracomm, timeout: float | None) -> None:
    before = watching()
    sync = mpisparse.GradientSync(small(), **({} if timeout is None else {"timeout": timeout}))
    begun = watching() - before
    assert everywhere(comm, len(begun) == int(comm.size > 1 and timeout != 0))
    sync.close()
    assert everywhere(comm, end_of(begun))


def test_a_sync_that_is_forgotten_leaves_no_thread(comm: MPI.Intracomm) -> None:
    before = watching()
    sync = mpisparse.GradientSync(small())
    begun = watching() - before
    del sync
    gc.collect()
    assert everywhere(comm, end_of(begun))


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), "10", None, True, 1j])
def test_what_is_no_timeout_is_refused(comm: MPI.Intracomm, timeout: object) -> None:
    text = raised(comm, mpisparse.ConfigurationError, lambda: mpisparse.GradientSync(small(), timeout=timeout))  # type: ignore[arg-type]
    assert f"timeout must be a number of seconds >= 0 (0: no watchdog), got {timeout!r}" in text


@pytest.mark.mpi(min_size=2)
def test_ranks_with_other_timeouts_are_refused(comm: MPI.Intracomm) -> None:
    text = raised(
        comm, mpisparse.ConfigurationError, lambda: mpisparse.GradientSync(small(), timeout=60 if comm.rank else 0)
    )
    assert "rank 0 has 'timeout 0', rank 1 has 'timeout 60'" in text


@pytest.mark.parametrize("scheme", ["exdyna", "topk", "speculative"])
def test_it_knows_the_step_and_that_nothing_waits_between_steps(comm: MPI.Intracomm, directory: Path, scheme: str) -> None:
    def begin() -> tuple[torch.nn.Module, torch.optim.Optimizer, mpisparse.GradientSync]:
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = mpisparse.GradientSync(model, scheme=scheme, density=0.1)
        mpisparse.attach(optimizer, sync)
        return model, optimizer, sync

    model, optimizer, sync = begin()
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, seeded(comm.rank, step)).backward()
        optimizer.step()
        assert everywhere(comm, sync._exchange.place.steps == step + 1)
    checkpoint.save(directory, step=3, model=model, optimizer=optimizer, sync=sync)
    assert everywhere(comm, not sync._exchange.place.waits() and not sync._exchange.place.phases)
    sync.close()
    model, optimizer, sync = begin()
    assert checkpoint.load(directory, model=model, optimizer=optimizer, sync=sync) == 3
    assert everywhere(comm, sync._exchange.place.steps == 3)
    sync.close()


def test_exempt_phases_are_told_by_those_who_are_in_them(comm: MPI.Intracomm, directory: Path) -> None:
    """Every function that may take long on a single rank is in an exempt phase while it runs."""
    model, seen = small(), []
    sync = mpisparse.GradientSync(
        model, scheme="speculative", staleness=0, probe=lambda: note("probe") or loss(), density=0.1
    )
    place = sync._exchange.place

    def note(what: str) -> None:
        seen.append((what, place.phase()))

    def loss() -> torch.Tensor:
        return loss_of(model, seeded(comm.rank, 0))

    with sync.unwatched("plotting"):
        note("own")
        with sync.global_weights():
            note("inner")
    with sync.global_weights():
        note("evaluation")
    loss().backward()
    sync.step()
    write = checkpoint.saving.write_file
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.saving, "write_file", lambda *args: note("save") or write(*args))
        checkpoint.save(directory, step=1, model=model, sync=sync)
    note("nothing")
    told = dict(seen)
    expected = {
        "own": "plotting", "inner": "plotting", "evaluation": "evaluating", "probe": "probing", "save": "saving",
        "nothing": "",
    }  # fmt: skip
    assert everywhere(comm, told == expected), told
    sync.close()
