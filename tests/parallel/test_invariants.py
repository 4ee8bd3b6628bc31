"""The six invariants of the design, for every rank count, codec and path."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn

import mpisparse

pytestmark = pytest.mark.mpi

CODECS = ["fp32", "fp16", "bf16", "int8", "int4", "int2", "sign"]
PATHS = ["step", "backward"]


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 120), nn.Tanh(), nn.Linear(120, 30))


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([t.detach().reshape(-1).double() for t in tensors])


def total(comm: MPI.Intracomm, values: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(comm.allreduce(values.double().numpy()))


def backward(model: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 40, generator=generator) * (1 + rank)
    model(x).square().mean().backward()


def local_gradient(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return this rank's own gradient, from a copy of the model without hooks."""
    twin = copy.deepcopy(model)
    for p in twin.parameters():
        p.grad = None
    backward(twin, rank, step)
    return flat(p.grad for p in twin.parameters())


def all_equal(comm: MPI.Intracomm, values: torch.Tensor) -> bool:
    return len(set(comm.allgather(values.contiguous().numpy().tobytes()))) == 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("options", [{}, {"controller": "paper", "partitioner": "paper"}], ids=["best", "paper"])
@pytest.mark.pairs
def test_conservation_and_replicas(comm: MPI.Intracomm, codec: str, path: str, options: dict[str, str]) -> None:
    model = small_model()
    sync = mpisparse.GradientSync(model, density=0.03, codec=codec, accumulate=path, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(12):
        optimizer.zero_grad()
        gradient = local_gradient(model, comm.rank, step)
        before = total(comm, sync.residual) + total(comm, gradient)
        backward(model, comm.rank, step)
        sync.step()
        published = flat(p.grad for p in model.parameters())
        after = comm.size * published + total(comm, sync.residual)
        # fp32 sums of `size` accumulators, each rounded once more by feedback
        bound = 4e-7 * comm.size * (before.abs() + comm.allreduce(sync.residual.abs().max().item(), MPI.MAX) + 1e-12)
        assert bool(((before - after).abs() <= bound).all()), float(((before - after).abs() / bound).max())
        optimizer.step()
        assert all_equal(comm, flat(model.parameters()))
    sync.close()


@pytest.mark.parametrize("path", PATHS)
def test_regions_are_disjoint_and_cover_everything(comm: MPI.Intracomm, path: str) -> None:
    model = small_model()
    sync = mpisparse.GradientSync(model, density=0.05, accumulate=path)
    n = sync.residual.numel()
    for step in range(10):
        model.zero_grad()
        backward(model, comm.rank, step)
        sync.step()
        borders = np.array(sync.stats.borders)
        assert borders[0] == 0
        assert borders[-1] == n
        assert (np.diff(borders) >= 0).all()
        assert len(borders) == comm.size + 1
        published = flat(p.grad for p in model.parameters())
        union = sync._gradients.published.union
        assert (np.diff(union) > 0).all(), "no index twice"
        assert set(published.nonzero().flatten().tolist()) <= set(union.tolist())
        inside = [int(((union >= lo) & (union < hi)).sum()) for lo, hi in itertools.pairwise(borders)]
        assert tuple(inside) == sync.stats.workloads
        assert sum(inside) == sync.stats.selected
    sync.close()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("reduce", ["owner", "allreduce"])
def test_density_one_is_the_dense_mean(comm: MPI.Intracomm, path: str, reduce: str) -> None:
    model = small_model()
    sync = mpisparse.GradientSync(model, density=1.0, accumulate=path, reduce=reduce)
    for step in range(3):
        model.zero_grad()
        mean = total(comm, local_gradient(model, comm.rank, step)) / comm.size
        backward(model, comm.rank, step)
        sync.step()
        assert sync.stats.density == 1.0
        torch.testing.assert_close(flat(p.grad for p in model.parameters()), mean, rtol=1e-5, atol=1e-8)
        assert not bool(sync.residual.any())
    sync.close()


def test_dense_scheme_is_the_dense_mean(comm: MPI.Intracomm) -> None:
    model = small_model()
    sync = mpisparse.GradientSync(model, scheme="dense")
    for step in range(3):
        model.zero_grad()
        mean = total(comm, local_gradient(model, comm.rank, step)) / comm.size
        backward(model, comm.rank, step)
        sync.step()
        torch.testing.assert_close(flat(p.grad for p in model.parameters()), mean, rtol=1e-5, atol=1e-8)
    sync.close()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.singles
def test_same_seed_same_bits_and_resume(comm: MPI.Intracomm, codec: str, path: str) -> None:
    def run(interrupt: int | None) -> torch.Tensor:
        torch.manual_seed(7)
        model = small_model()
        sync = mpisparse.GradientSync(model, density=0.02, codec=codec, accumulate=path)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for step in range(10):
            if step == interrupt:
                saved = (copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()), sync.state_dict())
                sync.close()
                model = small_model()
                sync = mpisparse.GradientSync(model, density=0.5, codec=codec, accumulate=path)
                optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                sync.load_state_dict(saved[2])
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            sync.step()
            optimizer.step()
        result = torch.cat([flat(model.parameters()), sync.residual.double()])
        sync.close()
        return result

    first = run(None)
    assert torch.equal(first, run(None))
    assert torch.equal(first, run(4))


class Few(nn.Module):
    """A model of a given number of elements, whose gradient is its input."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 64, 65, 1000])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.singles
def test_few_elements_and_empty_selections(comm: MPI.Intracomm, count: int, path: str) -> None:
    model = Few(count)
    sync = mpisparse.GradientSync(model, density=0.3, accumulate=path)
    sent = torch.zeros(count, dtype=torch.float64)
    given = torch.zeros(count, dtype=torch.float64)
    for step in range(8):
        x = torch.zeros(count)
        if step % 3 != 1 and (step + comm.rank) % 2:  # some ranks, or all, have a zero gradient
            x = torch.randn(count, generator=torch.Generator().manual_seed(step * 17 + comm.rank))
        model.zero_grad()
        model(x).backward()
        sync.step()
        sent += model.weight.grad.double() * comm.size
        given += total(comm, x)
    torch.testing.assert_close(sent + total(comm, sync.residual), given, rtol=1e-5, atol=1e-6)
    sync.close()
