"""Means that arrive a step late: the attached optimizer applies those still in flight at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpisparse.errors import ConfigurationError
from mpisparse.schemes.companion import Companion

if TYPE_CHECKING:
    import torch

    from mpisparse.arrays import Bools
    from mpisparse.core.aggregator import Aggregator


class InFlightMeans(Companion):
    """Lets the optimizer use the means that are still in flight."""

    def __init__(self, aggregator: Aggregator) -> None:
        self.aggregator = aggregator
        self.optimizer: torch.optim.Optimizer | None = None

    def adopt(self, optimizer: torch.optim.Optimizer, *, scales: bool = False) -> None:
        if self.optimizer is not None:
            raise ConfigurationError(
                "a mean that arrives a step late is used by one optimizer, and one is attached already: give it several "
                "parameter groups instead, or leave staleness out"
            )
        self.optimizer = optimizer

    def release(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = None

    def drain(self) -> Iterator[Bools | None]:
        """Apply deliveries in flight; without an attached optimizer the caller steps with the mean in p.grad."""
        self.draining = True
        try:
            for delivered in self.aggregator.arrivals():
                yield delivered.used
                if self.optimizer is not None:
                    self.optimizer.step()
        finally:
            self.draining = False
