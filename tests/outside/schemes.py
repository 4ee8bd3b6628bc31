"""A scheme with an option, a phase and a detail of its own, made of a built-in one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mpisparse.errors import ConfigurationError
from mpisparse.schemes.baselines import LocalTopK
from mpisparse.select.scorers import Magnitude


class Counting(Magnitude):
    """The magnitude; counts before each step how many elements wait in the residual."""

    def __init__(self, residual: torch.Tensor, backend: Any, share: float) -> None:
        super().__init__(residual, backend)
        self.share = share
        self.waiting = 0.0

    def ready(self, exempt: Any, lap: Any) -> str:
        magnitude = self.residual.abs()
        self.waiting = float((magnitude > self.share * magnitude.max()).sum())
        lap("head_count")
        return super().ready(exempt, lap)

    def details(self) -> dict[str, float]:
        return {"waiting_elements": self.waiting}


@dataclass(frozen=True)
class Census(LocalTopK):
    """Local top-k. share: of the largest magnitude, above which an element counts as waiting."""

    share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.share < 1.0:
            raise ConfigurationError(f"share must be in [0, 1), got {self.share!r}")

    def scorer(self, parts: Any) -> Magnitude:
        return Counting(parts.residual, parts.backend, self.share)
