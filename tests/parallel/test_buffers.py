"""Buffers inside global_weights(): the same on all ranks, for every scheme, and each rank's own again afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from ranks import alike, everywhere, raised, seeded
from torch import nn

import mpisparse
from mpisparse.errors import CollectiveError

pytestmark = pytest.mark.mpi


def train(comm: MPI.Intracomm, **options: Any) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    """A net with batch normalization, whose statistics differ between ranks."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    sync = mpisparse.GradientSync(model, density=0.5, comm=comm, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpisparse.attach(optimizer, sync)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 6, generator=seeded(comm.rank, step)) + comm.rank).square().mean().backward()
        optimizer.step()
    return model, sync, optimizer


def mean_of(model: nn.Module) -> torch.Tensor:
    return dict(model.named_buffers())["1.running_mean"].clone()


@pytest.mark.parametrize("buffers", [None, "rank0", "average", "own"])
@pytest.mark.parametrize("scheme", ["exdyna", "speculative", "drift"])
def test_buffers_for_all_schemes(comm: MPI.Intracomm, scheme: str, buffers: str | None) -> None:
    model, sync, _ = train(comm, scheme=scheme, **({} if buffers is None else {"buffers": buffers}))
    own = mean_of(model)
    all_ranks = comm.allgather(own)
    expected = {"average": sum(all_ranks) / comm.size, "own": own}.get(buffers or "rank0", all_ranks[0])
    with sync.global_weights():
        assert everywhere(comm, torch.allclose(mean_of(model), expected))
        assert alike(comm, model.buffers()) or buffers == "own"
        assert alike(comm, model.parameters())
        with sync.global_weights():  # once more changes nothing
            assert everywhere(comm, torch.allclose(mean_of(model), expected))
    assert everywhere(comm, torch.equal(mean_of(model), own))
    sync.close()


@pytest.mark.parametrize("how", ["rank0", "average"])
def test_an_expanded_buffer(comm: MPI.Intracomm, how: str) -> None:
    """Its elements share memory, and torch copies into none of such; a mask of attention is often one."""
    model = nn.Linear(3, 2)
    model.register_buffer("mask", torch.tensor([[1.0], [2.0]]).add(comm.rank).expand(2, 5), persistent=False)
    sync = mpisparse.GradientSync(model, density=0.5, comm=comm, buffers=how)
    assert alike(comm, [model.mask])
    assert everywhere(comm, model.mask.stride() == (1, 0) and model.mask[1].tolist() == [2.0] * 5)
    model.mask[:, 0].add_(comm.rank)
    own = model.mask.clone()
    with sync.global_weights():
        assert alike(comm, [model.mask])
        mean = 0 if how == "rank0" else (comm.size - 1) / 2
        assert everywhere(comm, torch.allclose(model.mask[0], torch.full((5,), 1.0 + mean)))
        assert everywhere(comm, torch.equal(sync._buffers.own().get("mask", own), own))  # a rank alone keeps none
    assert everywhere(comm, torch.equal(model.mask, own))
    sync.close()


def test_an_expanded_buffer_is_loaded(comm: MPI.Intracomm, directory: Path) -> None:
    models = []
    for value in (1.0, 3.0):
        torch.manual_seed(2)
        model = nn.Linear(3, 2)
        model.register_buffer("mask", torch.tensor([[value], [2 * value]]).expand(2, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = mpisparse.GradientSync(model, density=0.5, comm=comm)
        if models:
            mpisparse.checkpoint.load(directory, model=model, optimizer=optimizer, sync=sync)
        else:
            mpisparse.checkpoint.save(directory, step=1, model=model, optimizer=optimizer, sync=sync)
        models.append(model)
        sync.close()
    assert everywhere(comm, torch.equal(models[0].mask, models[1].mask))
    assert everywhere(comm, models[1].mask.stride() == (1, 0))


@pytest.mark.mpi(min_size=2)
def test_evaluating_on_rank_0_alone_is_said(comm: MPI.Intracomm) -> None:
    model, sync, _ = train(comm)

    def evaluate() -> None:
        if comm.rank == 0:
            with sync.global_weights():
                model.eval()
        else:
            sync.average(1.0)

    assert "rank 0 is in global_weights, " in raised(comm, CollectiveError, evaluate)
    sync.close()


@pytest.mark.parametrize("inside", [False, True])
def test_a_checkpoint_keeps_each_ranks_own(comm: MPI.Intracomm, directory: Path, inside: bool) -> None:
    model, sync, optimizer = train(comm)
    own = mean_of(model)

    def save() -> None:
        mpisparse.checkpoint.save(directory, step=3, model=model, optimizer=optimizer, sync=sync)

    if inside:
        with sync.global_weights():
            save()
    else:
        save()
    other, again, its = train(comm)
    mpisparse.checkpoint.load(directory, model=other, optimizer=its, sync=again)
    assert everywhere(comm, torch.equal(mean_of(other), own))
    for one in (sync, again):
        one.close()
