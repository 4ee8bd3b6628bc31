"""Downsampling: a long series becomes one mean, minimum and maximum per column of the picture."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpisparse.arrays import Bools, Doubles, Ints


@dataclass(frozen=True)
class Thinned:
    """Columns in ascending order: fractions of the x axis, and mean, low and high of each series (columns x series).

    starts marks columns before which the line is broken; bad has the fractions of non-finite values.
    """

    fractions: Doubles
    mean: Doubles
    low: Doubles
    high: Doubles
    starts: Bools
    bad: Doubles


def thin(fractions: Doubles, mean: Doubles, low: Doubles, high: Doubles, columns: int) -> Thinned:
    """Gather values at fractions in [0, 1] into at most `columns` columns; values are (points,) or (points, series)."""
    mean, low, high = (values.reshape(len(fractions), -1) for values in (mean, low, high))
    low, high = np.where(np.isfinite(low), low, mean), np.where(np.isfinite(high), high, mean)
    here = np.isfinite(fractions)
    good = here & np.isfinite(mean).all(axis=1)
    bins = _bins(fractions, here, columns)
    order = np.flatnonzero(good)[np.argsort(bins[good], kind="stable")]
    bad, first = np.unique(bins[here & ~good], return_index=True)
    bad_fractions = fractions[here & ~good][first]
    if not len(order):
        empty = np.empty((0, mean.shape[1]))
        return Thinned(np.empty(0), empty, empty, empty, np.empty(0, dtype=np.bool_), bad_fractions)
    firsts = np.flatnonzero(np.diff(bins[order], prepend=-1))
    counts = np.diff(firsts, append=len(order))
    filled = bins[order[firsts]]
    missing = np.setdiff1d(bad, filled)
    return Thinned(
        np.add.reduceat(fractions[order], firsts) / counts,
        np.add.reduceat(mean[order], firsts, axis=0) / counts[:, None],
        np.minimum.reduceat(low[order], firsts, axis=0),
        np.maximum.reduceat(high[order], firsts, axis=0),
        np.diff(np.searchsorted(missing, filled), prepend=0) > 0,
        bad_fractions,
    )


def _bins(fractions: Doubles, here: Bools, columns: int) -> Ints:
    """Return the column of each point; if there are few points, each has its own."""
    if len(fractions) <= columns:
        bins = np.empty(len(fractions), dtype=np.int64)
        bins[np.argsort(fractions, kind="stable")] = np.arange(len(fractions))
        return bins
    columns_of: Ints = np.clip(np.where(here, fractions, 0.0) * columns, 0, columns - 1).astype(np.int64)
    return columns_of
