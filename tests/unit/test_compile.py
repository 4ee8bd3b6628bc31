"""Models that torch compiles: the bits of the same model without, on both paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mpisparse
from mpisparse.comm.virtual import VirtualComm, run_virtual


def trained(comm: VirtualComm, accumulate: str, compiled: bool) -> list[bytes]:
    """Weights and residual after some steps; the compiled module is the one that is given to GradientSync."""
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 5))
    model = torch.compile(model, backend="aot_eager") if compiled else model
    sync = mpisparse.GradientSync(model, comm=comm, timeout=0, density=0.05, accumulate=accumulate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + comm.rank))
        model(inputs).square().mean().backward()
        sync.step()
        optimizer.step()
    end = [p.detach().numpy().tobytes() for p in model.parameters()] + [sync.residual.numpy().tobytes()]
    sync.close()
    return end


@pytest.mark.parametrize("accumulate", ["step", "backward"])
def test_a_compiled_model(accumulate: str) -> None:
    runs = [
        run_virtual(2, lambda comm, compiled=compiled: trained(comm, accumulate, compiled)) for compiled in (True, False)
    ]
    assert runs[0] == runs[1]
    assert len({run[0] for run in runs[0]}) == 1
