"""Everything in every step: what the others are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpisparse.backends.protocol import Backend
from mpisparse.core.aggregator import Aggregator
from mpisparse.core.records import Parts
from mpisparse.core.stages import Sent, Stage
from mpisparse.errors import ConfigurationError
from mpisparse.schemes.companion import Scheme, Site
from mpisparse.schemes.options import Options
from mpisparse.select.everything import Everything
from mpisparse.select.scorers import Magnitude
from mpisparse.wire.reduction import Reduced, Whole


class AllSent(Stage):
    """Nothing waits."""

    def settle(self, backend: Backend, acc: Any, union: Any, sent: Sent, reduced: Reduced) -> Stage:
        backend.fill(acc, 0.0)
        return self


@dataclass(frozen=True)
class Dense(Options):
    """All elements in one Allreduce."""

    on_device = True
    density: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.density != 1.0:
            raise ConfigurationError(f'scheme "dense" sends everything: density must be 1, got {self.density!r}')
        if self.codec != "fp32":
            raise ConfigurationError(f'scheme "dense" sends float32 only: codec must be "fp32", got {self.codec!r}')

    def codecs(self) -> Sequence[str]:
        return ["fp32"]

    def build(self, parts: Parts, site: Site | None = None) -> Scheme:
        aggregator = Aggregator(
            parts,
            scorer=Magnitude(parts.residual, parts.backend),
            selection=Everything(len(parts.residual)),
            reducer=Whole(parts.sink.whole),
            stages=[AllSent()],
        )
        return Scheme(aggregator)
