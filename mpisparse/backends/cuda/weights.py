"""The operations on weights, as pieces of float32, against a flat reference; and an index dealt out to owners."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mpisparse.arrays import Bytes, Ints
from mpisparse.backends.cuda.launches import Found, Launches, Table, bits_of
from mpisparse.backends.kinds import FP32
from mpisparse.backends.protocol import GROUP_OF_WEIGHTS


class Weights(Launches):
    """The part of the CUDA backend that knows weights; mpisparse.backends.protocol documents its operations."""

    def select_apart(
        self, pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes, reference: Tensor, lo: int, hi: int, floor: float
    ) -> Found:
        weights, n = self._weights(pointers, ends, kinds), len(reference)
        masks, counts, bads = self._marks(n)
        region = (np.int64(n), np.int64(lo), np.int64(hi), bits_of(floor))
        self._over_tiles("select_apart", n, *weights, reference, *region, masks, counts, bads)
        offsets, total, bad = self._scan(counts, bads)
        index, magnitude = self.empty(total, np.int64), self.empty(total, np.float32)
        if total:
            self._over_tiles("write_apart", n, *weights, reference, masks, offsets, index, magnitude)
        return index, magnitude, bad

    def group_norms(self, pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes, reference: Tensor, norms: Tensor) -> int:
        weights, n = self._weights(pointers, ends, kinds), len(reference)
        if len(norms) * GROUP_OF_WEIGHTS < n:
            raise ValueError("there must be a norm for each group")
        tiles = self._tiles(n)
        counts, bads = self.empty(tiles, np.uint32), self.empty(tiles, np.int64)
        self._over_tiles("group_norms", n, *weights, reference, np.int64(n), norms, counts, bads)
        return self._scan(counts, bads)[2]

    def histogram_apart(
        self, pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes, reference: Tensor, lo: int, hi: int
    ) -> Ints:
        bins, region = self._zeros(2048, np.uint64), (np.int64(lo), np.int64(hi))
        self._over_tiles("histogram_apart", hi - lo, *self._weights(pointers, ends, kinds), reference, *region, bins)
        return self.to_host(bins).astype(np.int64)

    def subtract_apart(
        self, pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes, reference: Tensor, lo: int, out: Tensor
    ) -> None:
        region = (np.int64(lo), np.int64(lo + len(out)))
        self._over_tiles("subtract_apart", len(out), *self._weights(pointers, ends, kinds), reference, *region, out)

    def values_apart(
        self, pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes, reference: Tensor, index: Tensor
    ) -> Tensor:
        values, weights, n = self.empty(len(index), np.float32), self._weights(pointers, ends, kinds), len(index)
        self._for_each("values_apart", n, *weights, reference, index, np.int64(n), values)
        return values

    def move_apart(
        self, pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes, reference: Tensor, index: Tensor, mean: Tensor,
        own: Tensor,
    ) -> None:  # fmt: skip
        n = len(index)
        self._for_each("move_apart", n, *self._weights(pointers, ends, kinds), reference, index, np.int64(n), mean, own)

    def add_stretch(self, pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes, lo: int, values: Tensor) -> None:
        region = (np.int64(lo), np.int64(lo + len(values)))
        self._over_tiles("add_stretch", len(values), *self._weights(pointers, ends, kinds), *region, values)

    def neighbours(self, blocks: Ints, width: int, skip: int, count: int) -> Tensor:
        index = self.empty(count, np.int64)
        shape = (np.int64(width), np.int64(skip), np.int64(count))
        self._for_each("neighbours", count, self.from_host(blocks), *shape, index)
        return index

    def by_owner(self, index: Tensor, block: int, size: int, rank: int) -> tuple[Tensor, Ints, Tensor]:
        n, tiles = len(index), self._tiles(len(index))
        marks = self._marks(size * tiles * self.tile)
        shape = (np.int64(tiles), np.int64(block), np.int64(size))
        self._launch("mark_owned", size * tiles, self.launcher.block, index, np.int64(n), *shape, marks.masks, marks.counts)
        offsets, _ = self._sums(marks.counts)
        bounds = self.to_host(offsets)
        counts: Ints = np.diff(bounds[::tiles]) if n else np.zeros(size, dtype=np.int64)
        order, places = self.empty(n, np.int64), self.empty(int(counts[rank]), np.int64)
        found = (np.int64(rank), marks.masks, offsets, order, places)
        self._launch("write_owned", size * tiles, self.launcher.block, index, *shape, *found)
        return order, counts, places

    def _weights(self, pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes) -> Table:
        """As _gradients(), of weights: they stay where they are, so that this thread's last table is mostly the same."""
        if (kinds != FP32).any():
            raise ValueError("weights must be float32")
        key = (pointers.tobytes(), ends.tobytes(), self.launcher.stream)
        before: tuple[Any, Table] | None = getattr(self._own, "table", None)
        if before is None or before[0] != key:
            self._own.table = before = key, self._gradients(pointers, ends, kinds)
        return before[1]
