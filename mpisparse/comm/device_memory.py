"""Device memory for MPI: CUDA tensors are passed directly if MPI is CUDA-aware, else staged in pinned host memory."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from numpy.typing import NDArray


def synchronize(tensor: torch.Tensor) -> None:
    """Wait for the device: MPI knows no streams, so launched work must be done before it reads or writes the memory."""
    torch.cuda.current_stream(tensor.device).synchronize()


def mpi_view(tensor: torch.Tensor) -> Any:
    """View a tensor as a buffer that mpi4py takes."""
    from mpisparse.backends.cuda.binding import mpi_view as cupy_view

    return cupy_view(tensor)


def empty_for_mpi(count: int, like: torch.Tensor) -> torch.Tensor:
    """Allocate memory that MPI may write to at once; it waits for earlier launches that may still use it."""
    tensor = like.new_empty(count)
    synchronize(tensor)
    return tensor


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a device current in this thread inside the block, because a CUDA-aware MPI works in the current context."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def empty_pinned(count: int, like: torch.Tensor) -> NDArray[Any]:
    """Allocate pinned host memory to copy from to the device of `like`; torch caches it when it is freed."""
    return torch.empty(count, dtype=like.dtype, pin_memory=like.is_cuda).numpy()


def to_pinned(tensor: torch.Tensor) -> NDArray[Any]:
    """Copy to pinned host memory."""
    staged = empty_pinned(len(tensor), tensor)
    torch.from_numpy(staged).copy_(tensor)
    return staged


def from_pinned(values: NDArray[Any], target: torch.Tensor) -> torch.Tensor:
    """Copy pinned memory to the device without waiting for it: torch keeps the memory until then."""
    return target.copy_(torch.from_numpy(values), non_blocking=True)
