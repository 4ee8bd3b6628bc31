"""Under torchrun, 2 x 2 processes: replicas of shards (fully_shard) exchange between the replicas."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import mpisparse
from mpisparse import checkpoint


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4))  # 7 rows on 2 shards: parts of different sizes


def sharded(mesh: DeviceMesh) -> nn.Sequential:
    model = net()
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def parts(model: nn.Module) -> list[torch.Tensor]:
    return [p.to_local().detach() for p in model.parameters()]  # type: ignore[operator]


def dense_is_plain_training(mesh: DeviceMesh) -> None:
    """Mean over shards by torch, over replicas by mpisparse: as one process with all batches."""
    model, alone = sharded(mesh["shard"]), net()
    sync = mpisparse.GradientSync(model, scheme="dense", comm=mesh.get_group("replicate"))
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, alone))
    mpisparse.attach(optimizer, sync)
    for step in range(4):
        optimizer.zero_grad()
        other.zero_grad()
        model(batch(step, dist.get_rank())).square().mean().backward()
        torch.cat([alone(batch(step, rank)) for rank in range(4)]).square().mean().backward()
        optimizer.step()
        other.step()
    for p, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(p.full_tensor(), expected, rtol=1e-4, atol=1e-6)  # type: ignore[operator]
    optimizer.zero_grad(set_to_none=False)
    model(batch(9, dist.get_rank())).square().mean().backward()
    refused(optimizer.step, "added to the gradient that the last step published")  # it cannot be seen that it was zeroed
    sync.close()


def nothing_is_lost(mesh: DeviceMesh, codec: str) -> None:
    """On every shard: residuals + gradients = replicas x published + residuals; replicas stay equal."""
    model, group = sharded(mesh["shard"]), mesh.get_group("replicate")
    sync = mpisparse.GradientSync(model, density=0.2, codec=codec, comm=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert sync.size == 2

    def summed(vector: torch.Tensor) -> torch.Tensor:
        vector = vector.double()
        dist.all_reduce(vector, group=group)
        return vector

    for step in range(5):
        optimizer.zero_grad()
        model(batch(step, dist.get_rank())).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        own = torch.cat([p.grad.to_local().reshape(-1) for p in model.parameters()])  # type: ignore[union-attr]
        before = summed(sync.residual + own)
        sync.step()
        mean = torch.cat([p.grad.to_local().reshape(-1) for p in model.parameters()])  # type: ignore[union-attr]
        assert torch.allclose(before, 2 * mean.double() + summed(sync.residual), rtol=1e-5, atol=1e-6), (codec, step)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # of the mean, in the memory that is published
        optimizer.step()
        for part in parts(model):
            assert torch.equal(summed(part), 2 * part.double()), "replicas differ"
    assert sync.residual.any()
    state = io.BytesIO()
    torch.save(sync.state_dict(), state)
    kept = sync.residual.clone()
    sync.residual.zero_()
    sync.load_state_dict(torch.load(io.BytesIO(state.getvalue()), weights_only=True))
    assert torch.equal(kept, sync.residual)
    sync.close()


def refused(call: Callable[[], Any], *words: str) -> None:
    message = ""
    try:
        call()
    except (mpisparse.ConfigurationError, mpisparse.GradientError) as error:
        message = str(error)
    assert all(word in message for word in words), f"{message!r} has not all of {words}"


def refusals(mesh: DeviceMesh) -> None:
    model, replicas = sharded(mesh["shard"]), mesh.get_group("replicate")
    why = ("hold different parts", 'comm=mesh.get_group("replicate")')
    refused(lambda: mpisparse.GradientSync(model, comm=dist.group.WORLD), *why)
    refused(lambda: mpisparse.GradientSync(model, comm=mesh.get_group("shard")), *why)
    refused(lambda: mpisparse.GradientSync(sharded(init_device_mesh("cpu", (4,))), comm=dist.group.WORLD), *why)
    refused(lambda: mpisparse.GradientSync(sharded(mesh), comm=replicas), "torch averages over the replicas by itself", *why)
    for scheme in ("drift", "speculative"):
        refused(lambda scheme=scheme: mpisparse.GradientSync(model, scheme=scheme, comm=replicas), "whole parameters")
    refused(lambda: mpisparse.GradientSync(model, accumulate="backward", comm=replicas), 'accumulate="step"')
    refused(lambda: mpisparse.GradientSync(model, comm=mesh["replicate"]), "mesh.get_group(name)")
    sync = mpisparse.GradientSync(model, comm=replicas)
    refused(lambda: checkpoint.save("/nowhere", step=1, model=model, sync=sync), "torch.distributed.checkpoint")
    sync.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    dense_is_plain_training(both)
    for name in ("fp32", "int8"):
        nothing_is_lost(both, name)
    refusals(both)
    dist.barrier()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: all shown", flush=True)
    dist.destroy_process_group()
