"""Buffers, such as batch-norm statistics, while the model holds shared weights: rank 0's, their mean, or the rank's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from mpisparse.backends.flat import distinct
from mpisparse.comm.roll_call import meet
from mpisparse.comm.survival import together

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
        """Use equal buffers on all ranks inside the block; collective unless there are none, or each rank keeps its own."""
        if self._inside or self.how == "own" or self.exchange.size == 1 or not any(True for _ in self.model.buffers()):
            yield
            return
        together(self.exchange, self._share)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self._give_back()

    def own(self) -> dict[str, torch.Tensor]:
        """The rank's own buffers by name, while others are in the model; local."""
        kept = {id(buffer): own for buffer, own in self._kept}
        named = self.model.named_buffers(remove_duplicate=False)
        return {name: kept[id(buffer)].expand_as(buffer) for name, buffer in named if id(buffer) in kept}

    def forget(self) -> None:
        """Drop the kept buffers, because a state was loaded."""
        self._kept = []

    def _share(self) -> None:
        """Put the same buffers into the model of all ranks; collective."""
        self._give_back()  # those of an attempt that a rank's death ended
        meet(self.exchange, "global_weights")
        self._take()

    @torch.no_grad()
    def _give_back(self) -> None:
        """Put the rank's own buffers back into the model; local."""
        for buffer, own in self._kept:
            distinct(buffer).copy_(own)
        self._kept = []

    @torch.no_grad()
    def _take(self) -> None:
        self._kept = [(buffer, distinct(buffer).clone()) for buffer in self.model.buffers()]
        for whole, own in self._kept:
            buffer = distinct(whole)
            if self.how == "average" and buffer.is_floating_point():
                total = own.double().cpu().reshape(-1).numpy().copy()
                self.exchange.allreduce_(total)
                buffer.copy_(torch.from_numpy(total / self.exchange.size).reshape(buffer.shape))
            else:
                dense = own.cpu().reshape(-1).clone()
                self.exchange.broadcast_(dense.view(torch.uint8).numpy())
                buffer.copy_(dense.reshape(buffer.shape))
