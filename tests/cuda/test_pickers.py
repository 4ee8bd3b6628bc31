"""What the baselines pick on a device, against what they pick on the host."""

from __future__ import annotations

import numpy as np
import pytest
from checks import draw
from emulator import Emulator, available
from samples import assert_same

from mpisparse.backends.cuda.backend import CudaBackend
from mpisparse.backends.device import load_backend
from mpisparse.backends.flat import Held
from mpisparse.select.pickers import PIECE, Sidco, sum_of_magnitudes

pytestmark = pytest.mark.skipif(not available(), reason="no C++ compiler to build the emulator with")


@pytest.fixture
def device() -> CudaBackend:
    return CudaBackend(Emulator(block=64, scan=64, lazy=True), load_backend(), pooled=True)


@pytest.mark.parametrize("n", [0, 1, 3, 1000, PIECE, PIECE + 1, 9 * PIECE + 77])
def test_a_sum_of_magnitudes_has_the_bits_of_the_host(device: CudaBackend, n: int) -> None:
    """Though a device adds more pieces at a time."""
    values = draw(n)
    assert sum_of_magnitudes(device.from_host(values)) == sum_of_magnitudes(values)
    assert sum_of_magnitudes(values) == pytest.approx(np.abs(values).sum(dtype=np.float64), rel=1e-12)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_fit_in_stages(device: CudaBackend, stages: int) -> None:
    n = PIECE + 1000
    acc = np.random.default_rng(n).laplace(size=n).astype(np.float32)
    here, there = Sidco(load_backend(), Held(n)), Sidco(device, Held(n))
    here.stages = there.stages = stages
    expected, found = here.pick(acc, n // 200, 0), there.pick(device.from_host(acc), n // 200, 0)
    assert_same(found.index, expected.index)
    assert (found.threshold, found.lesson) == (expected.threshold, expected.lesson)
    assert len(expected.index)
