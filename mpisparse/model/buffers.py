"""Buffers, such as batch-norm statistics, while shared weights are in the model: rank 0's, their mean, or the rank's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from mpisparse.comm.roll_call import meet

if TYPE_CHECKING:
    from mpisparse.comm.exchange import Exchange


class SharedBuffers:
    """A model's buffers. how: "rank0", "average" (of floating-point ones; of others rank 0's) or "own"."""

    def __init__(self, model: torch.nn.Module, exchange: Exchange, how: str) -> None:
        self.model, self.exchange, self.how = model, exchange, how
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # the rank's own, while others are in the model
        self._inside = False

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the same buffers on all ranks for a while; collective unless there are none, or each rank keeps its own."""
        if self._inside or self.how == "own" or self.exchange.size == 1 or not any(True for _ in self.model.buffers()):
            yield
            return
        meet(self.exchange, "global_weights")
        self._take()
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            with torch.no_grad():
                for buffer, own in self._kept:
                    buffer.copy_(own)
            self._kept = []

    def own(self) -> dict[str, torch.Tensor]:
        """The rank's own buffers by name, while others are in the model; local."""
        kept = {id(buffer): own for buffer, own in self._kept}
        named = self.model.named_buffers(remove_duplicate=False)
        return {name: kept[id(buffer)] for name, buffer in named if id(buffer) in kept}

    def forget(self) -> None:
        """A state was loaded: these are not to be given back."""
        self._kept = []

    @torch.no_grad()
    def _take(self) -> None:
        self._kept = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        for buffer, own in self._kept:
            if self.how == "average" and buffer.is_floating_point():
                total = own.double().cpu().reshape(-1).numpy().copy()
                self.exchange.allreduce_(total)
                buffer.copy_(torch.from_numpy(total / self.exchange.size).reshape(buffer.shape))
            else:
                dense = own.cpu().reshape(-1).clone()
                self.exchange.broadcast_(dense.view(torch.uint8).numpy())
                buffer.copy_(dense.reshape(buffer.shape))
