"""Sharded parameters (torch's DTensor, as fully_shard makes them): a rank exchanges its own part of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mpisparse.comm.exchange import Exchange
from mpisparse.errors import ConfigurationError
from mpisparse.schemes.options import Options

HOW = (
    'make a 2-D mesh with init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard")), call '
    'fully_shard(module, mesh=mesh["shard"]) and pass comm=mesh.get_group("replicate")'
)


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor; does not import torch.distributed.tensor, which is slow."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "device_mesh")


def local_of(tensor: Any) -> torch.Tensor:
    """A rank's own part of a tensor, in the same memory; the tensor itself if it is not sharded."""
    part: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


class Shard:
    """A rank's own part of a sharded parameter, with the attributes of a parameter that an exchange needs."""

    def __init__(self, param: Any) -> None:
        self.param = param
        self._published: tuple[torch.Tensor, Any] | None = None  # a local gradient, and the DTensor made of it

    @property
    def grad(self) -> torch.Tensor | None:
        """The local part of the gradient; the assigned one, as long as the parameter holds it."""
        grad = self.param.grad
        if grad is None:
            return None
        if self._published is not None and grad is self._published[1]:
            return self._published[0]
        return local_of(grad)

    @grad.setter
    def grad(self, local: torch.Tensor | None) -> None:
        if local is None:
            self.param.grad = None
            return
        if self._published is None or self._published[0] is not local:
            p = self.param
            whole = type(p.data).from_local(
                local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            )
            self._published = local, whole
        self.param.grad = self._published[1]

    @property
    def requires_grad(self) -> bool:
        return bool(self.param.requires_grad)

    @property
    def dtype(self) -> torch.dtype:
        return local_of(self.param).dtype

    @property
    def shape(self) -> torch.Size:
        return local_of(self.param).shape

    @property
    def device(self) -> torch.device:
        return local_of(self.param).device

    def stride(self) -> tuple[int, ...]:
        return local_of(self.param).stride()


def check_replicas(named: Sequence[tuple[str, Any]], exchange: Exchange, options: Options, scheme: str) -> None:
    """Raise on all ranks unless those that exchange hold the same parts of sharded parameters; collective."""
    sharded = [(name, p) for name, p in named if is_sharded(p)]
    if not any(flag for (flag,) in exchange.allgather(np.array([bool(sharded)])).tolist()):
        return
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else exchange.rank
    others = exchange.allgather(np.array([rank]))[:, 0].tolist()
    error: ConfigurationError | None = None
    for name, p in sharded:
        together = sorted(set(others) & set(p.device_mesh.mesh.flatten().tolist()))
        if len(together) > 1:
            twofold = "; on a 2-D mesh torch averages over the replicas by itself" if p.device_mesh.ndim > 1 else ""
            error = ConfigurationError(
                f"parameter {name} is sharded over ranks {together}, which are all in comm: they hold different parts of "
                f"it, so there is nothing to average{twofold}. Replicas of shards can be averaged: {HOW}"
            )
            break
    if error is None and (options.of_weights or scheme == "speculative" or any(map(callable, vars(options).values()))):
        error = ConfigurationError(
            f'scheme "{scheme}" as it is set needs whole parameters, and these are sharded; use another'
        )
    if error is None and options.accumulate != "step":
        error = ConfigurationError('sharded parameters need accumulate="step"')
    if error is None and getattr(options, "overlap", False):
        error = ConfigurationError("sharded parameters cannot be exchanged during backward: leave overlap out")
    exchange.raise_together(error)
