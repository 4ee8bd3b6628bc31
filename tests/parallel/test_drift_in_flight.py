"""Scheme drift with staleness=1: exchanged while the next step is computed, applied after the next optimizer step."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from drifting import Training
from mpi4py import MPI
from ranks import alike, everywhere, raised, small

import mpisparse

pytestmark = pytest.mark.mpi

CASES: dict[str, dict[str, Any]] = {
    "sparse": {"density": 0.05},
    "sparse, every third": {"density": 0.05, "every": 3},
    "whole": {"density": 1.0, "codec": "sign"},
    "whole, every second": {"density": 1.0, "every": 2, "rate": 1.5, "spread": False},
    "in two parts": {"density": 1.0, "every": 2},
}


def delayed(run: Training, seconds: float) -> None:
    """Delay the last rank's messages, by this many seconds in total."""
    exchange: Any = run.sync._aggregator._polling
    call, calls = exchange._call, [0]

    def late(*args: Any, **options: Any) -> None:
        calls[0] += 1
        if run.comm.rank == run.comm.size - 1 and calls[0] % 7 == 3 and calls[0] < 70:
            time.sleep(seconds / 10)
        call(*args, **options)

    exchange._call = late


def without_threads(run: Training) -> None:
    """Carry out each delivery when it is sent."""
    flight: Any = run.sync._aggregator.works.flight
    flight.close()
    flight.thread = None


@pytest.mark.parametrize("case", CASES)
def test_neither_delays_nor_threads_change_a_bit(comm: MPI.Intracomm, case: str) -> None:
    """Nor that gradients and weights are written meanwhile: the same is written in all runs."""
    runs = [Training(comm, staleness=1, **CASES[case]) for _ in range(3)]
    delayed(runs[1], 1.0)
    without_threads(runs[2])
    for _ in range(11):
        for run in runs:
            run.step()
            with torch.no_grad():
                for p in run.model.parameters():
                    p.mul_(0.999)
                    if p.grad is not None:
                        p.grad.fill_(float("nan"))
        assert everywhere(comm, runs[0].bits() == runs[1].bits() == runs[2].bits())
        assert alike(comm, [runs[0].shared()])
    for run in runs:
        run.sync.synchronize()
        assert alike(comm, run.model.parameters())
        run.sync.close()


def test_it_is_applied_after_the_next_step(comm: MPI.Intracomm) -> None:
    """With every=3 after the first step that follows, before anything new is sent."""
    run = Training(comm, density=1.0, every=3, spread=False, staleness=1)
    moved, arrived = [], []
    before = run.shared()
    for _ in range(8):
        run.step()
        moved.append(not torch.equal(run.shared(), before))
        arrived.append(run.sync.stats.density == 1.0)
        before = run.shared()
    assert everywhere(comm, moved == arrived == [False, False, False, True, False, False, True, False])
    run.sync.close()


def test_what_is_in_flight_is_not_selected_again(comm: MPI.Intracomm) -> None:
    run = Training(comm, density=0.05, staleness=1)
    last, again, count = np.empty(0, dtype=np.int64), 0, 0
    for _ in range(10):
        run.step()
        union = np.asarray(run.sync.state_dict()["step.flight"][0]["agreed"]["union"])
        again, count, last = again + len(np.intersect1d(union, last)), count + len(union), union
    assert everywhere(comm, count > 0 and again == 0)
    assert everywhere(comm, abs(count - 10 * run.sync.k) <= 0.3 * 10 * run.sync.k)
    run.sync.close()


@pytest.mark.parametrize("density", [0.05, 1.0])
def test_weights_that_are_not_finite_are_refused_a_step_later(comm: MPI.Intracomm, density: float) -> None:
    """Nothing is exchanged, nothing is lost, and the run goes on when the weight is finite again."""
    run = Training(comm, torch.optim.SGD, density=density, staleness=1)
    for _ in range(3):
        run.step()
    weight = next(iter(run.model.parameters()))
    right = weight.detach()[0, 0].item()
    if comm.rank == comm.size - 1:
        with torch.no_grad():
            weight[0, 0] = float("inf")
    run.optimizer.zero_grad()
    run.optimizer.step()
    before = run.shared()
    run.optimizer.zero_grad()
    said = raised(comm, mpisparse.NonFiniteGradientError, run.optimizer.step)
    assert "non-finite weight in 0.weight" in said
    assert everywhere(comm, torch.equal(run.shared(), before))
    with torch.no_grad():
        weight[0, 0] = right
    for _ in range(4):
        run.step()
    assert alike(comm, [run.shared()])
    assert everywhere(comm, not torch.equal(run.shared(), before))
    run.sync.close()


def test_a_model_that_was_converted_meanwhile_is_refused(comm: MPI.Intracomm) -> None:
    """Its memory is different, and received values must not be written there."""
    run = Training(comm, density=0.05, staleness=1)
    for _ in range(3):
        run.step()
    if comm.rank == 0:
        run.model.bfloat16()
    run.optimizer.zero_grad()
    run.optimizer.step()
    said = raised(comm, mpisparse.GradientError, run.optimizer.step)
    assert "bfloat16" in said
    assert "load a saved state" in said
    if comm.rank == 0:
        run.model.float()
    assert "load a saved state" in raised(comm, mpisparse.GradientError, run.optimizer.step)
    run.sync.close()


def test_other_types_with_a_remainder(comm: MPI.Intracomm) -> None:
    runs = [Training(comm, torch.optim.SGD, model=small().bfloat16(), remainder=True, staleness=1) for _ in range(2)]
    without_threads(runs[1])
    for _ in range(8):
        for run in runs:
            run.step()
        assert everywhere(comm, runs[0].bits() == runs[1].bits())
        assert alike(comm, [runs[0].sync._residual])
    for run in runs:
        run.sync.close()


def test_other_stalenesses_are_refused(comm: MPI.Intracomm) -> None:
    said = raised(comm, mpisparse.ConfigurationError, lambda: Training(comm, staleness=2))
    assert "staleness must be 0 or 1, got 2" in said
