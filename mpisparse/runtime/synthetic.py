"""Gradients for benchmarks: layered and heavy-tailed, as those of deep networks are, handed out by a real backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

LAYERS = 160
SETS = 3


def layer_sizes(elements: int, layers: int = LAYERS) -> list[int]:
    """Split the elements over layers whose sizes differ by orders of magnitude; the same on every rank."""
    layers = min(layers, elements)
    weights = 64 + np.random.default_rng(0).pareto(0.7, layers) * 10_000
    sizes = np.maximum(1, np.floor(weights / weights.sum() * (elements - layers))).astype(int)
    sizes[-1] += elements - int(sizes.sum())
    return [int(size) for size in sizes]


class SyntheticModel(torch.nn.Module):
    """A model without computation: backward() gives each parameter one of `SETS` prepared gradients, in turn."""

    def __init__(self, elements: int, seed: int) -> None:
        super().__init__()
        sizes = layer_sizes(elements)
        self.layers = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(size)) for size in sizes)
        scales = np.exp(np.random.default_rng(1).normal(0.0, 1.0, len(sizes)))
        random = np.random.default_rng(seed)
        self.sets = [
            [
                torch.from_numpy((scale * random.standard_t(3, size)).astype(np.float32))
                for size, scale in zip(sizes, scales, strict=True)
            ]
            for _ in range(SETS)
        ]
        self.turn = 0

    def backward(self) -> None:
        """Run autograd's backward with the next set of gradients."""
        gradients = self.sets[self.turn % SETS]
        self.turn += 1
        _Given.apply(gradients, *self.layers).backward()  # type: ignore[no-untyped-call]


class _Given(torch.autograd.Function):
    """A loss whose gradients are given."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros((), requires_grad=True)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        return (None, *ctx.gradients)
