"""Launches and what they need: vectors of a device, tables of pieces, marks of what is collected and their sums."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpisparse.arrays import Bytes, Ints
from mpisparse.backends.cuda.launcher import Launcher
from mpisparse.backends.cuda.pool import Pool

Found = tuple[Tensor, Tensor, int]
Table = tuple[Tensor, Tensor, Tensor, np.int64]  # addresses, ends and kinds of pieces, and how many there are

DTYPES: dict[Any, torch.dtype] = {
    np.dtype(dtype): getattr(torch, dtype)
    for dtype in ("float32", "float64", "int64", "uint64", "uint32", "int32", "uint16", "int8", "uint8")
}


class Marks(NamedTuple):
    """Per tile: bits of the elements to collect, their count, and the index of the first non-finite value."""

    masks: Tensor
    counts: Tensor
    bads: Tensor


class Launches:
    """A device's vectors, and launches on them by name."""

    def __init__(self, launcher: Launcher, *, pooled: bool) -> None:
        self.launcher = launcher
        self.tile = 32 * launcher.block
        self._allocate = Pool(launcher).empty if pooled else launcher.empty
        self._own = threading.local()

    def empty(self, count: int, dtype: Any) -> Tensor:
        return self._allocate(count, DTYPES[np.dtype(dtype)])

    def from_host(self, values: NDArray[Any] | Tensor) -> Tensor:
        """Copy to the device without waiting for it; a tensor is there already and is returned unchanged."""
        if isinstance(values, Tensor):
            return values
        array = self.empty(len(values), values.dtype)
        staged = self.launcher.pinned(len(values), array.dtype)
        staged.numpy()[:] = values
        return array.copy_(staged, non_blocking=True)

    def to_host(self, array: Tensor | NDArray[Any]) -> NDArray[Any]:
        """Wait for earlier launches and copy to the host; a NumPy array is there already and is returned unchanged."""
        return array.cpu().numpy() if isinstance(array, Tensor) else array

    def copied(self, array: Tensor) -> Callable[[], NDArray[Any]]:
        """Begin to copy to pinned host memory; what is returned waits for that and gives it, on any thread."""
        staged = self.launcher.pinned(len(array), array.dtype)
        staged.copy_(array, non_blocking=True)
        wait = self.launcher.mark()

        def arrived() -> NDArray[Any]:
            wait()
            return staged.numpy()

        return arrived

    def _launch(self, name: str, grid: int, block: int, *args: Tensor | np.generic) -> None:
        if grid:
            plain = [np.uint64(a.data_ptr()) if isinstance(a, Tensor) else a for a in args]
            self.launcher.launch(name, grid, block, plain)

    def _over_tiles(self, name: str, count: int, *args: Tensor | np.generic) -> None:
        self._launch(name, self._tiles(count), self.launcher.block, *args)

    def _for_each(self, name: str, count: int, *args: Tensor | np.generic) -> None:
        self._launch(name, -(-count // self.launcher.block), self.launcher.block, *args)

    def _tiles(self, count: int) -> int:
        return -(-max(0, count) // self.tile)

    def _zeros(self, count: int, dtype: Any) -> Tensor:
        return self.empty(count, dtype).zero_()

    def _gradients(self, pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes) -> Table:
        """Copy addresses, ends and kinds to the device, in one copy."""
        count = len(pointers)
        packed = self.from_host(np.concatenate([pointers.view(np.uint8), ends.view(np.uint8), kinds]))
        addresses, bounds = packed[: 8 * count], packed[8 * count : 16 * count]
        return addresses, bounds, packed[16 * count :], np.int64(count)

    def _marks(self, count: int) -> Marks:
        tiles = self._tiles(count)
        masks = self.empty(tiles * self.launcher.block, np.uint32)
        return Marks(masks, self.empty(tiles, np.uint32), self.empty(tiles, np.int64))

    def _sums(self, counts: Tensor, bads: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return exclusive prefix sums of the counts, and a summary: their total, the lowest of `bads` or -1, the flag."""
        offsets, summary = self.empty(len(counts) + 1, np.int64), self.empty(3, np.int64)
        low = np.uint64(0) if bads is None else bads
        args = (counts, low, np.int64(len(counts)), offsets, self._flag, summary)
        self._launch("scan_counts", 1, self.launcher.scan, *args)
        return offsets, summary

    def _scan(self, counts: Tensor, bads: Tensor | None = None) -> tuple[Tensor, int, int]:
        """Return exclusive prefix sums of the counts; wait for their total, and the lowest of `bads` or -1."""
        offsets, summary = self._sums(counts, bads)
        total, bad, flag = self.to_host(summary).tolist()
        if flag:
            self._flag.fill_(0)
            raise RuntimeError("the rows of indices that a rank sent do not add up: the message is damaged")
        return offsets, total, bad

    def forget_damage(self) -> None:
        self._flag.fill_(0)

    @property
    def _flag(self) -> Tensor:
        """A word of this thread's that is set where a message is damaged; the next summary that the host waits for tells."""
        if not hasattr(self._own, "flag"):
            self._own.flag = self._zeros(1, np.int64)
        flag: Tensor = self._own.flag
        return flag


def bits_of(floor: float) -> np.uint32:
    """Return the bits of a threshold: magnitudes are compared as integers."""
    if not floor >= 0.0:
        raise ValueError(f"threshold must be a number >= 0, got {floor}")
    return np.float32(floor).view(np.uint32)
