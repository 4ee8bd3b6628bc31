"""Habits that make replicas drift apart, or waste ranks, are noticed and named; ordinary loops cause no alarm."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from mpi4py import MPI
from ranks import alike, loss_of, raised, seeded, small
from torch import nn

import mpisparse

pytestmark = pytest.mark.mpi

SCHEMES: dict[str, dict[str, Any]] = {
    "exdyna": {},
    "dense": {"density": None},
    "backward": {"scheme": "exdyna", "accumulate": "backward"},
    "speculative": {},
    "drift": {"every": 1},
}


def make(comm: MPI.Intracomm, name: str = "exdyna", **more: Any) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    model = small()
    options = {"scheme": name, "density": 0.1, **SCHEMES[name], **more}
    return model, mpisparse.GradientSync(model, comm=comm, **options), torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, seeded(rank, number)).backward()
    optimizer.step()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", SCHEMES)
def test_replicas_that_differ_are_named(comm: MPI.Intracomm, name: str) -> None:
    model, sync, optimizer = make(comm, name, check_every=4)
    mpisparse.attach(optimizer, sync)
    for number in range(3):
        step(model, optimizer, comm.rank, number)
    with torch.no_grad():
        weight = sync._replicated()[2].reshape(-1)
        weight[:5] += 0.1 * (comm.rank == comm.size - 1)  # the third parameter, on one rank

    def go_on() -> None:
        for number in range(3, 12):
            step(model, optimizer, comm.rank, number)

    text = raised(comm, mpisparse.GradientError, go_on)
    assert text.startswith("the replicas differ: ranks 0 and "), text
    assert " in 2.weight, by up to 0.1" in text
    assert "check_every=0" in text


@pytest.mark.mpi(min_size=2)
def test_a_comparison_in_a_skipped_step_is_made_in_the_next(comm: MPI.Intracomm) -> None:
    model, sync, optimizer = make(comm, check_every=2, nonfinite="skip")
    mpisparse.attach(optimizer, sync)
    for number in range(2):
        step(model, optimizer, comm.rank, number)
    with torch.no_grad():
        model[0].weight[0, 0] += 0.1 * (comm.rank == 1)  # type: ignore[index, union-attr]
    optimizer.zero_grad()
    (next(model.parameters()).sum() * torch.inf).backward()
    optimizer.step()
    assert sync.stats.skipped
    text = raised(comm, mpisparse.GradientError, lambda: step(model, optimizer, comm.rank, 3))
    assert "the replicas differ" in text


def test_rates_without_a_number_and_rates_that_differ_in_the_last_bits(comm: MPI.Intracomm) -> None:
    model, sync, optimizer = make(comm, check_every=1)
    mpisparse.attach(optimizer, sync)
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + 1e-15 * comm.rank)
    step(model, optimizer, comm.rank, 0)
    optimizer.param_groups[0]["lr"] = None
    assert sync._rates() == (0.0,)
    sync.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", SCHEMES)
def test_what_may_be_rounding_is_a_warning(comm: MPI.Intracomm, name: str) -> None:
    """The training goes on, and moves the weights as if nothing had been found."""

    def train(check_every: int) -> tuple[list[torch.Tensor], list[str]]:
        model, sync, optimizer = make(comm, name, check_every=check_every)
        mpisparse.attach(optimizer, sync)
        step(model, optimizer, comm.rank, 0)
        with torch.no_grad():
            sync._replicated()[0].reshape(-1)[0] *= 1 + 1e-6 * (comm.rank == 1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(1, 6):
                step(model, optimizer, comm.rank, number)
        sync.synchronize()
        weights = [p.detach().clone() for p in model.parameters()]
        sync.close()
        return weights, comm.bcast([str(w.message) for w in caught])

    weights, texts = train(check_every=2)
    assert len(texts) == 1, texts
    assert "may be rounding" in texts[0]
    unchecked, silence = train(check_every=0)
    assert not silence
    assert all(map(torch.equal, weights, unchecked))


@pytest.mark.mpi(min_size=2)
def test_a_scheduler_that_follows_a_ranks_own_loss(comm: MPI.Intracomm) -> None:
    """ReduceLROnPlateau: raised before the first step with different rates, so that the replicas are still equal."""
    model, sync, optimizer = make(comm)
    mpisparse.attach(optimizer, sync)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for number in range(2):
        step(model, optimizer, comm.rank, number)
        plateau.step(1.0 if comm.rank == 0 else 1.0 - 0.5 * number)
    text = raised(comm, mpisparse.GradientError, lambda: step(model, optimizer, comm.rank, 2))
    assert text.startswith("the learning rates differ of group 0: 0.01 on rank 0, 0.1 on rank 1; "), text
    assert alike(comm, model.parameters())
    optimizer.param_groups[0]["lr"] = 0.1
    step(model, optimizer, comm.rank, 3)
    sync.close()


def test_wrapped_models_are_refused(comm: MPI.Intracomm) -> None:
    parameters: Any = nn.Linear(3, 2).parameters()
    text = raised(comm, mpisparse.ConfigurationError, lambda: mpisparse.GradientSync(parameters, comm=comm))
    assert "expected the model, a torch.nn.Module, got generator" in text
    wrapped = nn.DataParallel(nn.Linear(3, 2))
    assert "pass model.module" in raised(
        comm, mpisparse.ConfigurationError, lambda: mpisparse.GradientSync(wrapped, comm=comm)
    )
    ddp = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)  # without a process group
    nn.Module.__init__(ddp)
    ddp.module = nn.Linear(3, 2)
    text = raised(comm, mpisparse.ConfigurationError, lambda: mpisparse.GradientSync(ddp, comm=comm))
    assert "mpisparse.integrations.ddp.hook" in text


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", SCHEMES)
def test_the_same_batches_on_two_ranks_are_said_once(comm: MPI.Intracomm, name: str) -> None:
    for same in (True, False):
        model, sync, optimizer = make(comm, name)
        mpisparse.attach(optimizer, sync)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(6):
                step(model, optimizer, 0 if same and comm.rank < 2 else comm.rank, number)
        texts = comm.bcast([str(w.message) for w in caught])
        assert len(texts) == same, texts
        assert not same or ("ranks 0 and 1 had the same gradient" in texts[0] and "mpisparse.shard" in texts[0])
        sync.close()


@pytest.mark.filterwarnings("error")
def test_gradients_of_zeros_are_no_alarm(comm: MPI.Intracomm) -> None:
    model, sync, optimizer = make(comm)
    mpisparse.attach(optimizer, sync)
    for _ in range(4):
        optimizer.zero_grad()
        (0.0 * model(torch.ones(2, 30))).sum().backward()
        optimizer.step()
    sync.close()


def test_an_optimizer_that_steps_without_an_exchange(comm: MPI.Intracomm) -> None:
    for name, calls in (("exdyna", 0), ("drift", 0)):
        model, sync, optimizer = make(comm, name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(5 + calls):
                step(model, optimizer, comm.rank, number)
        texts = comm.bcast([str(w.message) for w in caught])
        assert len(texts) == 1, texts
        assert "optimizer.step() ran again without an exchange" in texts[0]
        assert ("after each" if name == "drift" else "before each") in texts[0]
        sync.close()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", SCHEMES)
def test_ordinary_loops_cause_no_alarm(comm: MPI.Intracomm, name: str) -> None:
    """Accumulation, no_sync, two optimizers, skipped batches, by hand and attached; warnings are errors here."""
    model, sync, optimizer = make(comm, name, check_every=2)
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2]))  # type: ignore[index]
    after = name == "drift"
    for number in range(6):
        if name == "speculative":
            break  # which cannot be stepped by hand
        model.zero_grad()
        loss_of(model, seeded(comm.rank, 100 + number)).backward()
        if name != "backward":
            model.zero_grad()  # a batch that is not used
        with sync.no_sync():
            loss_of(model, seeded(comm.rank, number)).backward()
        loss_of(model, seeded(comm.rank, 50 + number)).backward()
        for call in (first.step, second.step, sync.step) if after else (sync.step, first.step, second.step):
            call()
    mpisparse.attach(optimizer, sync)
    for number in range(6):
        step(model, optimizer, comm.rank, number)
    sync.synchronize()
    assert alike(comm, model.parameters())
    sync.close()
