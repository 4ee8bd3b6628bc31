"""What a delivery may read of this rank: its vectors while nothing else runs, or a snapshot of its candidates.

At staleness 0, deliver reads the accumulator itself, read-only. In flight the accumulator goes on changing, so deliver
gets a Snapshot: the candidates and their values. The search for a threshold sees a snapshot as a vector that is zero
everywhere else. If the ladder of thresholds misses (k lies below the lowest rung), there is nothing to fall back on: the
ranks agree on all candidates, fewer than k, and the next step places its floor by a histogram of the whole vector. What
was not sent stays in the accumulator for later steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from mpisparse.arrays import Bools, Floats, Ints
from mpisparse.select.candidates import NONE, Candidates, Keys, keep_largest, largest

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend


class VectorKeys(NamedTuple):
    """The magnitudes of a vector."""

    backend: Backend
    vector: Floats

    def select(self, lo: int, hi: int, floor: float) -> Candidates:
        """The elements of [lo, hi) that reach the floor."""
        return Candidates(*self.backend.select(self.vector, lo, hi, floor))

    def histogram(self, lo: int, hi: int) -> Ints:
        """The histogram of magnitudes in [lo, hi), by exponent and three bits of mantissa."""
        return self.backend.histogram(self.vector, lo, hi)


class OnItsWay:
    """The magnitudes of a device's vector in a copy for the host: who reads it first waits for it, on any thread."""

    def __init__(self, host: Backend, device: Any, vector: Any) -> None:
        self.host = host
        self.length = len(vector)
        self._arrived: Callable[[], Floats] = device.copied(vector)

    def __len__(self) -> int:
        return self.length

    @property
    def vector(self) -> Floats:
        """The copy."""
        return self._arrived()

    def select(self, lo: int, hi: int, floor: float) -> Candidates:
        """The elements of [lo, hi) that reach the floor."""
        return VectorKeys(self.host, self.vector).select(lo, hi, floor)

    def histogram(self, lo: int, hi: int) -> Ints:
        """The histogram of magnitudes in [lo, hi)."""
        return VectorKeys(self.host, self.vector).histogram(lo, hi)

    def take(self, index: Ints) -> Floats:
        """The values at an index."""
        values: Floats = self.host.values_at(self.vector, index)
        return values


class View(Protocol):
    """A rank's vector as deliver sees it.

    found: the candidates that prepare collected. leaving: the elements that leave the accumulator when a delivery in flight
    starts. picked: how they were chosen, if each rank sends its own.
    """

    @property
    def found(self) -> Candidates: ...
    def select(self, lo: int, hi: int, floor: float) -> Candidates: ...
    def histogram(self, lo: int, hi: int) -> Ints: ...
    def by_magnitude(self) -> View: ...
    def carried(self, backend: Backend) -> View:
        """The same for a delivery that uses these kernels of the host."""
        ...

    def largest(self, k: int) -> Candidates: ...
    def holds(self, index: Ints) -> Bools: ...
    @property
    def take(self) -> Callable[[Ints], Floats]: ...
    def tags(self) -> Any: ...
    @property
    def leaving(self) -> Ints: ...
    @property
    def picked(self) -> Any: ...


NOTHING: Ints = np.empty(0, dtype=np.int64)


class Live(NamedTuple):
    """The accumulator itself, read-only, and the keys of its elements."""

    backend: Backend
    acc: Floats
    keys: Keys
    take: Callable[[Ints], Floats]  # copies the accumulator's values at an index
    found: Candidates = NONE
    scores: Any = None  # one byte per element that travels with its index, if the scorer has tags
    plain: bool = False  # whether the keys are magnitudes already
    picked: Any = None

    def select(self, lo: int, hi: int, floor: float) -> Candidates:
        """The elements of [lo, hi) whose keys reach the floor."""
        return self.keys.select(lo, hi, floor)

    def histogram(self, lo: int, hi: int) -> Ints:
        """The histogram of keys in [lo, hi)."""
        return self.keys.histogram(lo, hi)

    def by_magnitude(self) -> Live:
        """The same view with the accumulator's magnitudes as keys."""
        return self if self.plain else self._replace(keys=VectorKeys(self.backend, self.acc), plain=True)

    def carried(self, backend: Backend) -> View:
        """The same view for a delivery that reads nothing of the accumulator but what take() has, or what was picked."""
        if self.picked is None:
            return self._replace(backend=backend)
        values = self.backend.to_host(self.take(self.backend.from_host(self.found.index)))
        return Snapshot(backend, self.found, values, picked=self.picked)

    def copied(self, backend: Backend) -> Live:
        """The same view for a delivery that may read the whole accumulator, where its magnitudes are the keys."""
        copy: Any = OnItsWay(backend, self.backend, self.acc)
        return Live(backend, copy, copy, copy.take, self.found.on_host(self.backend), plain=True)

    def largest(self, k: int) -> Candidates:
        """The k largest magnitudes of the accumulator, on the host."""
        return largest(self.backend, self.by_magnitude().keys, len(self.acc), k)

    def holds(self, index: Ints) -> Bools:
        """Where the accumulator is not zero."""
        held: Bools = self.backend.to_host(self.take(self.backend.from_host(index))) != 0.0
        return held

    def tags(self) -> Any:
        """The bytes that travel with the indices of selected elements."""
        return self.scores

    @property
    def leaving(self) -> Ints:
        """Nothing: values stay in the accumulator until they are delivered."""
        return NOTHING


class Snapshot(NamedTuple):
    """Candidates and their values as they were at the end of prepare. leaving: those that are certain to be sent."""

    backend: Backend
    found: Candidates
    values: Floats
    leaving: Ints = NOTHING
    picked: Any = None

    def select(self, lo: int, hi: int, floor: float) -> Candidates:
        """The candidates of [lo, hi) that reach the floor."""
        return self.found.within(np.searchsorted, lo, hi).reaching(floor)

    def histogram(self, lo: int, hi: int) -> Ints:
        """The histogram of the candidates' keys in [lo, hi)."""
        keys = self.found.within(np.searchsorted, lo, hi).magnitude
        return self.backend.histogram(keys, 0, len(keys))

    def by_magnitude(self) -> Snapshot:
        """The same with the values' magnitudes as keys."""
        return self._replace(found=Candidates(self.found.index, np.abs(self.values)))

    def carried(self, backend: Backend) -> Snapshot:
        """The same for a delivery that uses these kernels."""
        return self._replace(backend=backend)

    def largest(self, k: int) -> Candidates:
        """The candidates with the k largest values."""
        return keep_largest(self.by_magnitude().found, k)

    def holds(self, index: Ints) -> Bools:
        """Tell where a value is not zero."""
        held: Bools = self.take(index) != 0.0
        return held

    def take(self, index: Ints) -> Floats:
        """The values at an index; zero where there is no candidate."""
        at = np.minimum(np.searchsorted(self.found.index, index), max(0, len(self.found.index) - 1))
        values: Floats = np.zeros(len(index), dtype=np.float32)
        if len(self.values):
            known = self.found.index[at] == index
            values[known] = self.values[at[known]]
        return values

    def tags(self) -> Any:
        """Nothing: no tags travel with the indices."""
        return None


def read_only(array: Any) -> Any:
    """A read-only view of an array; a device's array as it is."""
    if not isinstance(array, np.ndarray):
        return array
    view = array.view()
    view.flags.writeable = False
    return view
