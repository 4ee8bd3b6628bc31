"""No two threads of a kernel touch a byte that one of them writes, unless a barrier lies between; see emulator/races.cpp."""

from __future__ import annotations

import re

import numpy as np
import pytest
from checks import CHECKS, Device
from emulator import DamageError, Emulator, available, kernels_in

from mpisparse.backends.cuda import source
from mpisparse.backends.cuda.backend import CudaBackend

pytestmark = pytest.mark.skipif(not available(), reason="no C++ compiler to build the emulator with")

MANY_TILES = 12 * 2048 + 77


@pytest.fixture(scope="module")
def emulator() -> Emulator:
    return Emulator(block=64, scan=64, sanitize="thread")


@pytest.mark.parametrize("check", CHECKS)
def test_kernels_do_not_race(emulator: Emulator, check: str) -> None:
    CHECKS[check](Device(CudaBackend(emulator)), MANY_TILES)


RACING = """
extern "C" __global__ void other_block(int* x) { if (threadIdx.x == 0) x[0] = 1; }
extern "C" __global__ void other_block_reads(int* x) { if (threadIdx.x == 0) x[1 + blockIdx.x] = x[2 - blockIdx.x]; }
extern "C" __global__ void no_barrier(int* x) {
    __shared__ int all[64];
    all[threadIdx.x] = x[threadIdx.x];
    x[blockIdx.x * 64 + threadIdx.x] = all[63 - threadIdx.x];
}
extern "C" __global__ void half_atomic(int* x) {
    if (threadIdx.x == 0) { atomicAdd(x, 1); if (blockIdx.x == 1) x[0] = x[0] + 1; }
}
extern "C" __global__ void read_long_ago(int* x) {
    if (blockIdx.x == 0 && threadIdx.x == 0) x[64] = x[0];
    __syncthreads();
    if (blockIdx.x == 1 && x[0] == threadIdx.x) x[65] = 1;
    __syncthreads();
    if (blockIdx.x == 1 && threadIdx.x == 0) x[0] = 1;
}
extern "C" __global__ void sound(int* x) {
    __shared__ int all[64];
    all[threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
    __syncthreads();
    x[blockIdx.x * 64 + threadIdx.x] = all[63 - threadIdx.x];
    if (blockIdx.x < 3) atomicAdd(x + 128, 1);
}
"""


@pytest.mark.parametrize("order", ["forward", "reversed"])
def test_races_are_found_in_any_order(order: str) -> None:
    emulator = Emulator(block=64, scan=64, text=RACING, sanitize="thread", order=order)
    x = CudaBackend(emulator).empty(129, np.int32)
    for kernel in kernels_in(RACING):
        x.zero_()
        if kernel == "sound":
            emulator.launch(kernel, 2, 64, [np.uint64(x.data_ptr())])
        else:
            with pytest.raises(DamageError, match=f"{kernel}: a race: block .* memory that block .* uses"):
                emulator.launch(kernel, 2, 64, [np.uint64(x.data_ptr())])


@pytest.mark.parametrize("nth", range(2))
def test_a_planted_race_is_found(nth: int) -> None:
    """A histogram that adds without an atomic gives the right counts in every order of the emulator, but not on a GPU."""
    tally = (source.directory() / "tally.cu").read_text()
    place, value = list(re.finditer(r"atomicAdd\(&((?:own|bins)\[.*?\]), ([^;]*)\);", tally))[nth].groups()
    planted = tally.replace(f"atomicAdd(&{place}, {value});", f"{place} += {value};", 1)
    text = source.joined().replace(tally, planted)
    emulator = Emulator(block=64, scan=64, text=text, sanitize="thread")
    with pytest.raises(DamageError, match="a race"):
        CHECKS["select"](Device(CudaBackend(emulator)), MANY_TILES)
