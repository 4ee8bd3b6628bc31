"""Kernels far from the first element, where indices need more than 32 bits."""

from __future__ import annotations

import pytest
from checks import Device
from emulator import ORDERS, Emulator, available, kernels_in
from far import Twice, check_far, run_twice
from planted import survives

from mpisparse.backends.cuda import source
from mpisparse.backends.cuda.backend import CudaBackend

pytestmark = pytest.mark.skipif(not available(), reason="no C++ compiler to build the emulator with")

ELSEWHERE = {
    "scan_counts",
    "write_selected",
    "accumulate",
    "write_apart",
    "write_scored",
    "write_owned",
}  # not one thread for each element; check_far looks at all but the first
# What tells a thread or a block its place, and the same in 32 bits.
PLACES = (
    ("i64 i = at_thread()", "int i = at_thread()"),
    ("const i64 j = at_thread()", "const int j = at_thread()"),
    ("at_thread() / 32", "(int)at_thread() / 32"),
    ("i64 i = group * GROUP_OF_WEIGHTS", "i64 i = (int)(group * GROUP_OF_WEIGHTS)"),
    ("blockIdx.x * TILE", "(int)(blockIdx.x * TILE)"),
    ("const i64 i = tile * TILE", "const int i = (int)tile * TILE"),
    ("const i64 begin = tile", "const int begin = tile"),
)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("n", [1, 1025, 5000])
def test_beyond_32_bits(order: str, n: int) -> None:
    emulator = Emulator(block=64, scan=64, order=order)
    check_far(Device(CudaBackend(emulator)), n)
    assert emulator.damaged == 0


def test_each_kernel_is_noticed_if_it_has_32_bits() -> None:
    """One library with this bug in all kernels; each of them must fail by itself."""
    text = source.joined()
    for old, new in PLACES:
        assert old in text
        text = text.replace(old, new)
    emulator, sound = Emulator(block=64, scan=64, text=text), Emulator(block=64, scan=64)
    kernels = Twice(CudaBackend(sound), sound)
    run_twice(kernels, 5000)
    assert kernels.seen | ELSEWHERE == set(kernels_in(source.joined()))
    for kernel in sorted(kernels.seen):
        assert not survives(lambda: run_twice(Twice(CudaBackend(emulator), emulator, kernel), 5000)), kernel  # noqa: B023
