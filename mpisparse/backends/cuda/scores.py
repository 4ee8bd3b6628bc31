"""Selection by predicted importance, a byte per element, and the gradients from which importance is learnt."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mpisparse.arrays import Bytes, Ints
from mpisparse.backends.cuda.launches import Found, Launches, Marks, bits_of


class Scores(Launches):
    """The part of the CUDA backend that knows scores; mpisparse.backends.protocol documents its operations."""

    def accumulate_select_scored(
        self, acc: Tensor, scores: Tensor, key: int, pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes, lo: int,
        hi: int, floor: float,
    ) -> Found:  # fmt: skip
        n, marks, first = len(acc), self._marks(len(acc)), np.int64(0)
        added = self.empty(len(marks.bads), np.int64)
        nothing, region = np.uint64(0), (np.int64(lo), np.int64(hi), bits_of(floor), first)
        gradients = self._gradients(pointers, ends, kinds)
        self._over_tiles("accumulate_select", n, acc, np.int64(n), *gradients, *region, nothing, nothing, added)
        self._over_tiles("select_scored", n, acc, scores, np.uint32(key), *region, *marks)
        return self._scored(acc, scores, key, 0, marks._replace(bads=added))

    def select_scored(self, acc: Tensor, scores: Tensor, key: int, lo: int, hi: int, floor: float) -> Found:
        first = lo // self.tile
        length = max(0, hi - first * self.tile) if hi > lo else 0
        marks, region = self._marks(length), (np.int64(lo), np.int64(hi), bits_of(floor), np.int64(first))
        self._over_tiles("select_scored", length, acc, scores, np.uint32(key), *region, *marks)
        return self._scored(acc, scores, key, first, marks)

    def histogram_scored(self, acc: Tensor, scores: Tensor, key: int, lo: int, hi: int) -> Ints:
        bins, region = self._zeros(2048, np.uint64), (np.int64(lo), np.int64(hi))
        self._over_tiles("histogram_scored", hi - lo, acc, scores, np.uint32(key), *region, bins)
        return self.to_host(bins).astype(np.int64)

    def record(self, pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes, lo: int, out: Tensor) -> None:
        table, n = self._gradients(pointers, ends, kinds), len(out)
        self._for_each("record", n, *table, np.int64(lo), np.int64(n), out)

    def gather(self, pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes, index: Tensor, out: Tensor) -> None:
        table, n = self._gradients(pointers, ends, kinds), len(out)
        self._for_each("gather", n, *table, index, np.int64(n), out)

    def bytes_at(self, values: Tensor, index: Tensor) -> Tensor:
        out = self.empty(len(index), np.uint8)
        self._for_each("bytes_at", len(index), values, index, np.int64(len(index)), out)
        return out

    def put_bytes(self, values: Tensor, index: Tensor, new: Tensor) -> None:
        self._for_each("put_bytes", len(index), values, index, np.int64(len(index)), new)

    def _scored(self, acc: Tensor, scores: Tensor, key: int, first: int, marks: Marks) -> Found:
        """Collect the marked elements with their keys; the marks start at tile `first`."""
        offsets, total, bad = self._scan(marks.counts, marks.bads)
        index, keys = self.empty(total, np.int64), self.empty(total, np.float32)
        if total:
            args = (acc, scores, np.uint32(key), np.int64(first), marks.masks, offsets, index, keys)
            self._launch("write_scored", len(marks.counts), self.launcher.block, *args)
        return index, keys, bad
