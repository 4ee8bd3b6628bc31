"""The parts of DeMo's step: momentum of each rank's own, its largest waves for all ranks, the sign of their mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mpisparse.arrays import Floats, Ints
from mpisparse.backends.flat import Pieces, Slot
from mpisparse.backends.protocol import Backend
from mpisparse.comm.exchange import Exchange
from mpisparse.comm.regions import Region
from mpisparse.core.stages import Sent, Stage
from mpisparse.schemes.demo.cosines import Cosines
from mpisparse.select.candidates import NONE, Candidates
from mpisparse.select.scorers import WholeGradient
from mpisparse.select.view import VectorKeys
from mpisparse.wire.gathered import Gathered
from mpisparse.wire.reduction import Reduced, Reducer


class Waves(WholeGradient):
    """The accumulator holds decay x momentum + gradient; elements are compared by its coefficients."""

    by_magnitude = True

    def __init__(
        self, residual: torch.Tensor, backend: Backend, slots: Sequence[Slot], cosines: Cosines, decay: float
    ) -> None:
        super().__init__(residual, backend, slots)
        self.cosines = cosines
        self.decay = np.float32(decay)
        self.keys = VectorKeys(backend, np.empty(0, dtype=np.float32))
        self.take = self._values_at

    def accumulate(self, pieces: Pieces | None, lo: int, hi: int, floor: float) -> Candidates:
        if pieces is None:
            self._complete()
        else:
            whole = pieces.densified()
            self.acc *= self.decay
            self.backend.accumulate_select(self.acc, *whole.dense, 0, 0, 0.0)
        *_, bad = self.backend.select(self.acc, 0, len(self.acc), float("inf"))
        self.keys = VectorKeys(self.backend, self.cosines.forward(self.residual).numpy())
        return NONE._replace(bad=bad)

    def _update(self, slot: Slot, pointer: int) -> int:
        part = self.acc[slot.begin : slot.end]
        part *= self.decay
        return int(self.backend.accumulate(part, pointer, slot.sent_kind)) if pointer else -1

    def _values_at(self, index: Ints) -> Floats:
        values: Floats = self.keys.vector[index]
        return values


@dataclass(frozen=True)
class SignOfMean(Reducer):
    """The sign of the vector whose coefficients are the mean of all ranks', written into `target()`."""

    gathered: Gathered
    cosines: Cosines
    target: Callable[[], torch.Tensor]

    def reduce(self, exchange: Exchange, backend: Backend, index: Any, values: Any, regions: Sequence[Region]) -> Reduced:
        reduced = self.gathered.reduce(exchange, backend, index, values, regions)
        coefficients = torch.zeros(
            self.gathered.n, dtype=torch.float64
        )  # signs of nearly nothing must be alike on all ranks
        coefficients[torch.from_numpy(reduced.index)] = torch.from_numpy(reduced.mean).double()
        mean = self.target()
        mean.copy_(self.cosines.inverse(coefficients).sign_())
        everything: Any = range(self.gathered.n)
        return reduced._replace(index=everything, mean=backend.array_of(mean))


class Leaving(Stage):
    """What was sent leaves the momentum."""

    def __init__(self, cosines: Cosines) -> None:
        self.cosines = cosines

    def settle(self, backend: Any, acc: Any, union: Any, sent: Sent, reduced: Reduced) -> Stage:
        coefficients = torch.zeros(len(acc))
        coefficients[torch.from_numpy(sent.index)] = torch.from_numpy(reduced.own)
        acc -= self.cosines.inverse(coefficients).numpy()
        return self
