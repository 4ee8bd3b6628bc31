"""What matters: a score for every element, kept up to date in the pass that accumulates.

A scorer adds a step's gradients into the accumulator, collects the candidates of that step, and knows by what elements are
compared with thresholds. `prior` is how much that is expected to grow from the first step to the second (its
logarithm): what waits in an accumulator adds up, an average does not. `tags` is a byte for every element of which those of
what is selected travel to all ranks, who hear of them; None: nothing travels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpisparse.arrays import Bytes, Floats, Ints
from mpisparse.core.agree import Inputs
from mpisparse.errors import ConfigurationError, GradientError
from mpisparse.model.layout import add_sparse_, in_order, zeros
from mpisparse.select.candidates import Found
from mpisparse.select.threshold import FIRST_GROWTH

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.exchange import Exchange
    from mpisparse.core.records import Clock
    from mpisparse.model.layout import Slot

Dense = tuple[NDArray[np.uint64], Ints, Bytes]  # dense gradients: addresses, ends, kinds


class Magnitude:
    """The magnitude of the accumulator: a view of it, with no pass and no memory of its own."""

    prior = FIRST_GROWTH
    tags: Bytes | None = None

    def __init__(self, residual: torch.Tensor, backend: Backend) -> None:
        self.residual = residual
        self.backend = backend
        self.acc: Floats = backend.array_of(residual)

    def trouble(self, clock: Clock) -> str | None:
        """Wait for what this step needs of this rank alone; why it cannot go on, or None if it can."""
        return None

    def prepare(self, exchange: Exchange, clock: Clock) -> None:
        """Do what a step needs before its gradients are added; collective."""

    def select(self, lo: int, hi: int, floor: float) -> Found:
        """What reaches the floor in [lo, hi)."""
        return Found(*self.backend.select(self.acc, lo, hi, floor))

    def histogram(self, lo: int, hi: int) -> Ints:
        """How much there is of what in [lo, hi), by exponent and three bits of mantissa."""
        return self.backend.histogram(self.acc, lo, hi)

    def accumulate(self, inputs: Inputs, lo: int, hi: int, floor: float) -> Found:
        """Add this step's gradients, if they are still to add, and collect what reaches the floor in [lo, hi)."""
        gradients = inputs.gradients
        if gradients is None:
            found = self.select(lo, hi, floor)
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

    def heard(self, index: Ints, tags: Bytes) -> None:
        """These tags came with what the ranks selected."""

    def sent(self, index: Ints) -> None:
        """These elements were sent. Nothing: their scores are what is left of them."""

    def details(self) -> dict[str, float]:
        """What the statistics of a step should say beyond what all schemes have in common."""
        return {}

    def memories(self) -> dict[str, Any]:
        """What elements are compared by beside the accumulator."""
        return {}

    def close(self) -> None:
        """End what goes on beside the step."""

    def state(self) -> dict[str, Any]:
        """Nothing: the residual is saved anyway."""
        return {}

    def check(self, state: dict[str, Any]) -> None:
        """Nothing could be wrong."""

    def load(self, state: dict[str, Any]) -> None:
        """Nothing to take."""


class WholeGradient(Magnitude):
    """A scorer that learns something of each step's gradient, and so must be given it once, whole.

    A parameter without a gradient has one of zeros. What it has when a step is refused stays, and backward may give more.
    """

    def __init__(self, residual: torch.Tensor, backend: Backend, slots: list[Slot]) -> None:
        super().__init__(residual, backend)
        self.slots = slots
        self.seen = np.zeros(len(slots), dtype=bool)  # since the last step that was done
        self.whole = np.zeros(len(slots), dtype=bool)  # since the last one that was asked for

    def trouble(self, clock: Clock) -> str | None:
        self.whole[:] = False
        return None

    def add(self, i: int, slot: Slot, grad: torch.Tensor) -> int:
        if self.whole[i]:
            raise GradientError(
                f"a second backward before step() gave {slot.name} another gradient, but a step's gradient is needed whole; "
                'pass accumulate="step"'
            )
        self.seen[i] = self.whole[i] = True
        source = in_order(slot, grad if grad.layout is torch.strided else grad.to_dense())
        bad = self._update(slot, source.data_ptr())
        return bad + slot.begin if bad >= 0 else bad

    def accumulate(self, inputs: Inputs, lo: int, hi: int, floor: float) -> Found:
        if inputs.gradients is None:
            self._complete()
            found = self.select(lo, hi, floor)
        else:
            gradients = inputs.gradients.densified()
            found = self._pass((gradients.pointers, gradients.ends, gradients.kinds), lo, hi, floor)
        inputs.note_nonfinite(found.bad)
        return found

    def _pass(self, dense: Dense, lo: int, hi: int, floor: float) -> Found:
        """Take all gradients, and collect what reaches the floor in [lo, hi)."""
        raise NotImplementedError

    def _update(self, slot: Slot, pointer: int) -> int:
        """Take one parameter's gradient; 0 is one of zeros. Returns where in it the accumulator is not finite, or -1."""
        raise NotImplementedError

    def _complete(self) -> None:
        """Path "backward": give the parameters that had no gradient theirs."""
        for i in np.flatnonzero(~self.seen).tolist():
            self._update(self.slots[i], 0)
        self.seen[:] = False

    def load(self, state: dict[str, Any]) -> None:
        self.seen[:] = self.whole[:] = False


