"""Ranks with different numbers of batches under join(): nobody waits, replicas stay equal, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from ranks import alike, everywhere, held, loss_of, raised, seeded, small, total, trainable
from torch import nn

import mpisparse
from mpisparse.errors import CollectiveError

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:scheme .predictive. without")]

SCHEMES: dict[str, dict[str, Any]] = {
    "exdyna": {"codec": "int8"},
    "dense": {"density": None},
    "momentum": {},
    "predictive": {"adapt_k": False},
    "topk": {},
    "dgc": {},
    "backward": {"scheme": "exdyna", "accumulate": "backward"},
    "speculative": {},
}
WEIGHTS: dict[str, dict[str, Any]] = {
    "drift": {"every": 3},
    "drift in flight": {"scheme": "drift", "every": 2, "staleness": 1},
    "a dense start": {"scheme": "drift", "every": 2, "dense_steps": 4},
    "diloco": {"every": 4, "density": None},
    "sparseloco": {"every": 3},
}


def make(comm: MPI.Intracomm, name: str, **more: Any) -> tuple[nn.Module, mpisparse.GradientSync]:
    model = small()
    options = {"scheme": name, "density": 0.1, **SCHEMES.get(name, {}), **WEIGHTS.get(name, {}), **more}
    return model, mpisparse.GradientSync(model, comm=comm, **options)


def batches(rank: int) -> int:
    """How many batches a rank has: rank 1 the most, rank 2 none."""
    return (3, 8, 0, 5)[rank]


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, seeded(rank, step)).backward()


def most(comm: MPI.Intracomm) -> int:
    return max(batches(rank) for rank in range(comm.size))


@pytest.mark.parametrize("name", SCHEMES)
def test_replicas_stay_equal_and_nothing_is_lost(comm: MPI.Intracomm, name: str) -> None:
    """What all ranks gave equals what was published, times the number of ranks, plus what they hold."""
    model, sync = make(comm, name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    mpisparse.attach(optimizer, sync)
    given = torch.zeros(sync.residual.numel(), dtype=torch.float64)
    moved = torch.zeros_like(given)

    def publish(*_: Any) -> None:
        moved.add_(torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in trainable(model)]))

    optimizer.register_step_pre_hook(publish)
    for p in trainable(model):
        p.register_hook(lambda grad: grad.clone())
    with sync.join():
        for step in range(batches(comm.rank)):
            backward(model, optimizer, comm.rank, step)
            if name != "backward":
                given += torch.cat([p.grad.reshape(-1) for p in trainable(model) if p.grad is not None])
            optimizer.step()
    sync.synchronize()
    assert alike(comm, model.parameters())
    assert alike(comm, [state["momentum_buffer"] for state in optimizer.state.values()])
    if name in ("exdyna", "dense", "topk"):
        before, after = total(comm, given), comm.size * moved + total(comm, held(sync))
        assert torch.allclose(before, after, rtol=1e-4, atol=1e-5), float((before - after).abs().max())
    assert sync.stats.step + 1 == most(comm)
    for step in range(2):  # and then all go on together
        backward(model, optimizer, comm.rank, 100 + step)
        optimizer.step()
    sync.synchronize()
    assert alike(comm, model.parameters())
    sync.close()


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_a_rank_without_batches_are_still_exchanged(comm: MPI.Intracomm, name: str) -> None:
    """The shared weights stay equal in every exchange, and the mean of all ranks' weights is what is left in the end."""
    model, sync = make(comm, name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    mpisparse.attach(optimizer, sync)
    with sync.join():
        for step in range(batches(comm.rank)):
            backward(model, optimizer, comm.rank, step)
            optimizer.step()
    with sync.global_weights():
        assert alike(comm, model.parameters())
    done = sync.state_dict()["step.done"]
    assert everywhere(comm, done >= most(comm))
    assert len(set(comm.allgather(done))) == 1
    sync.synchronize()
    assert alike(comm, model.parameters())
    sync.close()


@pytest.mark.parametrize("name", ["exdyna", "drift"])
def test_by_hand_and_with_a_scheduler(comm: MPI.Intracomm, name: str) -> None:
    model, sync = make(comm, name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    sync.density = 0.2
    with sync.join(optimizer, each_step=scheduler.step):
        for step in range(batches(comm.rank)):
            backward(model, optimizer, comm.rank, step)
            if name == "exdyna":
                sync.density = 0.2 / (1 + step)  # the others follow what the ranks at work select
                sync.step()
                optimizer.step()
            else:
                optimizer.step()
                sync.step()
            scheduler.step()
    sync.synchronize()
    assert alike(comm, model.parameters())
    if name == "exdyna":
        assert len(set(comm.allgather(scheduler.get_last_lr()[0]))) == 1
    sync.close()


def test_dense_means_are_over_all_ranks(comm: MPI.Intracomm) -> None:
    """As torch's Join with divide_by_initial_world_size: the gradients of those that have some, over the number of ranks."""
    torch.manual_seed(0)
    model, oracle = nn.Linear(3, 2), nn.Linear(3, 2)
    sync = mpisparse.GradientSync(model, scheme="dense", comm=comm)
    oracle.load_state_dict(model.state_dict())
    optimizer, reference = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, oracle))
    mpisparse.attach(optimizer, sync)

    def loss(net: nn.Module, rank: int, step: int) -> torch.Tensor:
        return net(torch.randn(4, 3, generator=seeded(rank, step))).square().mean()

    with sync.join():
        for step in range(batches(comm.rank)):
            optimizer.zero_grad()
            loss(model, comm.rank, step).backward()
            optimizer.step()
    for step in range(most(comm)):
        reference.zero_grad()
        for rank in range(comm.size):
            if step < batches(rank):
                (loss(oracle, rank, step) / comm.size).backward()
        reference.step()
    close = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), oracle.parameters(), strict=True))
    assert everywhere(comm, close)
    sync.close()


