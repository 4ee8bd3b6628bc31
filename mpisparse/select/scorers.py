"""Scorers: a key for every element, updated in the pass that accumulates.

A scorer adds a step's gradient to the accumulator, collects candidates in the same pass, and provides the keys that are
compared with thresholds. Only the step calls it, in the order of the methods below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpisparse.arrays import Bytes, Floats, Ints, State
from mpisparse.backends.flat import Pieces, Slot, add_sparse_, in_order, zeros
from mpisparse.errors import ConfigurationError, GradientError
from mpisparse.select.candidates import Candidates, Keys
from mpisparse.select.threshold import FIRST_GROWTH
from mpisparse.select.view import VectorKeys, read_only

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend

    Exempt = Callable[[str], AbstractContextManager[None]]
    Lap = Callable[[str], None]

DensePieces = tuple[NDArray[np.uint64], Ints, Bytes]  # addresses, ends and kinds of dense pieces


class Scorer:
    """The protocol, with defaults for a scorer that remembers nothing besides the accumulator.

    prior: the logarithm of the expected growth of keys from the first step to the second. Values in an accumulator add
    up, an average does not. by_magnitude: whether keys are the accumulator's magnitudes, so that unsent elements grow
    until they are sent. tags: one byte per element; the tags of selected elements are sent along with their indices.
    """

    prior: float = 0.0
    by_magnitude: bool = False
    follows: bool = False  # whether sent() does anything; set by __init_subclass__, as the next two are
    tells: bool = False  # whether details() returns anything
    asks: bool = False  # whether ready() does anything
    peeks: bool = False  # whether peek() works
    tags: Any = None
    cause: Exception | None = None  # the exception behind the last report of ready()
    acc: Floats
    keys: Keys  # what elements are compared by
    unsent: Floats | None = None  # the values to be sent, in magnitude, if they are not the accumulator; read-only
    take: Callable[[Ints], Floats] | None = None  # returns the values to send at an index, if not the accumulator's

    def __init_subclass__(cls) -> None:
        """Note which hooks a scorer has, so that a step calls no others."""
        cls.follows, cls.tells, cls.asks = (
            getattr(cls, name) is not getattr(Scorer, name) for name in ("sent", "details", "ready")
        )

    def ready(self, exempt: Exempt, lap: Lap) -> str:
        """Wait for what the step needs from this rank alone; return why it cannot go on, or an empty text.

        `exempt(phase)` exempts a long phase from the watchdog; `lap(phase)` charges the time since the last lap to a phase.
        """
        return ""

    def accumulate(self, pieces: Pieces | None, lo: int, hi: int, floor: float) -> Candidates:
        """Add the gradient (None: it was added during backward), and collect what reaches the floor in [lo, hi)."""
        raise NotImplementedError

    def peek(self, pieces: Pieces | None, lo: int, hi: int, floor: float) -> Candidates:
        """What accumulate() will collect in [lo, hi); changes nothing. Only if `peeks`, and only for dense pieces."""
        raise NotImplementedError

    def add(self, i: int, slot: Slot, grad: torch.Tensor) -> int:
        """Add one parameter's gradient during backward; return a flat index whose sum is not finite, or -1."""
        raise NotImplementedError

    def depart(self, backend: Backend, index: Ints) -> Floats:
        """Take values out of the accumulator for a delivery in flight; look() finds nothing there then."""
        values: Floats = backend.empty(len(index), np.float32)
        backend.take(self.acc, index, values)
        return values

    def give_back(self, backend: Backend, index: Ints, values: Floats) -> None:
        """Put back values that depart() took out, because they were not delivered."""
        backend.add_at(self.acc, index, values)

    def figures(self) -> tuple[float, ...]:
        """Numbers of this rank that the step averages over ranks."""
        return ()

    def received(self, index: Ints, tags: Bytes) -> None:
        """Store the tags that came with the ranks' selections."""

    def sent(self, index: Ints) -> None:
        """Note that these elements were sent; the step ends."""

    def details(self) -> dict[str, float]:
        """Figures for the statistics beyond those of all schemes."""
        return {}

    def memories(self) -> dict[str, Any]:
        """Further vectors, besides the accumulator, that elements are compared by."""
        return {}

    def owing(self, lo: int, hi: int) -> Floats:
        """This rank's residual in [lo, hi), to be read before anything changes it."""
        return self.acc[lo:hi]

    def take_over(self, backend: Backend, values: Floats) -> None:
        """Add another rank's residual, which is on the host, to this one's."""
        self.acc += backend.from_host(values)

    def close(self) -> None:
        """End background work."""

    def state(self) -> State:
        """What the next step depends on besides the accumulator."""
        return {}

    def check(self, state: State) -> None:
        """Raise ConfigurationError unless load() could take the state."""

    def load(self, state: State) -> None:
        """Load a state that state() returned."""

    def resize(self, states: Sequence[State]) -> State:
        """The state of a rank that takes over from several, or shares one, on another number of ranks."""
        return {key: states[0][key] for key in self.state()}


