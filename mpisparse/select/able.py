"""Which ranks can share a selection: those whose gradients are neither zero nor far smaller than the others'."""

from __future__ import annotations

import numpy as np

from mpisparse.arrays import Ints

REACH = 16  # bins of a histogram, two octaves: how far the threshold may be lowered to give a poor rank its share
POOR = 32  # beyond 16 ranks, a rank is poor if it has less than 1 / POOR of the mean


def harmonic(rows: Ints) -> Ints:
    """Predict how many elements are selected once borders are drawn, from what each rank would select everywhere.

    A rank that selects little gets a longer partition, so balance depends on the harmonic mean of the ranks' counts.
    """
    mean: Ints = np.rint(len(rows) / (1.0 / np.maximum(rows, 0.5)).sum(axis=0)).astype(np.int64)
    return mean


def able_ranks(histograms: Ints, k: int) -> Ints:
    """The ranks that share the selection, from a histogram of each rank's magnitudes.

    A rank whose gradient is zero, or far smaller than the others', selects nothing at a threshold that suits them. Balanced
    borders would give it nearly the whole vector. So the poorest ranks are left out until the rest together select k at most
    two octaves below the threshold at which a rank selects k on average. If no set of ranks does, all take part.
    """
    tails: Ints = np.cumsum(histograms[:, ::-1], axis=1)[:, ::-1]
    reached = np.flatnonzero(tails.sum(axis=0) >= k * len(tails))
    at = max(1, int(reached[-1]) if len(reached) else 0)  # bin 0 holds the zeros
    floor = max(1, at - REACH)
    richest_last = np.argsort(tails[:, at], kind="stable")
    for poor in range(len(tails)):
        able = np.sort(richest_last[poor:])
        if harmonic(tails[able, floor : floor + 1])[0] >= k:
            return able
    return np.arange(len(tails))


def not_poor(loads: Ints) -> Ints:
    """The ranks that select at least 1 / POOR of the mean."""
    return np.flatnonzero(loads * POOR * len(loads) >= loads.sum())
