"""What matters: a score for every element, kept up to date in the pass that accumulates.

A scorer adds a step's gradients into the accumulator, collects the candidates of that step, and owns `scores`, the
vector that thresholds are compared with. `prior` is how much the scores are expected to grow from the first step to
the second (its logarithm): what waits in an accumulator adds up, an average does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpisparse.agree import Found, Inputs
from mpisparse.errors import ConfigurationError, GradientError
from mpisparse.flat import add_sparse_, in_order, zeros
from mpisparse.threshold import FIRST_GROWTH

if TYPE_CHECKING:
    from mpisparse.flat import Slot

Floats = NDArray[np.float32]


class Magnitude:
    """The magnitude of the accumulator: a view of it, with no pass and no memory of its own."""

    prior = FIRST_GROWTH
    whole = False

    def __init__(self, residual: torch.Tensor, backend: Any) -> None:
        self.residual = residual
        self.backend = backend
        self.acc: Floats = residual.numpy()
        self.scores = self.acc

    def accumulate(self, inputs: Inputs, lo: int, hi: int, floor: float) -> Found:
        """Add this step's gradients, if they are still to add, and collect what reaches the floor in [lo, hi)."""
        gradients = inputs.gradients
        if gradients is None:
            found = Found(*self.backend.select(self.acc, lo, hi, floor))
        else:
            for slot, grad in gradients.sparse:
                inputs.note_nonfinite(add_sparse_(self.residual, slot, grad))
            dense = (gradients.pointers, gradients.ends, gradients.kinds)
            found = Found(*self.backend.accumulate_select(self.acc, *dense, lo, hi, floor))
        inputs.note_nonfinite(found.bad)
        return found

    def add(self, i: int, slot: Slot, grad: torch.Tensor) -> int:
        """Add parameter i's gradient at once; a flat index where the accumulator is not finite now, or -1."""
        if grad.layout is not torch.strided:
            return add_sparse_(self.residual, slot, grad.coalesce())
        source = in_order(slot, grad)
        bad = int(self.backend.accumulate(self.acc[slot.begin : slot.end], source.data_ptr(), slot.sent_kind))
        return bad + slot.begin if bad >= 0 else bad

    def state(self) -> dict[str, Any]:
        """Nothing: the residual is saved anyway."""
        return {}

    def check(self, state: dict[str, Any]) -> None:
        """Nothing could be wrong."""

    def load(self, state: dict[str, Any]) -> None:
        """Nothing to take."""


class Average(Magnitude):
    """A moving average of the gradients' magnitudes: rate x |gradient| + (1 - rate) x average, once a step."""

    prior = 0.0
    whole = True

    def __init__(self, residual: torch.Tensor, backend: Any, slots: list[Slot], rate: float) -> None:
        super().__init__(residual, backend)
        self.slots = slots
        self.rate = rate
        self.scores = zeros(len(residual), torch.float32).numpy()
        self.seen = np.zeros(len(slots), dtype=bool)

    def accumulate(self, inputs: Inputs, lo: int, hi: int, floor: float) -> Found:
        gradients = inputs.gradients
        if gradients is None:
            for i in np.flatnonzero(~self.seen).tolist():  # a parameter without a gradient has one of zeros
                self._update(self.slots[i], 0)
            self.seen[:] = False
            found = Found(*self.backend.select(self.scores, lo, hi, floor))
        else:
            gradients = gradients.densified()
            dense = (gradients.pointers, gradients.ends, gradients.kinds)
            found = Found(*self.backend.average_select(self.acc, self.scores, self.rate, *dense, lo, hi, floor))
        inputs.note_nonfinite(found.bad)
        return found

    def add(self, i: int, slot: Slot, grad: torch.Tensor) -> int:
        if self.seen[i]:
            raise GradientError(
                f"a second backward before step() gave {slot.name} another gradient: its moving average needs the step's "
                'whole gradient at once; pass accumulate="step"'
            )
        self.seen[i] = True
        source = in_order(slot, grad if grad.layout is torch.strided else grad.to_dense())
        bad = self._update(slot, source.data_ptr())
        return bad + slot.begin if bad >= 0 else bad

    def _update(self, slot: Slot, pointer: int) -> int:
        part = slice(slot.begin, slot.end)
        one = (np.array([pointer], np.uint64), np.array([slot.end - slot.begin]), np.array([slot.sent_kind], np.uint8))
        *_, bad = self.backend.average_select(self.acc[part], self.scores[part], self.rate, *one, 0, 0, 0.0)
        return int(bad)

    def state(self) -> dict[str, Any]:
        """The average; on another number of ranks the mean of those of the ranks taken over."""
        return {"mean.average": self.scores}

    def check(self, state: dict[str, Any]) -> None:
        """Raise ConfigurationError unless the average in the state is one of this vector."""
        average = np.asarray(state["mean.average"])
        if average.shape != self.scores.shape or not np.isfinite(average).all() or (average < 0).any():
            raise ConfigurationError(f"the moving average in the state is not of {len(self.scores)} finite magnitudes")

    def load(self, state: dict[str, Any]) -> None:
        self.scores[:] = state["mean.average"]
        self.seen[:] = False
