"""What the CUDA backend needs of a device: memory, copies, launches, in the order in which they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpisparse.arrays import Bytes

BLOCK, SCAN = 256, 1024  # threads of a block, and of the one that scans; the kernels' -D options


class Launcher(Protocol):
    """A device and its current stream. Arguments are NumPy scalars of the kernel's own types, addresses uint64."""

    @property
    def block(self) -> int: ...
    @property
    def scan(self) -> int: ...

    def allocate(self, nbytes: int) -> tuple[int, object]:
        """An address, and what keeps the memory alive."""
        ...

    def pinned(self, nbytes: int) -> Bytes:
        """Host memory that copies to and from the device take the direct way from."""
        ...

    def launch(self, name: str, grid: int, block: int, args: Sequence[np.generic]) -> None: ...

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy inside the device."""
        ...

    def fill(self, target: int, value: int, nbytes: int) -> None: ...

    def copy_in(self, target: int, source: NDArray[Any]) -> None:
        """Copy to the device; `source` may change after it."""
        ...

    def copy_out(self, target: NDArray[Any], source: int) -> None:
        """Copy to the host when all that was launched is done; `target` is complete after it."""
        ...

    def synchronize(self) -> None:
        """Wait for all that was launched."""
        ...
