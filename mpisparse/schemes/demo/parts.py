"""The parts of DeMo's step: each rank's own momentum, its largest coefficients sent to all, the sign of their mean."""

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
        self.keys = VectorKeys(backend, self.acc[:0])
        self.take = self._values_at

    def accumulate(self, pieces: Pieces | None, lo: int, hi: int, floor: float) -> Candidates:
        if pieces is None:
            self._complete()
        else:
            whole = pieces.densified()
            self.acc *= self.decay
            self.backend.accumulate_select(self.acc, *whole.dense, 0, 0, 0.0)
        *_, bad = self.backend.select(self.acc, 0, len(self.acc), float("inf"))
        self.keys = VectorKeys(self.backend, self.backend.array_of(self.cosines.forward(self.residual)))
        return NONE._replace(bad=bad)

    def _update(self, slot: Slot, pointer: int) -> int:
        part = self.acc[slot.begin : slot.end]
        part *= self.decay
        return int(self.backend.accumulate(part, pointer, slot.sent_kind)) if pointer else -1

    def _values_at(self, index: Ints) -> Floats:
        values: Floats = self.backend.values_at(self.keys.vector, index)
        return values


@dataclass(frozen=True)
class SignOfMean(Reducer):
    """The sign of the vector whose coefficients are the mean of all ranks', written into `target()`.

    host: the host's kernels; indices and coefficients are exchanged on the host.
    """

    gathered: Gathered
    host: Backend
    cosines: Cosines
    target: Callable[[], torch.Tensor]

    def reduce(self, exchange: Exchange, backend: Backend, index: Any, values: Any, regions: Sequence[Region]) -> Reduced:
        here = backend.to_host(index), backend.to_host(values)
        reduced, mean = self.gathered.reduce(exchange, self.host, *here, regions), self.target()
        coefficients = spread(self.gathered.n, reduced.index, reduced.mean, torch.float64, mean.device)
        mean.copy_(self.cosines.inverse(coefficients).sign_())  # near zero, too, the sign must be the same on all ranks
        everything: Any = range(self.gathered.n)
        return reduced._replace(index=everything, mean=backend.array_of(mean))


class Leaving(Stage):
    """Removes what was sent from the momentum."""

    def __init__(self, cosines: Cosines, device: torch.device) -> None:
        self.cosines = cosines
        self.device = device

    def settle(self, backend: Any, acc: Any, union: Any, sent: Sent, reduced: Reduced) -> Stage:
        coefficients = spread(len(acc), backend.to_host(sent.index), reduced.own, torch.float32, self.device)
        acc -= backend.array_of(self.cosines.inverse(coefficients))
        return self


def spread(n: int, index: Ints, values: Floats, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A vector of zeros with values of the host at an index."""
    vector = torch.zeros(n, dtype=dtype, device=device)
    vector[torch.from_numpy(index).to(device)] = torch.from_numpy(values).to(device, dtype)
    return vector
