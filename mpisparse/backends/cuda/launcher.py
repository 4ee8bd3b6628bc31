"""What the CUDA backend needs of a device beyond torch: kernels launched by name, in order, on its current stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

BLOCK, SCAN = 256, 1024  # threads per block, and of the one block that scans; -D options of the kernels


class Launcher(Protocol):
    """A device and its current stream. tests/emulator has one that runs the kernels on the CPU."""

    @property
    def block(self) -> int: ...
    @property
    def scan(self) -> int: ...
    @property
    def capturing(self) -> bool:
        """Whether the current stream is being captured in a graph, so that nothing is done."""
        ...

    @property
    def stream(self) -> int:
        """The address of the current stream."""
        ...

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a vector on the device without initializing it."""
        ...

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate host memory from which the device copies by itself; it may be freed before that is done."""
        ...

    def mark(self) -> Callable[[], object]:
        """Return what waits until all that was launched so far is done; any thread may call it."""
        ...

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the model's device as the kernels take it, on the same memory."""
        ...

    def launch(self, name: str, grid: int, block: int, args: Sequence[np.generic]) -> None:
        """Launch a kernel; arguments are NumPy scalars of the kernel's own types, addresses uint64."""
        ...
