"""Everything in every step: what the others are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpisparse.core.records import Parts
from mpisparse.core.step import DenseStep
from mpisparse.errors import ConfigurationError
from mpisparse.schemes.options import Options, Step


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

    def build(self, parts: Parts) -> Step:
        return DenseStep(parts)
