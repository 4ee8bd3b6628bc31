"""Vectors of a step in memory that an earlier step had: a block is free when nobody holds a part of it any more.

Torch's allocator would find freed memory too, but each question costs as much as a small kernel. As there, memory is used
again in the order of a stream, and only by the thread and the stream that had it before.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import NamedTuple

import torch

from mpisparse.backends.cuda.launcher import Launcher

LARGEST = 1 << 24  # bytes of a vector; larger ones are left to torch's allocator, which can give memory back
LEAST = 512  # bytes of a block
COUNT = getattr(torch._C, "_storage_Use_Count", None)  # how many tensors share a storage; not every torch tells


class Block(NamedTuple):
    """Memory, and how many share its storage while nobody has a part of it."""

    memory: torch.Tensor
    storage: torch.UntypedStorage
    shares: int


class Pool:
    """Vectors of any length and type, in blocks that are used again."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self._own = threading.local()

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A vector that holds anything."""
        nbytes = count * dtype.itemsize
        if nbytes > LARGEST or COUNT is None:
            return self.launcher.empty(count, dtype)
        size, blocks = max(LEAST, 1 << max(0, nbytes - 1).bit_length()), self._blocks()
        for block in blocks[size] + blocks[2 * size]:
            if COUNT(block.storage._cdata) == block.shares:
                return block.memory[:nbytes].view(dtype)
        memory = self.launcher.empty(2 * size, torch.uint8)  # with room for a later step that selects more
        storage = memory.untyped_storage()
        blocks[2 * size].append(Block(memory, storage, COUNT(storage._cdata)))
        return memory[:nbytes].view(dtype)

    def _blocks(self) -> defaultdict[int, list[Block]]:
        """This thread's blocks that are used on the current stream, by their size."""
        if not hasattr(self._own, "blocks"):
            self._own.blocks = defaultdict(lambda: defaultdict(list))
        blocks: defaultdict[int, list[Block]] = self._own.blocks[self.launcher.stream]
        return blocks
