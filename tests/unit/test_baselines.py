"""What a rank selects, in cases with more or stranger elements than the parallel suite has."""

from __future__ import annotations

import numpy as np
import pytest

from mpisparse.arrays import Floats, Ints
from mpisparse.backends.device import load_backend
from mpisparse.select.pickers import HardThreshold, SampledTopK, merged


@pytest.mark.parametrize("k", [20, 500, 5000])
def test_the_threshold_of_a_sample(k: int) -> None:
    """Select what reaches the sample's proportional k-th largest; if that is more than 1.3 k, the k largest."""
    picker, cut = SampledTopK(load_backend(), seed=3, warm_up=0), 0
    for step in range(12):
        acc = np.random.default_rng([k, step]).standard_t(3, 50_000).astype(np.float32)
        lot = np.random.Generator(np.random.Philox(key=[3, step])).integers(0, len(acc), 4096)
        sample = np.sort(np.abs(acc[lot]))
        expected = np.flatnonzero(np.abs(acc) >= sample[4096 - max(1, round(k * 4096 / len(acc)))])
        if len(expected) > 1.3 * k:
            expected, cut = np.sort(np.argsort(-np.abs(acc), kind="stable")[:k]), cut + 1
        index, threshold, _ = picker.pick(acc, k, step)
        assert index.tolist() == expected.tolist()
        assert threshold <= np.abs(acc[index]).min()
    assert cut or k > 20, "a small sample was never far off"


def test_what_is_wanted_while_density_falls() -> None:
    picker = SampledTopK(load_backend(), seed=0, warm_up=4)
    assert [picker.wanted(10, 10_000, step) for step in range(6)] == [2500, 629, 158, 40, 10, 10]


def picked(picker: HardThreshold, acc: Floats) -> Ints:
    """Pick 10 elements, and learn from it as a step does."""
    index, _, lesson = picker.pick(acc, 10, 0)
    picker.learn(lesson)
    return index


def test_a_first_step_with_too_little_does_not_set_the_threshold() -> None:
    picker = HardThreshold(load_backend(), None, density=0.1)
    acc = np.zeros(100, np.float32)
    acc[:3] = 5, 6, 7
    assert picked(picker, acc).tolist() == [0, 1, 2]
    acc[:] = np.arange(100)
    assert picked(picker, acc).tolist() == list(range(90, 100))
    acc *= 2
    assert len(picked(picker, acc)) == 55, "and then it stays"


def test_runs_are_merged() -> None:
    runs = [np.array(run, np.int64) for run in ([1, 5, 9], [], [1, 2, 9, 11], [5])]
    assert merged(np.concatenate(runs)).tolist() == [1, 2, 5, 9, 11]
    assert merged(np.empty(0, np.int64)).tolist() == []
