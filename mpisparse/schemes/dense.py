"""Everything in every step: what the others are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mpisparse.arrays import State
from mpisparse.backends.flat import Held, Pieces, Slot, zeros
from mpisparse.backends.protocol import Backend
from mpisparse.comm.regions import even_regions
from mpisparse.core.aggregator import Aggregator
from mpisparse.core.records import Parts
from mpisparse.core.stages import Sent, Stage
from mpisparse.errors import ConfigurationError
from mpisparse.schemes.companion import Scheme, Site
from mpisparse.schemes.options import Options
from mpisparse.select.candidates import NONE, Candidates
from mpisparse.select.everything import Everything
from mpisparse.select.scorers import Magnitude, Scorer
from mpisparse.select.view import VectorKeys
from mpisparse.wire.codecs import CODECS, codec_names
from mpisparse.wire.feedback import WholeAtOwners
from mpisparse.wire.reduction import Divided, Reduced, Reducer, Whole


class Straight(Magnitude):
    """Gradients go where their mean goes, divided by the number of ranks, unless something waits in the accumulator."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts.residual, parts.backend)
        self.parts = parts
        self.waits = False
        self.usual = self.keys

    def accumulate(self, pieces: Pieces | None, lo: int, hi: int, floor: float) -> Candidates:
        frozen = bool(self.parts.held.stretches)
        if pieces is None or pieces.sparse or self.waits or frozen:
            self.keys, self.waits = self.usual, frozen
            return super().accumulate(pieces, lo, hi, floor)
        backend: Any = self.backend
        target = backend.array_of(self.parts.sink.whole())
        bad = backend.divide_into(target, *pieces.dense, self.parts.exchange.size)
        self.keys = VectorKeys(backend, Divided(target))  # type: ignore[arg-type]  # nothing is selected in it
        return NONE._replace(bad=bad)

    def add(self, i: int, slot: Slot, grad: torch.Tensor) -> int:
        self.waits = True
        return super().add(i, slot, grad)

    def load(self, state: State) -> None:
        self.waits = True


class AllSent(Stage):
    """Nothing waits but what a codec left."""

    def __init__(self, held: Held) -> None:
        self.held = held

    def settle(self, backend: Backend, acc: Any, union: Any, sent: Sent, reduced: Reduced) -> Stage:
        if isinstance(sent.values, Divided):
            return self
        if reduced.own is None:
            backend.fill(acc, 0.0)
            return self
        reduced.own.subtract_from(backend, acc)
        for start, stop in self.held.stretches:  # a codec makes something of the zeros there; it returns to all alike
            rest = acc[start:stop]
            rest += reduced.mean[start:stop]
            backend.fill(reduced.mean[start:stop], 0.0)  # nothing of it is published, nor rounded
        return self


@dataclass(frozen=True)
class Dense(Options):
    """All elements in every step: float32 in one Allreduce, other codecs through owners, with error feedback both ways."""

    on_device = True
    density: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.density != 1.0:
            raise ConfigurationError(f'scheme "dense" sends everything: density must be 1, got {self.density!r}')
        if CODECS[self.codec].blended:
            raise ConfigurationError(
                f'scheme "dense" leaves momentum to the optimizer: codec {self.codec!r} would blend what is sent with what '
                "was sent before; choose it without momentum-"
            )

    def codecs(self) -> Sequence[str]:
        return codec_names(blended=False)

    def build(self, parts: Parts, site: Site | None = None) -> Scheme:
        aggregator = Aggregator(
            parts,
            scorer=self._scorer(parts),
            selection=Everything(len(parts.residual)),
            reducer=self._reducer(parts),
            stages=[AllSent(parts.held)],
        )
        return Scheme(aggregator)

    def _scorer(self, parts: Parts) -> Scorer:
        """Nothing can be left of float32; what rounding to a parameter's type leaves waits in the accumulator."""
        exact = self.codec == "fp32" and all(slot.dtype is torch.float32 for slot in parts.slots)
        straight = exact and parts.backend.name != "cuda"
        return Straight(parts) if straight else Magnitude(parts.residual, parts.backend)

    def _reducer(self, parts: Parts) -> Reducer:
        n, exchange = len(parts.residual), parts.exchange
        if self.codec == "fp32":
            return Whole(parts.sink.whole)
        region = even_regions(n, exchange.size)[exchange.rank]
        error, spare = (zeros(region.hi - region.lo, torch.float32, parts.residual.device) for _ in range(2))
        array_of = parts.backend.array_of
        return WholeAtOwners(CODECS[self.codec], array_of(error), n, spare=array_of(spare), target=parts.sink.whole)
