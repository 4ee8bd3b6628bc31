"""Outer steps: the shared weights G follow the ranks' weights W, and W starts from G again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpisparse.arrays import Floats, Ints, State
from mpisparse.backends.flat import Pieces, Slot
from mpisparse.core.records import Parts
from mpisparse.core.stages import Sent, Stage
from mpisparse.errors import ConfigurationError
from mpisparse.schemes.drift.apart import Difference
from mpisparse.schemes.drift.weights import OwnWeights, flat_view
from mpisparse.select.candidates import NONE, Candidates
from mpisparse.select.scorers import Scorer, mean_of
from mpisparse.select.view import VectorKeys, read_only
from mpisparse.wire.reduction import Reduced


def set_weights(backend: Any, slots: Sequence[Slot], pieces: Pieces, values: Any) -> None:
    """Set W, during an exchange."""
    for slot, target in zip(slots, pieces.alive, strict=True):
        backend.array_of(flat_view(slot, target))[:] = values[slot.begin : slot.end]


def check_vector(name: str, value: Any, n: int) -> None:
    """Raise ConfigurationError unless this is a finite vector of n elements."""
    array = np.asarray(value)
    if array.shape != (n,) or not np.isfinite(array).all():
        raise ConfigurationError(f"the {name} in the state must be {n} finite numbers")


class Nesterov(Stage):
    """G takes a step of SGD with Nesterov momentum along the mean of all ranks' W - G; W is then G plus the codec's error.

    velocity: the momentum, the same on all ranks.
    """

    def __init__(self, weights: OwnWeights, parts: Parts, rate: float, momentum: float) -> None:
        self.weights = weights
        self.backend = parts.backend
        self.rate, self.momentum = np.float32(rate), np.float32(momentum)
        self.velocity: Any = parts.zeros(len(parts.residual), late=False)

    def settle(self, backend: Any, acc: Any, union: Any, sent: Sent, reduced: Reduced) -> Stage:
        pieces, mean = self.weights.to_move(), reduced.mean.decoded(backend)
        left: Any = None if pieces is None else Difference(backend, pieces, acc).copy()
        self.velocity *= self.momentum
        self.velocity += mean
        mean += self.velocity * self.momentum
        acc += mean * self.rate
        if pieces is not None:
            left -= reduced.own.decoded(backend)
            set_weights(backend, self.weights.places.slots, pieces, acc + left)
        return self

    def state(self) -> State:
        return {"velocity": self.velocity}

    def check(self, state: State, n: int) -> None:
        check_vector("velocity", state["velocity"], n)

    def loaded(self, state: State) -> Stage:
        self.velocity[:] = self.backend.from_host(np.asarray(state["velocity"], dtype=np.float32))
        return self


class Deferred(Scorer):
    """W - G plus a share of what earlier exchanges left; its largest elements are sent.

    waiting: what earlier exchanges left. sums: its share plus the new W - G, which is `waiting` after the exchange.
    """

    by_magnitude = True

    def __init__(self, parts: Parts, decay: float) -> None:
        self.acc = parts.acc
        self.backend: Any = parts.backend
        self.decay = np.float32(decay)
        self.waiting, self.sums = (parts.zeros(len(self.acc), late=False) for _ in range(2))
        self.keys = VectorKeys(self.backend, read_only(self.sums))
        self.take = self._values_at

    def accumulate(self, pieces: Pieces | None, lo: int, hi: int, floor: float) -> Candidates:
        assert pieces is not None
        self.sums[:] = self.waiting
        self.sums *= self.decay
        with np.errstate(over="ignore", invalid="ignore"):
            self.sums += Difference(self.backend, pieces, self.acc).copy()
        *_, bad = self.backend.select(self.sums, 0, len(self.sums), float("inf"))
        return NONE._replace(bad=bad)

    def owing(self, lo: int, hi: int) -> Floats:
        """What earlier exchanges left; W is G again after each of them."""
        waiting: Floats = self.waiting[lo:hi]
        return waiting

    def _values_at(self, index: Ints) -> Floats:
        values: Floats = self.backend.values_at(self.sums, index)
        return values

    def keep(self, index: Ints, own: Floats) -> None:
        """Keep all but what was sent."""
        self.waiting[:] = self.sums
        self.backend.add_at(self.waiting, index, -own)

    def state(self) -> State:
        return {"waiting_drift": self.waiting}

    def check(self, state: State) -> None:
        check_vector("waiting drift", state["waiting_drift"], len(self.waiting))

    def load(self, state: State) -> None:
        self.waiting[:] = self.backend.from_host(np.asarray(state["waiting_drift"], dtype=np.float32))

    def resize(self, states: Sequence[State]) -> State:
        return {"waiting_drift": mean_of(states, "waiting_drift")}


class Plain(Stage):
    """G moves by a rate times what all ranks sent; W is then G. The scorer keeps what a rank did not send."""

    def __init__(self, weights: OwnWeights, scorer: Deferred, rate: float) -> None:
        self.weights = weights
        self.scorer = scorer
        self.rate = np.float32(rate)

    def settle(self, backend: Any, acc: Any, union: Any, sent: Sent, reduced: Reduced) -> Stage:
        self.scorer.keep(sent.index, reduced.own)
        backend.add_at(acc, reduced.index, reduced.mean * self.rate)
        pieces = self.weights.to_move()
        if pieces is not None:
            set_weights(backend, self.weights.places.slots, pieces, acc)
        return self
