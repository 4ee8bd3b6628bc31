"""On a GPU: every kernel against NumPy, torch's streams, memory shared with torch. `pytest -m cuda` runs only these."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from checks import CHECKS, Device

from mpisparse.backends.cuda.backend import CudaBackend
from mpisparse.comm import device_memory
from mpisparse.select.threshold import TINY

pytestmark = pytest.mark.cuda


@pytest.fixture(scope="module")
def backend() -> CudaBackend:
    from mpisparse.backends.cuda.binding import CupyLauncher

    return CudaBackend(CupyLauncher(torch.device("cuda", 0)))


@pytest.mark.parametrize("n", [0, 1, 33, 8191, 8192, 8193, 1_000_003])
@pytest.mark.parametrize("check", CHECKS)
def test_kernels(backend: CudaBackend, check: str, n: int) -> None:
    CHECKS[check](Device(backend, "cuda:0"), n)


def test_denormals_are_kept(backend: CudaBackend) -> None:
    """If denormals were flushed, the sum of two would be zero."""
    tiny = np.full(1000, TINY, dtype=np.float32)
    total = backend.from_host(tiny)
    backend.add(total, backend.from_host(tiny))
    assert (backend.to_host(total).view(np.uint32) == 2).all()


def test_kernels_wait_for_torch_on_its_current_stream(backend: CudaBackend) -> None:
    """A gradient that a long product is still computing on another stream is read only when it is complete."""
    side = torch.cuda.Stream()
    x = torch.randn(4096, 4096, device="cuda:0")
    expected = (x @ x @ x @ x).reshape(-1)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        acc = torch.zeros(x.numel(), device="cuda:0")
        grad = (x @ x @ x @ x).reshape(-1)
        backend.accumulate(backend.array_of(acc), grad.data_ptr(), 0)
        assert backend.late_nonfinite(backend.array_of(acc)) == -1
        assert torch.equal(acc, expected)


def test_memory_is_torchs(backend: CudaBackend) -> None:
    """A tensor is modified in place, and users of it through DLPack see the changes."""
    cupy: Any = pytest.importorskip("cupy")
    tensor = torch.arange(1000, dtype=torch.float32, device="cuda:0")
    backend.divide(backend.array_of(tensor), 2)
    assert torch.equal(tensor.cpu(), torch.arange(1000, dtype=torch.float32) / 2)
    assert backend.array_of(tensor) is tensor
    assert cupy.from_dlpack(tensor).data.ptr == tensor.data_ptr()


def test_mpi_gets_cupy_views_of_tensors(backend: CudaBackend) -> None:
    """On the tensor's memory, of its type; mpi4py copies between them if MPI is CUDA-aware."""
    for dtype in (np.uint8, np.float32):
        tensor = backend.from_host(np.arange(100).astype(dtype))
        for part in (tensor, tensor[4:9], tensor[:0]):
            view = device_memory.mpi_view(part)
            assert (view.size, view.dtype) == (len(part), dtype)
            assert len(part) == 0 or view.data.ptr == part.data_ptr()


def test_staging_in_pinned_memory(backend: CudaBackend) -> None:
    tensor = backend.from_host(np.arange(1000, dtype=np.uint8))
    staged = device_memory.to_pinned(tensor)
    assert torch.from_numpy(staged).is_pinned()
    assert torch.from_numpy(device_memory.empty_pinned(7, tensor)).is_pinned()
    back = device_memory.from_pinned(staged, torch.empty_like(tensor))
    assert back.device == tensor.device
    assert torch.equal(back, tensor)
    assert device_memory.empty_for_mpi(7, tensor).shape == (7,)


def test_freed_memory_is_not_written_by_late_launches(backend: CudaBackend) -> None:
    """Torch's allocator reuses memory in stream order."""
    for _ in range(200):
        values = backend.from_host(np.ones(100_000, dtype=np.float32))
        total = backend.empty(100_000, np.float32)
        backend.fill(total, 0)
        backend.add(total, values)
        del values
        assert backend.to_host(total).sum() == 100_000
