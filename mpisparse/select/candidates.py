"""Candidates: what a rank found in its vector, and what is done with that. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpisparse.arrays import Floats, Ints
from mpisparse.select.threshold import HUGE, locate_rungs

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend


@dataclass(frozen=True)
class Found:
    """Candidates of this rank, ascending; `bad` is the first non-finite index, or -1."""

    index: Ints
    magnitude: Floats
    bad: int = -1

    def within(self, search: Callable[[Any, Ints], Ints], lo: int, hi: int) -> Found:
        """The candidates in [lo, hi); `search` knows how to search the index."""
        a, b = search(self.index, np.array([lo, hi])).tolist()
        return Found(self.index[a:b], self.magnitude[a:b])

    def reaching(self, threshold: float) -> Found:
        """The candidates that reach the threshold; on the host."""
        kept = self.magnitude >= np.float32(threshold)
        return Found(self.index[kept], self.magnitude[kept])

    def on_host(self, backend: Backend) -> Found:
        """The same in NumPy's arrays."""
        return Found(backend.to_host(self.index), backend.to_host(self.magnitude))

    def on_device(self, backend: Backend) -> Found:
        """The same in the backend's arrays."""
        return Found(backend.from_host(self.index), backend.from_host(self.magnitude))


def count_ties(found: Found, threshold: float) -> Ints:
    """How many candidates lie above the threshold, and how many equal it."""
    above, reaching = ((op(found.magnitude, np.float32(threshold))).sum() for op in (np.greater, np.greater_equal))
    return np.array([above, reaching - above], dtype=np.int64)


def drop_ties(found: Found, threshold: float, share: int, turn: int) -> Found:
    """What lies above the threshold, and `share` of what equals it: others in every turn, so that none waits for ever."""
    level = np.float32(threshold)
    kept = found.magnitude > level
    equal = np.flatnonzero(found.magnitude == level)
    kept[equal[(np.arange(share) + turn * share) % max(1, len(equal))]] = True
    return Found(found.index[kept], found.magnitude[kept])


def largest(backend: Backend, acc: Any, k: int) -> Found:
    """The k largest magnitudes of a vector, on the host: ascending by index, of equals the first, and no zeros."""
    n = len(acc)
    floor = float(locate_rungs(backend.histogram(acc, 0, n), k)[0])
    found = Found(*backend.select(acc, 0, n, floor)).on_host(backend)
    kept = np.sort(np.argsort(-found.magnitude, kind="stable")[:k])
    return Found(found.index[kept], found.magnitude[kept])


def certain(found: Found) -> Found:
    """The same, with magnitudes that reach any threshold."""
    return Found(found.index, np.full(len(found.index), HUGE, dtype=np.float32))


def merge(own: Found, nominated: Found) -> Found:
    """Each index once, ascending, with its largest magnitude."""
    index = np.concatenate([own.index, nominated.index])
    magnitude = np.concatenate([own.magnitude, nominated.magnitude])
    order = np.lexsort((-magnitude, index))
    first = np.diff(index[order], prepend=-1) != 0
    return Found(index[order][first], magnitude[order][first])
