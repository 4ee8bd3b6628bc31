"""The CUDA kernels in the emulator against NumPy: any order of threads, any tile size, sizes around tile boundaries."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from checks import CHECKS, ON_DEVICE, Device
from emulator import ORDERS, DamageError, Emulator, available, kernels_in
from samples import assert_same

from mpisparse.backends.cuda import source
from mpisparse.backends.cuda.backend import CudaBackend

pytestmark = pytest.mark.skipif(not available(), reason="no C++ compiler to build the emulator with")

SMALL, USUAL = {"block": 32, "scan": 32}, {"block": 256, "scan": 1024}
SIZES = (0, 1, 33, 1023, 1024, 1025, 3 * 1024 + 77)


@pytest.fixture(scope="module", params=ORDERS)
def order(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(check: str, emulator: Emulator, n: int) -> None:
    CHECKS[check](Device(CudaBackend(emulator)), n)
    assert emulator.damaged == 0, "a kernel wrote beyond an array"


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("check", CHECKS)
def test_small_tiles(check: str, order: str, n: int) -> None:
    """Blocks of one warp give many tiles with few elements."""
    run(check, Emulator(**SMALL, order=order, seed=n), n)


@pytest.mark.parametrize("check", CHECKS)
def test_usual_tiles(check: str, order: str) -> None:
    run(check, Emulator(**USUAL, order=order), 2 * 8192 + 77)


@pytest.mark.parametrize(
    "check", ["rows", pytest.param("select", marks=pytest.mark.slow), pytest.param("blend", marks=pytest.mark.slow)]
)
def test_more_tiles_than_one_round_of_the_scan(check: str) -> None:
    """A scan of 32 threads handles 128 counts per round."""
    run(check, Emulator(**SMALL, order="shuffled"), 1024 * 130 + 5)


def test_indices_beyond_2_24() -> None:
    """Odd indices beyond 2^24 are not exact in float32."""
    backend = CudaBackend(Emulator(**USUAL))
    acc = np.zeros(2**24 + 1000, dtype=np.float32)
    expected = [5, 2**24 - 1, 2**24, 2**24 + 1, 2**24 + 997]
    acc[expected] = np.arange(1, 6)
    on_device = backend.from_host(acc)
    index, magnitude, bad = backend.select(on_device, 2**24 - 8192 * 2, len(acc), 0.5)
    assert (backend.to_host(index).tolist(), bad) == (expected[1:], -1)
    counts, columns = backend.compress_rows(index, magnitude, 3.0, 3, 65_536, 257)
    union = backend.empty(3, np.int64)
    assert backend.expand_rows(counts, columns, 3, 65_536, union)
    assert backend.to_host(union).tolist() == expected[2:]


def test_every_kernel_is_launched() -> None:
    """A check runs every kernel in kernels/*.cu and every operation of the backend."""
    emulator = Emulator(**SMALL)
    for check in CHECKS.values():
        check(Device(CudaBackend(emulator)), 100)
    assert set(emulator.launches) == set(kernels_in(source.joined()))
    arrays = {"empty", "array_of", "from_host", "to_host", "copy", "fill", "view_as"}
    named = {name for kind in CudaBackend.__mro__[:-1] for name in vars(kind)}
    operations = {name for name in named if name[0] != "_"} - {"name", "use_threads"}
    composed = {"settle_int4", "settle_int2", "settle_sign"}  # of other kernels; checked with the codecs of few bits
    adding = {"accumulate_soon", "flush", "late_nonfinite"}
    without_waiting = {"pack_rows", "unpack_rows", "first_bad", "spoil"}  # check_damaged_rows, check_late_sum
    without_waiting |= {"copied", "neighbours", "forget_damage"}  # check_copied, check_neighbours, check_damaged_rows
    checked = {*ON_DEVICE, *arrays, *composed, *adding, *without_waiting, "zero_at", "publish_at"}
    assert operations - {"hindrance"} == checked  # a graph's, see test_steps.py


def test_sources_need_no_headers() -> None:
    text = re.sub(r"//.*", "", source.joined())
    assert "#include" not in text
    assert "<<<" not in text


def test_wrong_arguments_are_noticed() -> None:
    emulator = Emulator(**SMALL)
    with pytest.raises(TypeError, match="divide: argument 2 of 3 is not of the kernel's size"):
        emulator.launch("divide", 1, 32, [np.uint64(0), np.float64(2), np.int64(0)])
    with pytest.raises(TypeError, match="divide: argument 4 of 2"):
        emulator.launch("divide", 1, 32, [np.uint64(0), np.float32(2)])


HUNG = """
extern "C" __global__ void half_a_barrier(int* out) {
    if (threadIdx.x < 32) __syncthreads();
    out[threadIdx.x] = 1;
}
extern "C" __global__ void half_a_ballot(int* out) {
    if (threadIdx.x % 2) out[threadIdx.x] = __ballot_sync(0xffffffffu, true);
}
extern "C" __global__ void beyond(int* out) { out[threadIdx.x] = 1; }
extern "C" __global__ void stale(int* out) {
    __shared__ int memory[64];
    out[threadIdx.x] = memory[threadIdx.x];
    memory[threadIdx.x] = 0;
}
"""


def test_the_emulator_notices_what_a_gpu_would_punish() -> None:
    emulator = Emulator(block=64, scan=64, text=HUNG)
    backend = CudaBackend(emulator)
    out = backend.empty(63, np.int32)
    for kernel, where in (("half_a_barrier", "barrier"), ("half_a_ballot", "warp's meeting")):
        with pytest.raises(DamageError, match=f"{kernel}: thread .* waits for ever at a {where}"):
            emulator.launch(kernel, 1, 64, [np.uint64(out.data_ptr())])
    rubbish = backend.empty(64, np.int32)
    emulator.launch("stale", 3, 64, [np.uint64(rubbish.data_ptr())])
    assert (backend.to_host(rubbish).view(np.uint32) == 0xA5A5A5A5).all()
    emulator.launch("beyond", 1, 64, [np.uint64(out.data_ptr())])
    del out
    assert emulator.damaged == 1


def test_vectors_are_tensors_on_the_device() -> None:
    """What the protocol says of vectors, and no way to the host but by name."""
    emulator = Emulator(**SMALL)
    backend = CudaBackend(emulator)
    host = np.arange(10, dtype=np.float32)
    array = backend.from_host(host)
    assert isinstance(array, torch.Tensor)
    assert (len(array), array.nbytes, array.itemsize) == (10, 40, 4)
    assert (emulator.copied_in, emulator.copied_out) == (40, 0)
    array[2:4] = array[7:9]
    array[-1:] = 0
    host[2:4], host[-1:] = host[7:9], 0
    assert emulator.copied_in == 40
    np.testing.assert_array_equal(backend.to_host(array), host)
    assert emulator.copied_out == 40
    for dtype in (np.uint32, np.uint16, np.uint8, np.int8, np.int32, np.uint64):
        bits = backend.view_as(array[4:], dtype)
        assert bits.data_ptr() == array[4:].data_ptr()
        assert_same(backend.to_host(bits), host[4:].view(dtype))
    twin = backend.copy(array)
    backend.fill(twin, 0.0)
    assert backend.to_host(array[:0]).shape == (0,)
    assert not backend.to_host(twin).any()
    np.testing.assert_array_equal(backend.to_host(array), host)
    assert backend.from_host(array) is array
    assert backend.to_host(host) is host


def test_the_emulator_notices_what_would_fail_on_a_gpu() -> None:
    backend = CudaBackend(Emulator(**SMALL))
    residual = torch.zeros(4)
    for vector in (backend.from_host(np.ones(4, dtype=np.float32)), backend.array_of(residual)[:2]):
        for read in (np.asarray, torch.Tensor.numpy, torch.Tensor.tolist, lambda x: float(x[0]), lambda x: bool(x[0] > 0)):
            with pytest.raises(TypeError, match=r"in a device's memory: .* to_host\(\)"):
                read(vector)
        with pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
            vector + torch.ones(len(vector))
        with pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
            torch.ones(len(vector)).add_(vector)
    backend.array_of(residual)[1:] = backend.from_host(np.ones(3, dtype=np.float32))
    assert residual.tolist() == [0, 1, 1, 1]
