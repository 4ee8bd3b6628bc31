"""Synthetic gradients, layered and heavy-tailed like those of deep networks, and a model that replays given ones."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from mpisparse.arrays import Floats

LAYERS = 160
SETS = 3


class Source(Protocol):
    """Flat gradients of some ranks and steps; `sizes` are the elements per layer."""

    @property
    def sizes(self) -> list[int]: ...
    @property
    def ranks(self) -> int: ...
    @property
    def steps(self) -> int: ...
    def gradient(self, rank: int, step: int) -> Floats: ...


def worker_gradient(source: Source, worker: int, step: int) -> Floats:
    """Return a worker's gradient; a worker beyond the source's ranks reuses another's from a later step."""
    later, rank = divmod(worker, source.ranks)
    return source.gradient(rank, (step + later) % source.steps)


def layer_sizes(elements: int, layers: int = LAYERS) -> list[int]:
    """Split elements into layers whose sizes differ by orders of magnitude; the same on every rank."""
    layers = min(layers, elements)
    weights = 64 + np.random.default_rng(0).pareto(0.7, layers) * 10_000
    sizes = np.maximum(1, np.floor(weights / weights.sum() * (elements - layers))).astype(int)
    sizes[-1] += elements - int(sizes.sum())
    return [int(size) for size in sizes]


class Synthetic:
    """`SETS` gradients per rank, generated on first use."""

    steps = SETS

    def __init__(self, elements: int, ranks: int) -> None:
        self.sizes = layer_sizes(elements)
        self.ranks = ranks
        self.scales = np.exp(np.random.default_rng(1).normal(0.0, 1.0, len(self.sizes)))
        self._of_rank = functools.cache(self._make)

    def gradient(self, rank: int, step: int) -> Floats:
        """Return one of a rank's gradients."""
        return self._of_rank(rank)[step]

    def _make(self, rank: int) -> list[Floats]:
        random = np.random.default_rng(100 + rank)
        parts = [
            [
                (scale * random.standard_t(3, size)).astype(np.float32)
                for size, scale in zip(self.sizes, self.scales, strict=True)
            ]
            for _ in range(SETS)
        ]
        return [np.concatenate(layers) for layers in parts]


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
