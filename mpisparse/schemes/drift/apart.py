"""A rank's weights and the shared ones: which are farthest apart, and how both move after an exchange.

W are this rank's weights, G those that all ranks share, bit by bit. Rank r sends q = Q(W - G) of the selected elements and
receives û, the owners' answer to all ranks' q. Then G += û and W += û - q: one addition each, so that W - G loses exactly
what was sent. Unselected elements, and the codec's error, stay in W - G.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpisparse.arrays import Floats, Ints
from mpisparse.backends.flat import Pieces
from mpisparse.backends.protocol import GROUP_OF_WEIGHTS, Backend
from mpisparse.comm.regions import Groups, Part, index_on
from mpisparse.core.stages import Sent, Stage
from mpisparse.schemes.drift.weights import OwnWeights
from mpisparse.select.candidates import NONE, Candidates
from mpisparse.select.everything import PartValues
from mpisparse.select.grouped import count_of
from mpisparse.select.scorers import Scorer
from mpisparse.select.view import VectorKeys, read_only
from mpisparse.wire.encoded import Encoded
from mpisparse.wire.reduction import Reduced


class Difference(NamedTuple):
    """W - G as a vector that is computed when it is read. Its keys are its magnitudes."""

    backend: Any
    weights: Pieces
    shared: Floats

    @property
    def vector(self) -> Difference:
        return self

    def __getitem__(self, at: Any) -> Any:
        """The values of a slice."""
        lo, hi, _ = at.indices(len(self.shared))
        return self._values(lo, hi)

    def copy(self) -> Floats:
        """All values."""
        return self._values(0, len(self.shared))

    def at(self, index: Ints) -> Floats:
        """The values at an ascending index."""
        values: Floats = self.backend.values_apart(*self.weights.dense, self.shared, self.backend.from_host(index))
        return values

    def _values(self, lo: int, hi: int) -> Floats:
        values: Floats = self.backend.empty(hi - lo, np.float32)
        self.backend.subtract_apart(*self.weights.dense, self.shared, lo, values)
        return values

    def select(self, lo: int, hi: int, floor: float) -> Candidates:
        """The elements of [lo, hi) whose distance reaches the floor; the first weight that is not finite, wherever it is."""
        return Candidates(*self.backend.select_apart(*self.weights.dense, self.shared, lo, hi, floor))

    def histogram(self, lo: int, hi: int) -> Ints:
        """The histogram of distances in [lo, hi)."""
        counts: Ints = self.backend.histogram_apart(*self.weights.dense, self.shared, lo, hi)
        return counts


class Distance(Scorer):
    """Scores by |W - G|, in one pass over both; nothing is accumulated, and nothing else is kept.

    Values in flight stay in W until they are applied, so the indices that a step sends are left out of its selection. where:
    returns where the weights lie now; None if they are no longer the same tensors. weights: W themselves, if ranks may die.
    """

    by_magnitude = True

    def __init__(
        self, shared: Floats, backend: Backend, where: Callable[[], Pieces | None],
        weights: OwnWeights | None = None,
    ) -> None:  # fmt: skip
        self.acc = shared
        self.backend: Any = backend
        self.where = where
        self.weights = weights
        nothing = np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.uint8)
        self.keys = Difference(backend, Pieces(*nothing, [], []), shared)
        self.take = self._values_to_select
        self.departed = NONE.index

    def accumulate(self, pieces: Pieces | None, lo: int, hi: int, floor: float) -> Candidates:
        assert pieces is not None
        self.keys, self.departed = Difference(self.backend, pieces, self.acc), NONE.index
        return self.keys.select(lo, hi, floor)

    def depart(self, backend: Backend, index: Ints) -> Floats:
        """The values at an index, which are not selected again in this step."""
        self.departed = backend.to_host(index)
        return self._values_at(index)

    def give_back(self, backend: Backend, index: Ints, values: Floats) -> None:
        """Nothing to do: they are still in the weights."""

    def owing(self, lo: int, hi: int) -> Floats:
        assert self.weights is not None
        pieces = self.weights.seen()
        if pieces is None:  # the step is refused
            return np.zeros(hi - lo, dtype=np.float32)
        difference: Any = Difference(self.backend, pieces, self.acc)
        values: Floats = difference[lo:hi]
        return values

    def take_over(self, backend: Backend, values: Floats) -> None:
        assert self.weights is not None
        self.weights.add(values)

    def _values_to_select(self, index: Ints) -> Floats:
        values = self._values_at(index)
        if not len(self.departed):
            return values
        index, values = self.backend.to_host(index), self.backend.to_host(values)
        at = np.minimum(np.searchsorted(self.departed, index), len(self.departed) - 1)
        values[self.departed[at] == index] = 0.0
        left: Floats = self.backend.from_host(values)
        return left

    def _values_at(self, index: Ints) -> Floats:
        pieces = self.where()
        if pieces is None:  # the step is refused
            nothing: Floats = self.backend.empty(len(index), np.float32)
            self.backend.fill(nothing, 0.0)
            return nothing
        return Difference(self.backend, pieces, self.acc).at(index)


class GroupDistance(Distance):
    """The distance of groups of neighbours, as one norm each; all elements of a group are sent."""

    def __init__(
        self, shared: Floats, backend: Backend, where: Callable[[], Pieces | None],
        weights: OwnWeights | None = None,
    ) -> None:  # fmt: skip
        super().__init__(shared, backend, where, weights)
        self.difference = self.keys
        self.norms = backend.empty(count_of(len(shared), GROUP_OF_WEIGHTS), np.float32)
        backend.fill(self.norms, 0.0)
        self.keys = VectorKeys(backend, read_only(self.norms))  # one per group
        self.take = self._values_of  # type: ignore[assignment]  # read slice by slice

    def accumulate(self, pieces: Pieces | None, lo: int, hi: int, floor: float) -> Candidates:
        assert pieces is not None
        self.difference = Difference(self.backend, pieces, self.acc)
        bad = self.backend.group_norms(*pieces.dense, self.acc, self.norms)
        return Candidates(*self.backend.select(self.norms, lo, hi, floor))._replace(bad=bad)

    def _values_of(self, groups: Groups) -> PartValues:
        return PartValues(self.difference, groups)


class Following(Stage):
    """Moves both sets of weights after an exchange. lost: if given, called with the indices and what W - G loses there."""

    def __init__(self, where: Callable[[], Pieces | None], lost: Callable[[Ints, Floats], None] | None = None) -> None:
        self.where = where
        self.lost = lost

    def settle(self, backend: Any, acc: Any, union: Any, sent: Sent, reduced: Reduced) -> Stage:
        weights = self.where()
        if not isinstance(reduced.mean, Encoded):
            _move(backend, acc, weights, reduced.index, reduced.mean, reduced.own)
            if self.lost is not None:
                self.lost(reduced.index, reduced.own)
            return self
        pairs = zip(reduced.mean.values(backend), reduced.own.values(backend), strict=True)
        for (start, stop, mean), (_, _, own) in pairs:
            if isinstance(union, Part | Groups):
                _move(backend, acc, weights, index_on(backend, union, start, stop), mean, own)
                continue
            backend.add(acc[start:stop], mean)
            if weights is not None:
                mean -= own
                backend.add_stretch(*weights.dense, start, mean)
        return self


def _move(backend: Any, shared: Floats, weights: Pieces | None, index: Ints, mean: Floats, own: Floats) -> None:
    """Add the mean to the shared weights, and mean - own to this rank's, if these are still the same tensors."""
    if weights is None:
        backend.add_at(shared, index, mean)
    else:
        backend.move_apart(*weights.dense, shared, index, mean, own)
