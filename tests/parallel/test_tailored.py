"""Exchanges tailored to sparse models: the exact mean with fewer bytes, and only of existing elements."""

from __future__ import annotations

import pytest
import torch
from mpi4py import MPI
from ranks import alike, everywhere, seeded, total
from torch import nn

from mpisparse.bench.sparse_models import experts, pruned
from mpisparse.bench.tailored import Reduction, TailoredSync, by_mask, by_rows, by_use

pytestmark = pytest.mark.mpi

SIZES = {"channels": 1, "height": 3, "width": 4, "classes": 5}


class Tables(nn.Module):
    """Two tables, of which a batch looks up some rows or none, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(40, 3, sparse=True), nn.Embedding(50, 2, sparse=True)
        self.layer = nn.Linear(3, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = (images.flatten(1).abs() * 100).long()
        looked = self.layer(self.first(rows[:, :2] % 40).sum(1))
        return looked if rows[0, 0] % 2 else looked + self.second(rows[:, 3] % 50)


MODELS = {
    "pruned": (lambda: pruned(SIZES), by_mask),
    "tables": (Tables, by_rows),
    "experts": (lambda: experts(SIZES), by_use),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_the_mean_is_exact(comm: MPI.Intracomm, name: str) -> None:
    torch.manual_seed(1)
    make, reduction = MODELS[name]
    model: nn.Module = make()
    checked: Reduction = reduction
    sync = TailoredSync(model, checked)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        images = torch.randn(3, 1, 3, 4, generator=seeded(comm.rank, step))
        model(images).square().sum().backward()
        given = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense().clone() for p in model.parameters()]
        absent = [comm.allreduce(p.grad is not None, MPI.LOR) for p in model.parameters()]
        sync.step()
        for p, grad, used in zip(model.parameters(), given, absent, strict=True):
            mean = total(comm, grad) / comm.size
            if not used:
                assert everywhere(comm, p.grad is None)
                continue
            assert everywhere(comm, torch.allclose(p.grad.double(), mean, rtol=1e-5, atol=1e-6)), step
        n = sum(p.numel() for p in model.parameters())
        assert everywhere(comm, sync.stats.selected < 0.8 * n)
        assert everywhere(comm, sync.stats.bytes_received < 0.8 * 8 * n * (comm.size - 1) / comm.size + 100 * comm.size)
        assert alike(comm, [p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        assert alike(comm, model.parameters())
    sync.close()
