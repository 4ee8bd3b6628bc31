"""Weights against the shared ones: which are farthest apart, and how both move when the ranks have exchanged.

W are this rank's weights, G those that all ranks share, bit by bit. Rank r sends q = Q(W - G) of the selected elements and
receives û, what the owners made of all ranks' q. Then G += û and W += û - q: one addition each, so that W - G loses exactly
what was sent. What was not selected, or lost by the codec, stays in W - G.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpisparse.arrays import Floats, Ints
from mpisparse.backends.flat import Pieces
from mpisparse.backends.protocol import Backend
from mpisparse.core.stages import Sent, Stage
from mpisparse.select.candidates import Candidates
from mpisparse.select.scorers import Scorer
from mpisparse.wire.encoded import Encoded
from mpisparse.wire.reduction import Reduced


class Difference(NamedTuple):
    """W - G as a vector that is computed where it is read. As keys, its magnitudes."""

    backend: Any
    weights: Pieces
    shared: Floats

    @property
    def vector(self) -> Difference:
        return self

    def __getitem__(self, at: Any) -> Any:
        """The values of a slice."""
        lo, hi, _ = at.indices(len(self.shared))
        values = np.empty(hi - lo, dtype=np.float32)
        self.backend.subtract_apart(*self.weights.dense, self.shared, lo, values)
        return values

    def select(self, lo: int, hi: int, floor: float) -> Candidates:
        """The elements of [lo, hi) that are at least so far apart."""
        return Candidates(*self.backend.select_apart(*self.weights.dense, self.shared, lo, hi, floor))

    def histogram(self, lo: int, hi: int) -> Ints:
        """The histogram of distances in [lo, hi)."""
        counts: Ints = self.backend.histogram_apart(*self.weights.dense, self.shared, lo, hi)
        return counts


class Distance(Scorer):
    """The largest |W - G|, found in one pass over both; nothing is added up, and nothing else is kept."""

    by_magnitude = True

    def __init__(self, shared: Floats, backend: Backend) -> None:
        self.acc = shared
        self.backend: Any = backend
        nothing = np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.uint8)
        self.weights = Pieces(*nothing, [], [])  # those of the last exchange
        self.keys = Difference(backend, self.weights, shared)
        self.take = self._values_at

    def accumulate(self, pieces: Pieces | None, lo: int, hi: int, floor: float) -> Candidates:
        assert pieces is not None
        self.weights, self.keys = pieces, Difference(self.backend, pieces, self.acc)
        return self.keys.select(lo, hi, floor)

    def _values_at(self, index: Ints) -> Floats:
        own = np.empty(len(index), dtype=np.float32)
        self.backend.gather(*self.weights.dense, index, own)
        own -= self.backend.values_at(self.acc, index)
        return own


class Following(Stage):
    """Both sets of weights move when the ranks have exchanged."""

    def __init__(self, scorer: Distance) -> None:
        self.scorer = scorer

    def settle(self, backend: Any, acc: Any, union: Any, sent: Sent, reduced: Reduced) -> Stage:
        weights = self.scorer.weights
        if not isinstance(reduced.mean, Encoded):
            backend.add_at(acc, union, reduced.mean)
            backend.scatter_add(*weights.dense, union, reduced.mean - reduced.own)
            return self
        pairs = zip(reduced.mean.values(backend), reduced.own.values(backend), strict=True)
        for (start, stop, mean), (_, _, own) in pairs:
            backend.add(acc[start:stop], mean)
            backend.add_stretch(*weights.dense, start, mean - own)
        return self
