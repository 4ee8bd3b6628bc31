"""What the parts of a step hand to each other: records, and no code that knows any part."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mpisparse.arrays import Floats, Ints

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.exchange import Exchange
    from mpisparse.core.agree import Inputs
    from mpisparse.model.layout import Layout, Published


@dataclass
class Clock:
    """Seconds by phase; a lap is charged with all time since the last."""

    seconds: dict[str, float] = field(default_factory=dict)
    last: float = field(default_factory=time.perf_counter)

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now


@dataclass(frozen=True)
class Parts:
    """What a step works on: the parameters' places, this rank's accumulator, the published gradient, the other ranks, the
    kernels, and the model."""

    layout: Layout
    residual: torch.Tensor
    published: Published
    exchange: Exchange
    backend: Backend
    model: torch.nn.Module

    @property
    def acc(self) -> Floats:
        """The accumulator as the backend's array on the same memory."""
        values: Floats = self.backend.array_of(self.residual)
        return values


@dataclass(frozen=True)
class Region:
    """Elements [lo, hi) of the flat vector, of which one rank makes the sums in this step."""

    rank: int
    lo: int
    hi: int


@dataclass(frozen=True)
class Chosen:
    """What is exchanged in a step, the same on all ranks: ascending indices, who sums them, how many each rank chose.

    k is how many were wanted, where that is not what was set.
    """

    union: Ints
    regions: list[Region]
    workloads: Ints
    threshold: float
    reselected: int = 0
    refined: int = 0
    k: int | None = None


@dataclass(frozen=True)
class Speculation:
    """What a rank did ahead of the others, and how far it was from them.

    updated: elements it moved by its own gradient. fine: the share of layers filtered weight by weight, and whole: the
    layers taken as such. drift: the largest distance from the global weights, before correction and after it;
    corrected: elements that went back. in_flight: results on their way. probe_loss: of the last probe.
    """

    updated: int
    fine: float
    whole: tuple[str, ...]
    in_flight: int
    probe_loss: float | None = None
    drift: float = 0.0
    drift_after: float = 0.0
    corrected: int = 0


class Chooser(Protocol):
    """Where and how many: adds a step's gradients through its scorer and chooses; collective."""

    @property
    def step(self) -> int: ...
    def choose(self, inputs: Inputs, clock: Clock) -> Chosen: ...
    def adapt(self) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def check(self, state: dict[str, Any]) -> None: ...
    def load(self, state: dict[str, Any]) -> None: ...


def imbalance(workloads: Ints) -> float:
    """How much more than the mean the busiest rank has selected, as a share of the mean."""
    total = int(workloads.sum())
    return int(workloads.max()) * len(workloads) / total - 1 if total else 0.0
