"""Synthetic gradients, layered and heavy-tailed like those of deep networks."""

from __future__ import annotations

import functools
from typing import Protocol

import numpy as np

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