class Remembering(WholeGradient):
    """A scorer that remembers one number for every element; on another number of ranks the mean of those taken over."""

    remembers: str
    positive = False

    def __init__(self, residual: torch.Tensor, backend: Backend, slots: list[Slot]) -> None:
        super().__init__(residual, backend, slots)
        self.memory: Floats = backend.array_of(zeros(len(residual), torch.float32, residual.device))

    def memories(self) -> dict[str, Any]:
        return {self.remembers: self.memory}

    def state(self) -> dict[str, Any]:
        return {f"mean.{self.remembers}": self.memory}

    def check(self, state: dict[str, Any]) -> None:
        """Raise ConfigurationError unless the memory in the state is one of this vector."""
        array = np.asarray(state[f"mean.{self.remembers}"])
        fits = array.shape == (len(self.memory),) and bool(np.isfinite(array).all())
        if not fits or (self.positive and (array < 0).any()):
            raise ConfigurationError(f"the {self.remembers} in the state does not fit {len(self.memory)} elements")

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.memory[:] = self.backend.from_host(np.asarray(state[f"mean.{self.remembers}"], dtype=np.float32))


class Average(Remembering):
    """A moving average of the gradients' magnitudes: rate x |gradient| + (1 - rate) x average, once a step."""

    prior = 0.0
    remembers, positive = "average", True

    def __init__(self, residual: torch.Tensor, backend: Backend, slots: list[Slot], rate: float) -> None:
        super().__init__(residual, backend, slots)
        self.rate = rate

    def select(self, lo: int, hi: int, floor: float) -> Found:
        return Found(*self.backend.select(self.memory, lo, hi, floor))

    def histogram(self, lo: int, hi: int) -> Ints:
        return self.backend.histogram(self.memory, lo, hi)

    def _pass(self, dense: Dense, lo: int, hi: int, floor: float) -> Found:
        return Found(*self.backend.average_select(self.acc, self.memory, self.rate, *dense, lo, hi, floor))

    def _update(self, slot: Slot, pointer: int) -> int:
        part = slice(slot.begin, slot.end)
        one = (np.array([pointer], np.uint64), np.array([slot.end - slot.begin]), np.array([slot.sent_kind], np.uint8))
        *_, bad = self.backend.average_select(self.acc[part], self.memory[part], self.rate, *one, 0, 0, 0.0)
        return int(bad)


class Corrected(Remembering):
    """What adds up is not the gradient but its momentum, factor x momentum + gradient; what is sent loses its momentum.

    `clip`: the largest norm of this rank's gradient; path "backward" has no whole gradient and so no norm.
    """

    remembers = "momentum"

    def __init__(
        self, residual: torch.Tensor, backend: Backend, slots: list[Slot], factor: float, clip: float | None
    ) -> None:
        super().__init__(residual, backend, slots)
        self.factor = np.float32(factor)
        self.clip = clip

    def accumulate(self, inputs: Inputs, lo: int, hi: int, floor: float) -> Found:
        if inputs.gradients is None:
            self._complete()
        else:
            gradients = inputs.gradients.densified().clipped(self.clip)
            self.memory *= self.factor
            self.backend.accumulate_select(self.memory, gradients.pointers, gradients.ends, gradients.kinds, 0, 0, 0.0)
            with np.errstate(over="ignore", invalid="ignore"):
                self.acc += self.memory
        *_, bad = self.backend.select(self.acc, 0, len(self.acc), float("inf"))
        inputs.note_nonfinite(bad)
        return Found(*self.backend.select(self.acc, lo, hi, floor))

    def _update(self, slot: Slot, pointer: int) -> int:
        part = slice(slot.begin, slot.end)
        self.memory[part] *= self.factor
        bad = int(self.backend.accumulate(self.memory[part], pointer, slot.sent_kind)) if pointer else -1
        with np.errstate(over="ignore", invalid="ignore"):
            self.acc[part] += self.memory[part]
        return bad

    def sent(self, index: Ints) -> None:
        """Their momentum ends too: what is stale must not go on moving them."""
        self.memory[index] = 0.0
