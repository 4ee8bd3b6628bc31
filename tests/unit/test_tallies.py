"""Counts as bytes: they decode unchanged, within the bound; damage is detected."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpisparse.backends.device import load_backend
from mpisparse.select import tallies
from mpisparse.select.threshold import locate_rungs

BACKEND = load_backend()


@given(st.lists(st.sampled_from([0, 0, 0, 1, 2, 7, 300, 10**6]), max_size=300))
def test_round_trip(row: list[int]) -> None:
    counts = np.array(row, dtype=np.int64)
    coded = tallies.encode(BACKEND, counts)
    assert len(coded) <= tallies.room(len(row), sum(row))
    got = tallies.decode(BACKEND, tallies.padded(coded, len(coded) + 3), len(row), sum(row))
    assert got.tolist() == row


@given(st.binary(max_size=80), st.integers(1, 200), st.integers(0, 400))
def test_any_bytes_are_counts_or_refused(data: bytes, slots: int, total: int) -> None:
    try:
        counts = tallies.decode(BACKEND, np.frombuffer(data, dtype=np.uint8).copy(), slots, total)
    except RuntimeError:
        return
    assert (len(counts), counts.sum()) == (slots, total)
    assert counts.min() >= 0


def test_few_items_take_few_bytes() -> None:
    """1024 blocks with 283 elements, and a ladder of 255 steps with 71."""
    for slots, total, most in ((1024, 283, 140), (255, 71, 42)):
        counts = np.bincount(np.random.default_rng(1).integers(0, slots, total), minlength=slots)
        assert len(tallies.encode(BACKEND, counts)) <= tallies.room(slots, total) <= most


@pytest.mark.parametrize("wanted", [1, 10, 500, 3000])
def test_a_clipped_histogram_places_the_same_ladder(wanted: int) -> None:
    magnitudes = np.abs(np.random.default_rng(2).standard_t(3, 5000)).astype(np.float32)
    histogram = BACKEND.histogram(magnitudes, 0, 5000)
    clipped = tallies.clipped(histogram, wanted)
    assert clipped.sum() == wanted
    np.testing.assert_array_equal(locate_rungs(clipped, wanted), locate_rungs(histogram, wanted))
