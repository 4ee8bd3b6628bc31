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


def stepped(comm: VirtualComm, attached: bool, compiled: bool) -> list[bytes]:
    """Weights after some steps; what is compiled is optimizer.step(), which exchanges, or sync.step() and it."""
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 5)
    sync = mpisparse.GradientSync(model, comm=comm, timeout=0, density=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if attached:
        mpisparse.attach(optimizer, sync)

    def update() -> None:
        if not attached:
            sync.step()
        optimizer.step()

    step: Any = torch.compile(update, backend="eager") if compiled else update
    for number in range(4):
        optimizer.zero_grad()
        inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * number + comm.rank))
        model(inputs).square().mean().backward()
        step()
        assert sync.stats.step == number
    end = [p.detach().numpy().tobytes() for p in model.parameters()]
    sync.close()
    return end


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own
@pytest.mark.parametrize("attached", [True, False])
def test_a_compiled_step(attached: bool) -> None:
    """torch.compile leaves the exchange as it is."""
    runs = [run_virtual(1, lambda comm, c=compiled: stepped(comm, attached, c)) for compiled in (True, False)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("accumulate", ["step", "backward"])
def test_a_compiled_model(accumulate: str) -> None:
    runs = [
        run_virtual(2, lambda comm, compiled=compiled: trained(comm, accumulate, compiled)) for compiled in (True, False)
    ]
    assert runs[0] == runs[1]
    assert len({run[0] for run in runs[0]}) == 1
