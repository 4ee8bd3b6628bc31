"""Drift by nodes: a node is one worker, whose ranks average their gradients before the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mpisparse.arrays import Bools
from mpisparse.backends.device import load_backend
from mpisparse.backends.flat import zeros
from mpisparse.comm.roll_call import FIRST, meet
from mpisparse.core.records import Delivered, Stats
from mpisparse.core.weights_by_node import WeightsByNode
from mpisparse.errors import ConfigurationError
from mpisparse.schemes.companion import Places, Site
from mpisparse.schemes.drift.companion import Drifting
from mpisparse.schemes.drift.start import DenseStart, GradientMeans
from mpisparse.schemes.drift.weights import OwnWeights


class NodeMeans(GradientMeans):
    """Replaces each rank's gradients by their mean over the ranks of its node.

    The roll call includes all ranks, so that an error of one is raised on all. waiting: a context around it; exchanging:
    around what follows it.
    """

    what = 'hierarchy="node"'
    waiting: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)
    exchanging: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)

    def __init__(self, places: Places, aggregator: WeightsByNode) -> None:
        super().__init__(places, aggregator.parts.exchange)
        self.aggregator = aggregator
        self.vector = zeros(places.size, torch.float32)
        self.backend = load_backend()

    @property
    def work(self) -> torch.Tensor:
        return self.vector

    def _agree(self, step: int, trouble: str | None, call: Any) -> Bools | None:
        with self.waiting():
            return super()._agree(step, trouble, call)

    def average_(self, step: int) -> None:
        with self.exchanging():
            self.aggregator.average(self.vector)


class DriftingByNode(Drifting):
    """Averages gradients in the node before each step of the optimizer, so that W stays the same on its ranks."""

    aggregator: WeightsByNode

    def __init__(
        self, aggregator: WeightsByNode, site: Site, weights: OwnWeights, *, every: int | str, start: DenseStart | None
    ) -> None:
        super().__init__(aggregator, site, weights, every=every, start=start)
        self.means = NodeMeans(site.places, aggregator)
        self._inside = 0  # bytes moved inside the node by the averages since the last exchange

    def check_by_hand(self) -> None:
        """Raise on all ranks: gradients must be averaged before optimizer.step()."""
        meet(self.exchange, FIRST)
        raise ConfigurationError(
            f'r{self.exchange.rank} | hierarchy="node" averages gradients in the node before optimizer.step(), and '
            "exchanges weights after it: attach() the optimizer"
        )

    @property
    def starting(self) -> bool:  # type: ignore[override]  # there is an average before every step
        return True

    def average(self, trouble: str | None, call: Any = None) -> None:
        if super().starting:
            super().average(trouble, call)
            return
        inside = self.aggregator.nodes.inside
        inside.reset_counters()
        self.means.average(self.done, trouble, call)
        self._inside += inside.nbytes_received

    def rested(self, stats: Stats) -> Stats:
        if self.start is not None and self.done <= self.start.steps:
            return super().rested(stats)
        sent, received = self.means.moved
        return replace(stats, bytes_sent=sent, bytes_received=received, control_bytes=received, node_bytes=self._taken())

    def published(self, delivered: Delivered | None, stats: Stats, *, sound: bool) -> Stats:
        return replace(stats, node_bytes=stats.node_bytes + self._taken())

    def _taken(self) -> int:
        """The bytes of the averages since the last call."""
        taken, self._inside = self._inside, 0
        return taken

    # Between steps

    def shift(self, by: torch.Tensor) -> None:
        self.aggregator.shift(by)

    def left(self) -> torch.Tensor:
        """What the node still has to add to the shared weights, and the error that each rank remembers."""
        drift, reducer = self.drift(), self.reducer
        drift[torch.from_numpy(self.aggregator.owned())] += torch.from_numpy(reducer.error * np.float32(self.exchange.size))
        return drift

    def sample(self) -> torch.Tensor | None:
        """Only one rank of a node returns its drift, because the others have the same."""
        return self.drift() if self.aggregator.nodes.place == 0 else None

    def restore(self, kept: torch.Tensor) -> None:
        """Load what this node saved, or, from a save on other nodes, the mean of what its ranks had."""
        super().restore(kept)
        self.aggregator.nodes.meet()  # all ranks have written the shared weights
        if not self.aggregator.same_in_node():
            mean = self.weights.flat()
            self.aggregator.average(mean)
            self.weights.set_flat(mean)
