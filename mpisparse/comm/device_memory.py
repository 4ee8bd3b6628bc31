"""Device memory for MPI: tensors of a CUDA device as they are where MPI is CUDA-aware, else staged in pinned host memory."""

from __future__ import annotations

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
    """Allocate memory that MPI may write to at once: the allocator may return some that earlier launches still use."""
    tensor = like.new_empty(count)
    synchronize(tensor)
    return tensor


def to_pinned(tensor: torch.Tensor) -> NDArray[Any]:
    """Copy to pinned host memory."""
    staged = torch.empty(len(tensor), dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    staged.copy_(tensor)
    return staged.numpy()


def from_pinned(values: NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    """Copy from the host to the device of `like`."""
    return like.new_empty(len(values)).copy_(torch.from_numpy(values))
