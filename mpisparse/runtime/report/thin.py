"""Down-sampling: long series become one mean, minimum and maximum a column of the picture."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpisparse.arrays import Bools, Doubles, Ints


@dataclass(frozen=True)
class Thinned:
    """Columns in ascending order: their places, and mean, low and high of each series (columns x series).

    starts marks columns before which the line is broken; bad are places with values that are not finite.
    """

    places: Doubles
    mean: Doubles
    low: Doubles
    high: Doubles
    starts: Bools
    bad: Doubles


def thin(places: Doubles, mean: Doubles, low: Doubles, high: Doubles, columns: int) -> Thinned:
    """Gather values at places in [0, 1] into at most so many columns; values are (points,) or (points, series)."""
    mean, low, high = (values.reshape(len(places), -1) for values in (mean, low, high))
    low, high = np.where(np.isfinite(low), low, mean), np.where(np.isfinite(high), high, mean)
    here = np.isfinite(places)
    good = here & np.isfinite(mean).all(axis=1)
    bins = _bins(places, here, columns)
    order = np.flatnonzero(good)[np.argsort(bins[good], kind="stable")]
    bad, first = np.unique(bins[here & ~good], return_index=True)
    bad_places = places[here & ~good][first]
    if not len(order):
        empty = np.empty((0, mean.shape[1]))
        return Thinned(np.empty(0), empty, empty, empty, np.empty(0, dtype=np.bool_), bad_places)
    firsts = np.flatnonzero(np.diff(bins[order], prepend=-1))
    counts = np.diff(firsts, append=len(order))
    filled = bins[order[firsts]]
    missing = np.setdiff1d(bad, filled)
    return Thinned(
        np.add.reduceat(places[order], firsts) / counts,
        np.add.reduceat(mean[order], firsts, axis=0) / counts[:, None],
        np.minimum.reduceat(low[order], firsts, axis=0),
        np.maximum.reduceat(high[order], firsts, axis=0),
        np.diff(np.searchsorted(missing, filled), prepend=0) > 0,
        bad_places,
    )


def _bins(places: Doubles, here: Bools, columns: int) -> Ints:
    """Number the column of each place; few enough points have a column each."""
    if len(places) <= columns:
        bins = np.empty(len(places), dtype=np.int64)
        bins[np.argsort(places, kind="stable")] = np.arange(len(places))
        return bins
    columns_of: Ints = np.clip(np.where(here, places, 0.0) * columns, 0, columns - 1).astype(np.int64)
    return columns_of
