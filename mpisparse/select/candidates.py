"""Candidates for sending that a rank collected, and operations on them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from mpisparse.arrays import Floats, Ints
from mpisparse.select.threshold import HUGE, locate_rungs

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend


class Keys(Protocol):
    """The keys of elements, which are compared with thresholds. vector: their values, if each element has its own key."""

    @property
    def vector(self) -> Any: ...

    def select(self, lo: int, hi: int, floor: float) -> Candidates: ...
    def histogram(self, lo: int, hi: int) -> Ints: ...


class Candidates(NamedTuple):
    """Elements of one rank, ascending by index, with the magnitude (or other key) that thresholds are compared with.

    bad: the first non-finite index of the pass that collected them, or -1.
    """

    index: Ints  # type: ignore[assignment]  # hides tuple.index
    magnitude: Floats
    bad: int = -1

    def within(self, search: Callable[[Any, Ints], Ints], lo: int, hi: int) -> Candidates:
        """The candidates in [lo, hi); `search` is the backend's."""
        a, b = search(self.index, np.array([lo, hi])).tolist()
        return Candidates(self.index[a:b], self.magnitude[a:b])

    def reaching(self, threshold: float) -> Candidates:
        """The candidates that reach the threshold; on the host."""
        kept = self.magnitude >= np.float32(threshold)
        return Candidates(self.index[kept], self.magnitude[kept])

    def on_host(self, backend: Backend) -> Candidates:
        """The same as NumPy arrays."""
        return Candidates(backend.to_host(self.index), backend.to_host(self.magnitude))

    def on_device(self, backend: Backend) -> Candidates:
        """The same as the backend's arrays."""
        return Candidates(backend.from_host(self.index), backend.from_host(self.magnitude))


NONE = Candidates(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))


def count_ties(found: Candidates, threshold: float) -> Ints:
    """Count the candidates above the threshold, and those equal to it."""
    above, reaching = ((op(found.magnitude, np.float32(threshold))).sum() for op in (np.greater, np.greater_equal))
    return np.array([above, reaching - above], dtype=np.int64)


def drop_ties(found: Candidates, threshold: float, share: int, turn: int) -> Candidates:
    """Keep candidates above the threshold, and `share` of those equal to it: others every turn, so that none starves."""
    level = np.float32(threshold)
    kept = found.magnitude > level
    equal = np.flatnonzero(found.magnitude == level)
    kept[equal[(np.arange(share) + turn * share) % max(1, len(equal))]] = True
    return Candidates(found.index[kept], found.magnitude[kept])


def largest(backend: Backend, keys: Keys, n: int, k: int) -> Candidates:
    """The k largest of n keys, on the host: ascending by index, the first of equals, no zeros."""
    floor = float(locate_rungs(keys.histogram(0, n), k)[0])
    return keep_largest(keys.select(0, n, floor).on_host(backend), k)


def keep_largest(found: Candidates, k: int) -> Candidates:
    """The k largest of some candidates; the first of equals."""
    kept = np.sort(np.argsort(-found.magnitude, kind="stable")[:k])
    return Candidates(found.index[kept], found.magnitude[kept])


def certain(found: Candidates) -> Candidates:
    """The same candidates with magnitudes that reach any threshold."""
    return Candidates(found.index, np.full(len(found.index), HUGE, dtype=np.float32))


def merge(own: Candidates, nominated: Candidates) -> Candidates:
    """Every index once, ascending, with its largest magnitude."""
    index = np.concatenate([own.index, nominated.index])
    magnitude = np.concatenate([own.magnitude, nominated.magnitude])
    order = np.lexsort((-magnitude, index))
    first = np.diff(index[order], prepend=-1) != 0
    return Candidates(index[order][first], magnitude[order][first])