class Magnitude(Scorer):
    """The accumulator's magnitudes: no extra pass, no extra memory."""

    prior = FIRST_GROWTH
    by_magnitude = True

    def __init__(self, residual: torch.Tensor, backend: Backend) -> None:
        self.residual = residual
        self.backend: Any = backend
        self.acc = backend.array_of(residual)
        self.keys = VectorKeys(backend, read_only(self.acc))
        self.peeks = type(self) is Magnitude and isinstance(self.acc, np.ndarray)
        self.add_soon = getattr(backend, "accumulate_soon", None)

    def accumulate(self, pieces: Pieces | None, lo: int, hi: int, floor: float) -> Candidates:
        if pieces is None:
            return Candidates(*self.backend.select(self.acc, lo, hi, floor))
        if not pieces.sparse:
            return Candidates(
                *self.backend.accumulate_select(self.acc, pieces.pointers, pieces.ends, pieces.kinds, lo, hi, floor)
            )
        bads = [add_sparse_(self.residual, slot, grad) for slot, grad in pieces.sparse]
        found = Candidates(*self.backend.accumulate_select(self.acc, *pieces.dense, lo, hi, floor))
        return found._replace(bad=next((bad for bad in (*bads, found.bad) if bad >= 0), -1))

    def peek(self, pieces: Pieces | None, lo: int, hi: int, floor: float) -> Candidates:
        if pieces is None:
            return Candidates(*self.backend.select(self.acc, lo, hi, floor))
        return Candidates(*self.backend.peek_select(self.acc, *pieces.dense, lo, hi, floor))

    def add(self, i: int, slot: Slot, grad: torch.Tensor) -> int:
        if grad.layout is not torch.strided:
            return add_sparse_(self.residual, slot, grad.coalesce())
        source, part = in_order(slot, grad), self.acc[slot.begin : slot.end]
        if self.add_soon is not None:
            return int(self.add_soon(part, source, slot.sent_kind))
        bad = int(self.backend.accumulate(part, source.data_ptr(), slot.sent_kind))
        return bad + slot.begin if bad >= 0 else bad


class WholeGradient(Scorer):
    """A scorer that learns from each step's gradient, and so must see it once and whole.

    A parameter without a gradient has one of zeros. Gradients given to a refused step stay; backward may add more.
    """

    def __init__(self, residual: torch.Tensor, backend: Backend, slots: Sequence[Slot]) -> None:
        self.residual = residual
        self.backend: Any = backend
        self.acc = backend.array_of(residual)
        self.slots = slots
        self.seen = np.zeros(len(slots), dtype=bool)  # has a gradient since the last step that was done
        self.whole = np.zeros(len(slots), dtype=bool)  # has a gradient since the last step that was asked for

    def ready(self, exempt: Exempt, lap: Lap) -> str:
        self.whole[:] = False
        return ""

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

    def accumulate(self, pieces: Pieces | None, lo: int, hi: int, floor: float) -> Candidates:
        if pieces is not None:
            whole = pieces.densified()  # must live while the pass reads it
            return self._pass(whole.dense, lo, hi, floor)
        self._complete()
        return self.keys.select(lo, hi, floor)

    def _pass(self, dense: DensePieces, lo: int, hi: int, floor: float) -> Candidates:
        """Add all gradients, and collect what reaches the floor in [lo, hi)."""
        raise NotImplementedError

    def _update(self, slot: Slot, pointer: int) -> int:
        """Add one parameter's gradient (0: one of zeros); return where in it the accumulator is not finite, or -1."""
        raise NotImplementedError

    def _complete(self) -> None:
        """With accumulate="backward", add zeros for the parameters that had no gradient."""
        for i in np.flatnonzero(~self.seen).tolist():
            self._update(self.slots[i], 0)
        self.seen[:] = False

    def load(self, state: State) -> None:
        self.seen[:] = self.whole[:] = False


