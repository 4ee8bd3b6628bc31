"""Outer steps: how the shared weights G follow what the ranks' weights W have become, and W starts from G again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mpisparse.arrays import Floats, Ints, State
from mpisparse.backends.flat import Pieces
from mpisparse.backends.protocol import Backend
from mpisparse.core.stages import Sent, Stage
from mpisparse.errors import ConfigurationError
from mpisparse.schemes.drift.apart import Difference
from mpisparse.schemes.drift.weights import OwnWeights, flat_view
from mpisparse.select.candidates import NONE, Candidates
from mpisparse.select.scorers import Scorer, mean_of
from mpisparse.select.view import VectorKeys, read_only
from mpisparse.wire.reduction import Reduced


def set_weights(weights: OwnWeights, values: Floats) -> None:
    """Set W, in the middle of an exchange."""
    pieces = weights.to_move()
    for slot, target in zip(weights.places.slots, pieces.alive if pieces is not None else (), strict=pieces is not None):
        flat_view(slot, target).copy_(torch.from_numpy(values[slot.begin : slot.end]))


def check_vector(name: str, value: Any, n: int) -> None:
    """Raise ConfigurationError unless this is a finite vector of n elements."""
    array = np.asarray(value)
    if array.shape != (n,) or not np.isfinite(array).all():
        raise ConfigurationError(f"the {name} in the state must be {n} finite numbers")


class Nesterov(Stage):
    """G takes a step of SGD with Nesterov momentum along the mean of all ranks' W - G; W is then G and what a codec left.

    velocity: the momentum, the same on all ranks.
    """

    def __init__(self, weights: OwnWeights, n: int, rate: float, momentum: float) -> None:
        self.weights = weights
        self.rate, self.momentum = np.float32(rate), np.float32(momentum)
        self.velocity: Floats = np.zeros(n, dtype=np.float32)

    def settle(self, backend: Any, acc: Any, union: Any, sent: Sent, reduced: Reduced) -> Stage:
        pieces, mean = self.weights.to_move(), reduced.mean.decoded(backend)
        left = (
            np.zeros_like(acc) if pieces is None else Difference(backend, pieces, acc).copy() - reduced.own.decoded(backend)
        )
        self.velocity *= self.momentum
        self.velocity += mean
        acc += self.rate * (mean + self.momentum * self.velocity)
        set_weights(self.weights, acc + left)
        return self

    def state(self) -> State:
        return {"velocity": self.velocity}

    def check(self, state: State, n: int) -> None:
        check_vector("velocity", state["velocity"], n)

    def loaded(self, state: State) -> Stage:
        self.velocity[:] = state["velocity"]
        return self


class Deferred(Scorer):
    """W - G plus a share of what earlier exchanges left, of which the largest elements are sent.

    waiting: what was left. sums: the same with the new W - G; it waits from when the exchange is done.
    """

    by_magnitude = True

    def __init__(self, shared: Floats, backend: Backend, decay: float) -> None:
        self.acc = shared
        self.backend: Any = backend
        self.decay = np.float32(decay)
        self.waiting, self.sums = np.zeros((2, len(shared)), dtype=np.float32)
        self.keys = VectorKeys(backend, read_only(self.sums))
        self.take = self._values_at

    def accumulate(self, pieces: Pieces | None, lo: int, hi: int, floor: float) -> Candidates:
        assert pieces is not None
        np.multiply(self.waiting, self.decay, out=self.sums)
        with np.errstate(over="ignore", invalid="ignore"):
            self.sums += Difference(self.backend, pieces, self.acc).copy()
        *_, bad = self.backend.select(self.sums, 0, len(self.sums), float("inf"))
        return NONE._replace(bad=bad)

    def _values_at(self, index: Ints) -> Floats:
        values: Floats = self.sums[index]
        return values

    def keep(self, index: Ints, own: Floats) -> None:
        """All waits but what was sent."""
        self.waiting[:] = self.sums
        self.waiting[index] -= own

    def state(self) -> State:
        return {"waiting_drift": self.waiting}

    def check(self, state: State) -> None:
        check_vector("waiting drift", state["waiting_drift"], len(self.waiting))

    def load(self, state: State) -> None:
        self.waiting[:] = state["waiting_drift"]

    def resize(self, states: Sequence[State]) -> State:
        return {"waiting_drift": mean_of(states, "waiting_drift")}


class Plain(Stage):
    """G moves by a rate times what all ranks sent; W is then G. What a rank did not send waits in the scorer."""

    def __init__(self, weights: OwnWeights, scorer: Deferred, rate: float) -> None:
        self.weights = weights
        self.scorer = scorer
        self.rate = np.float32(rate)

    def settle(self, backend: Any, acc: Any, union: Any, sent: Sent, reduced: Reduced) -> Stage:
        self.scorer.keep(sent.index, reduced.own)
        acc[reduced.index] += self.rate * reduced.mean
        set_weights(self.weights, acc)
        return self
