"""Under torchrun: GradientSync over a process group without any MPI, and what is refused without one."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.modules["mpi4py"] = None  # type: ignore[assignment]  # as if it were not installed

import mpisparse  # noqa: E402
from mpisparse import checkpoint  # noqa: E402
from mpisparse.runtime.cli import main  # noqa: E402


def train(model: nn.Module, sync: mpisparse.GradientSync, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Do a few steps, each rank on data of its own."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 20, generator=generator)).square().mean().backward()
        optimizer.step()


def refused(make: Callable[[], Any], *words: str) -> None:
    """Check that something is refused, and that the message has these words."""
    message = ""
    try:
        make()
    except mpisparse.ConfigurationError as error:
        message = str(error)
    assert all(word in message for word in words), f"{message!r} has not all of {words}"


def without_mpi() -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 3))
    for scheme in ("exdyna", "drift", "speculative"):
        sync = mpisparse.GradientSync(model, scheme=scheme, density=0.1, comm=dist.group.WORLD)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        handle = mpisparse.attach(optimizer, sync)
        train(model, sync, optimizer, 4)
        sync.synchronize()
        with sync.global_weights():
            mine = nn.utils.parameters_to_vector(model.parameters()).detach()
            rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(rows, mine)
            assert all(torch.equal(row, rows[0]) for row in rows), scheme
        if scheme == "exdyna":
            assert sync.residual.any()
            save_and_load(model, sync, optimizer)
        handle.remove()
        sync.close()
    refused(lambda: mpisparse.GradientSync(model), "MPI cannot be used here", "comm=torch.distributed.group.WORLD")


def save_and_load(model: nn.Module, sync: mpisparse.GradientSync, optimizer: torch.optim.Optimizer) -> None:
    place: list[str | None] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(place)
    checkpoint.save(f"{place[0]}/run", step=4, model=model, optimizer=optimizer, sync=sync)
    kept = sync.residual.clone()
    sync.residual.zero_()
    assert checkpoint.load(f"{place[0]}/run", model=model, optimizer=optimizer, sync=sync) == 4
    assert torch.equal(kept, sync.residual)


def with_mpi() -> None:
    """MPI sees each process as a world of its own."""
    del sys.modules["mpi4py"]
    model = nn.Linear(3, 2)
    words = (f"torchrun started {dist.get_world_size()} processes", "sees 1 of them", "comm=torch.distributed.group.WORLD")
    refused(lambda: mpisparse.GradientSync(model), *words)
    refused(lambda: mpisparse.aggregator(10), *words)
    refused(lambda: mpisparse.optim.OneBitAdamW(model.parameters()), *words)
    refused(lambda: checkpoint.save("/nowhere", step=1, model=model), *words, "need the GradientSync, as sync=")
    if dist.get_rank() == 0:  # the others would wait for torchrun to end them
        assert main(["train", "--out", "/nowhere/run", "--steps", "1"]) == 2
    alone = __import__("mpi4py.MPI").MPI.COMM_SELF
    sync = mpisparse.GradientSync(model, comm=alone)  # explicitly: the user's word
    assert sync.size == 1
    sync.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    mpisparse.init_torch_distributed()  # torchrun has set the variables
    assert os.environ["RANK"] == str(dist.get_rank())
    without_mpi()
    with_mpi()
    dist.barrier()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: all shown", flush=True)
    dist.destroy_process_group()