class Remembering(WholeGradient):
    """A scorer that remembers one number per element."""

    remembers: str
    positive = False

    def __init__(self, residual: torch.Tensor, backend: Backend, slots: Sequence[Slot]) -> None:
        super().__init__(residual, backend, slots)
        self.memory: Floats = backend.array_of(zeros(len(residual), torch.float32, residual.device))

    def memories(self) -> dict[str, Any]:
        return {self.remembers: self.memory}

    def state(self) -> State:
        return {f"mean.{self.remembers}": self.memory}

    def check(self, state: State) -> None:
        """Raise ConfigurationError unless the memory in the state fits this vector."""
        array = np.asarray(state[f"mean.{self.remembers}"])
        fits = array.shape == (len(self.memory),) and bool(np.isfinite(array).all())
        if not fits or (self.positive and (array < 0).any()):
            raise ConfigurationError(f"the {self.remembers} in the state does not fit {len(self.memory)} elements")

    def load(self, state: State) -> None:
        super().load(state)
        self.memory[:] = self.backend.from_host(np.asarray(state[f"mean.{self.remembers}"], dtype=np.float32))

    def resize(self, states: Sequence[State]) -> State:
        """The mean of the memories taken over."""
        return {f"mean.{self.remembers}": mean_of(states, f"mean.{self.remembers}")}


def mean_of(states: Sequence[State], key: str) -> Floats:
    """The mean of one array over several states, summed in double precision."""
    rows = [np.asarray(state[key], dtype=np.float64) for state in states]
    mean: Floats = np.stack(rows).mean(0).astype(np.float32)
    return mean


class Average(Remembering):
    """A moving average of the gradients' magnitudes: rate x |gradient| + (1 - rate) x average, once per step."""

    remembers, positive = "average", True

    def __init__(self, residual: torch.Tensor, backend: Backend, slots: Sequence[Slot], rate: float) -> None:
        super().__init__(residual, backend, slots)
        self.rate = rate
        self.keys = VectorKeys(backend, read_only(self.memory))

    def _pass(self, dense: DensePieces, lo: int, hi: int, floor: float) -> Candidates:
        return Candidates(*self.backend.average_select(self.acc, self.memory, self.rate, *dense, lo, hi, floor))

    def _update(self, slot: Slot, pointer: int) -> int:
        part = slice(slot.begin, slot.end)
        one = (np.array([pointer], np.uint64), np.array([slot.end - slot.begin]), np.array([slot.sent_kind], np.uint8))
        *_, bad = self.backend.average_select(self.acc[part], self.memory[part], self.rate, *one, 0, 0, 0.0)
        return int(bad)


class Corrected(Remembering):
    """Accumulate the gradient's momentum, factor x momentum + gradient, instead of the gradient; sending clears it.

    `clip`: the largest norm of this rank's gradient. accumulate="backward" never has the whole gradient, and so no norm.
    """

    prior = FIRST_GROWTH
    by_magnitude = True
    remembers = "momentum"

    def __init__(
        self, residual: torch.Tensor, backend: Backend, slots: Sequence[Slot], factor: float, clip: float | None
    ) -> None:
        super().__init__(residual, backend, slots)
        self.factor = np.float32(factor)
        self.clip = clip
        self.keys = VectorKeys(backend, read_only(self.acc))

    def accumulate(self, pieces: Pieces | None, lo: int, hi: int, floor: float) -> Candidates:
        if pieces is None:
            self._complete()
        else:
            whole = pieces.densified().clipped(self.clip)
            self.memory *= self.factor
            self.backend.accumulate_select(self.memory, *whole.dense, 0, 0, 0.0)
            with np.errstate(over="ignore", invalid="ignore"):
                self.acc += self.memory
        *_, bad = self.backend.select(self.acc, 0, len(self.acc), float("inf"))
        return self.keys.select(lo, hi, floor)._replace(bad=bad)

    def _update(self, slot: Slot, pointer: int) -> int:
        part = slice(slot.begin, slot.end)
        self.memory[part] *= self.factor
        bad = int(self.backend.accumulate(self.memory[part], pointer, slot.sent_kind)) if pointer else -1
        with np.errstate(over="ignore", invalid="ignore"):
            self.acc[part] += self.memory[part]
        return bad

    def sent(self, index: Ints) -> None:
        """Clear the momentum of sent elements, so that stale momentum does not keep moving them."""
        zeros = self.backend.empty(len(index), np.float32)
        self.backend.fill(zeros, 0.0)
        self.backend.put(self.memory, index, zeros)
