"""Drift by any score: to a scorer, the movement of the weights since the last exchange is the gradient.

So W - G is the accumulated value that waits to be sent, and scores of gradients become scores of weights. The sign is
that of a gradient: the scorer's accumulator is G - W.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpisparse.arrays import Floats, Ints, State
from mpisparse.backends.flat import Pieces, pieces_of
from mpisparse.backends.protocol import Backend
from mpisparse.errors import ConfigurationError
from mpisparse.schemes.drift.apart import Difference, Distance
from mpisparse.select.around import Around
from mpisparse.select.candidates import NONE, Candidates
from mpisparse.select.scorers import mean_of
from mpisparse.select.view import read_only

if TYPE_CHECKING:
    from mpisparse.select.scorers import Scorer


class ScoredDistance(Around):
    """Scores of |W - G|, by a scorer whose accumulator is `waiting`; the values come from the weights themselves."""

    def __init__(
        self, shared: Floats, backend: Backend, where: Callable[[], Pieces | None], inner: Scorer, waiting: torch.Tensor
    ) -> None:
        super().__init__(inner)
        self.distance = Distance(shared, backend, where)
        self.backend = backend
        self.acc = shared
        self.waiting = backend.array_of(waiting)
        self.unsent = read_only(self.waiting)
        self.take = self.distance.take
        self.prior = 0.0

    def accumulate(self, pieces: Pieces | None, lo: int, hi: int, floor: float) -> Candidates:
        assert pieces is not None
        bad = self.distance.accumulate(pieces, 0, len(self.acc), float("inf")).bad
        if bad >= 0:  # learn nothing from non-finite weights
            return NONE._replace(bad=bad)
        now = -Difference(self.backend, pieces, self.acc).copy()
        moved: Any = now - self.waiting
        moved = moved if isinstance(moved, torch.Tensor) else torch.from_numpy(moved)
        bad = self.inner.accumulate(pieces_of(moved), 0, 0, 0.0).bad
        self.waiting[:] = now  # the same as the sum, without its rounding
        return self.keys.select(lo, hi, floor)._replace(bad=bad)

    def depart(self, backend: Backend, index: Ints) -> Floats:
        return self.distance.depart(backend, index)

    def give_back(self, backend: Backend, index: Ints, values: Floats) -> None:
        """Nothing to do: they are still in the weights."""

    def lost(self, index: Ints, own: Floats) -> None:
        """Remove what was sent from W - G."""
        self.backend.add_at(self.waiting, index, own)

    def state(self) -> State:
        return {**super().state(), "waiting_drift": self.waiting}

    def check(self, state: State) -> None:
        waiting = np.asarray(state["waiting_drift"])
        if waiting.shape != self.waiting.shape or not np.isfinite(waiting).all():
            raise ConfigurationError(f"the waiting drift in the state must be {len(self.waiting)} finite numbers")
        super().check(state)

    def load(self, state: State) -> None:
        super().load(state)
        self.waiting[:] = self.backend.from_host(np.asarray(state["waiting_drift"], dtype=np.float32))

    def resize(self, states: Sequence[State]) -> State:
        return {**super().resize(states), "waiting_drift": mean_of(states, "waiting_drift")}
