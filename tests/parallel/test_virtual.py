"""Every transport computes what MPI computes, bit by bit: every scheme, 1 to 4 ranks.

Ranks train over MPI, then over a process group of torch.distributed; then rank 0 trains as many virtual workers. Sums of
floats by Allreduce are the exception: MPI may add in another order on three ranks and more, so there weights are only close.
Two ranks are exact.
"""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn

import mpisparse
from mpisparse.comm.virtual import run_virtual
from mpisparse.schemes import SCHEMES
from tests.parallel.ranks import bits

pytestmark = pytest.mark.mpi
STEPS = 8
CASES: dict[str, dict[str, Any]] = {
    **{name: {"scheme": name, "density": 0.05} for name in SCHEMES if name != "auto"},  # it chooses by times
    "dense": {"scheme": "dense"},
    "diloco": {"scheme": "diloco", "every": 2, "codec": "int4"},
    "sparseloco": {"scheme": "sparseloco", "every": 2, "density": 0.05},
    "threshold": {"scheme": "threshold", "threshold": 0.01},
    "exdyna allreduce": {"scheme": "exdyna", "density": 0.05, "reduce": "allreduce"},
    "dense int4": {"scheme": "dense", "codec": "int4"},
    "drift sign": {"scheme": "drift", "density": 1.0, "codec": "sign", "every": 2},
    "drift in flight": {"scheme": "drift", "density": 0.05, "staleness": 1},
    "exdyna int8": {"scheme": "exdyna", "density": 0.05, "codec": "int8", "accumulate": "backward"},
    "dgc": {"scheme": "dgc", "density": 0.05, "warm_up": 3},
    "predictive": {"scheme": "predictive", "density": 0.05, "history": 3, "validate_every": 4, "publish_after": 2},
}
SUMMED_BY_MPI = ("dense", "exdyna allreduce")


class Net(nn.Module):
    """A small net with dropout, so that the workers' generators count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Dropout(0.1), nn.Linear(50, 20))

    def loss(self, rank: int, step: int) -> torch.Tensor:
        x = torch.randn(8, 30, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss: torch.Tensor = (self.layers(x) - x[:, :20].sin()).square().mean()
        return loss


def train(case: dict[str, Any], comm: Any) -> tuple[str, torch.Tensor]:
    """Train a few steps; return a digest of what a rank has at the end, and the weights. Collective."""
    torch.manual_seed(5)
    model = Net()
    extra = {"validation": lambda: model.loss(99, 0)} if case["scheme"] == "predictive" else {}
    sync = mpisparse.GradientSync(model, **case, **extra, comm=comm, timeout=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    mpisparse.attach(optimizer, sync)
    torch.manual_seed(100 + sync.rank)
    stats = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model.loss(sync.rank, step)
        loss.backward()  # type: ignore[no-untyped-call]
        sync.note_loss(loss.item())
        optimizer.step()
        details = {key: value for key, value in sync.stats.details.items() if "seconds" not in key}
        stats.append(repr(dataclasses.replace(sync.stats, seconds={}, details=details)))
    with sync.global_weights():
        shared = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    state = [*model.parameters(), sync.residual, shared, torch.rand(3)]
    sync.close()
    return hashlib.sha256(bits(state) + "".join(stats).encode()).hexdigest(), shared


@pytest.mark.parametrize("name", CASES)
def test_all_transports_compute_the_same(comm: MPI.Intracomm, group: dist.ProcessGroup, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        real = comm.allgather(train(CASES[name], comm))
        over_gloo = comm.allgather(train(CASES[name], group))
        virtual = comm.bcast(run_virtual(comm.size, lambda own: train(CASES[name], own)) if comm.rank == 0 else None)
    for other in (over_gloo, virtual):
        if name in SUMMED_BY_MPI and comm.size > 2:
            assert torch.allclose(real[0][1], other[0][1], rtol=1e-4, atol=1e-6)
        else:
            assert [digest for digest, _ in real] == [digest for digest, _ in other]
    assert len({digest for digest, _ in real}) == comm.size or comm.size == 1, "a test that compares nothing"