def test_numbers_of_the_ranks_at_work(comm: MPI.Intracomm) -> None:
    """average(), agree_any() and observe() are of the ranks that have batches."""
    model, sync = make(comm, "predictive", adapt_k=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpisparse.attach(optimizer, sync)
    means = []
    with sync.join():
        for step in range(batches(comm.rank)):
            backward(model, optimizer, comm.rank, step)
            optimizer.step()
            means.append(sync.average(comm.rank))
            assert sync.agree_any(comm.rank == 1 and step == 7) == (step == 7)
            sync.observe(0.5)
    expected = [np.mean([r for r in range(comm.size) if batches(r) > step]) for step in range(len(means))]
    assert everywhere(comm, means == pytest.approx(expected))
    assert len(set(comm.allgather(sync.k))) == 1
    assert alike(comm, model.parameters())
    sync.close()


def test_the_same_numbers_of_batches(comm: MPI.Intracomm) -> None:
    """With as many batches everywhere join() changes no bit."""
    results = []
    for joined in (False, True):
        model, sync = make(comm, "exdyna")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mpisparse.attach(optimizer, sync)

        def train(model: nn.Module = model, optimizer: Any = optimizer) -> None:
            for step in range(4):
                backward(model, optimizer, comm.rank, step)
                optimizer.step()

        if joined:
            with sync.join():
                train()
        else:
            train()
        results.append(torch.cat([*(p.detach().reshape(-1) for p in model.parameters()), sync.residual]))
        sync.close()
    assert everywhere(comm, torch.equal(*results))


@pytest.mark.mpi(min_size=2)
def test_what_only_ranks_at_work_do_to_gradients_is_noticed(comm: MPI.Intracomm) -> None:
    model, sync = make(comm, "exdyna")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def train() -> None:
        with sync.join(optimizer):
            for step in range(batches(comm.rank)):
                backward(model, optimizer, comm.rank, step)
                sync.step()
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)  # which a rank without batches does not do
                optimizer.step()

    assert "the replicas differ" in raised(comm, mpisparse.GradientError, train)
    sync.close()


@pytest.mark.mpi(min_size=2)
def test_what_cannot_be_joined_is_refused(comm: MPI.Intracomm) -> None:
    model, sync = make(comm, "exdyna")
    enter: Callable[[], Any] = lambda: sync.join().__enter__()  # noqa: E731
    assert "sync.join(optimizer)" in raised(comm, mpisparse.ConfigurationError, enter)
    lbfgs = torch.optim.LBFGS(model.parameters())
    found = raised(comm, mpisparse.ConfigurationError, lambda: sync.join(lbfgs).__enter__())
    assert "needs a closure" in found
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = mpisparse.attach(optimizer, sync, torch.amp.GradScaler("cpu"))
    assert "GradScaler" in raised(comm, mpisparse.ConfigurationError, enter)
    handle.remove()
    handles = [mpisparse.attach(torch.optim.SGD(model.parameters(), lr=0.1), sync) for _ in range(2)]
    assert "one attached optimizer, not 2" in raised(comm, mpisparse.ConfigurationError, enter)
    for handle in handles:
        handle.remove()
    mpisparse.attach(optimizer, sync)

    def ask() -> None:
        with sync.join():
            mpisparse.should_stop()

    assert "should_stop(sync)" in raised(comm, mpisparse.ConfigurationError, ask)

    def train() -> None:
        with sync.join():
            if comm.rank == 0:
                return  # which leaves the block, too
            sync.synchronize()

    text = raised(comm, CollectiveError, train)
    assert text.startswith("rank 0 is at the end of its batches, ")
    assert text.endswith(" in synchronize: leave the block of join() on every rank before synchronize")
    with pytest.raises(ZeroDivisionError), sync.join():  # an error inside is the rank's own: nobody is waited for
        raise ZeroDivisionError
    sync.close()


def test_who_this_process_is(comm: MPI.Intracomm) -> None:
    assert (mpisparse.rank(), mpisparse.size()) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert sorted(comm.allgather(mpisparse.local_rank())) == list(range(comm.size))  # on one host
    loader = torch.utils.data.DataLoader(torch.arange(10), batch_size=2)  # type: ignore[arg-type]
    mine = [int(x) for batch in mpisparse.shard(loader) for x in batch]
    assert {x for part in comm.allgather(mine) for x in part} == set(range(10))
