"""A model that replays given gradients."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from mpisparse.arrays import Floats
from mpisparse.plan.synthetic import Source, worker_gradient


class GivenModel(torch.nn.Module):
    """A model without computation: backward() gives its parameters the next of the given gradients, cyclically."""

    def __init__(self, sizes: Sequence[int], gradients: Sequence[Floats]) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(size)) for size in sizes)
        self.sets = [torch.split(torch.from_numpy(gradient), list(sizes)) for gradient in gradients]
        self.turn = 0
        self.nap = 0.0  # seconds that a whole backward sleeps, in place of computation

    @classmethod
    def of(cls, source: Source, worker: int) -> GivenModel:
        """Create the model of one worker."""
        return cls(source.sizes, [worker_gradient(source, worker, step) for step in range(source.steps)])

    def twin(self) -> GivenModel:
        """Return a model with its own parameters and the same gradients."""
        twin = GivenModel([p.numel() for p in self.layers], [])
        twin.sets = self.sets
        return twin

    def backward(self) -> None:
        """Run autograd's backward with the next gradient."""
        gradients = self.sets[self.turn % len(self.sets)]
        self.turn += 1
        if not self.nap:
            _Given.apply(gradients, *self.layers).backward()  # type: ignore[no-untyped-call]
            return
        elements, loss = sum(map(len, gradients)), torch.zeros((), requires_grad=True)
        for gradient, layer in zip(gradients, self.layers, strict=True):
            loss = _Slowly.apply(loss, gradient, layer, self.nap * len(gradient) / elements)  # type: ignore[no-untyped-call]
        loss.backward()  # type: ignore[no-untyped-call]


class _Given(torch.autograd.Function):
    """A loss with prescribed gradients."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros((), requires_grad=True)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        return (None, *ctx.gradients)


class _Slowly(torch.autograd.Function):
    """A layer with a prescribed gradient, whose backward takes some time."""

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, gradient: torch.Tensor, parameter: torch.Tensor, seconds: float
    ) -> torch.Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grad_outputs[0], None, ctx.gradient, None
