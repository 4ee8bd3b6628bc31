"""The companion of exchanges that keep more for later than W - G."""

from __future__ import annotations

import torch

from mpisparse.schemes.drift.companion import Drifting
from mpisparse.schemes.local.outer import Deferred


class LocalSteps(Drifting):
    """As drift's companion; the final exchange also sends what earlier ones left."""

    def left(self) -> torch.Tensor:
        scorer = self.aggregator.works.scorer
        assert isinstance(scorer, Deferred)
        drift = self.drift()
        self.backend.add(self.backend.array_of(drift), scorer.waiting)
        return drift

    def forget(self) -> None:
        scorer = self.aggregator.works.scorer
        assert isinstance(scorer, Deferred)
        scorer.waiting[:] = 0.0
