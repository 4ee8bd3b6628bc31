"""The operations of mpisparse.backends.protocol on a device, by kernel launches; the same results to the last bit.

Vectors are torch tensors on the device: copies, fills, slices and views are torch's. What is collected is compacted in three
launches (mark, scan, write); between them the host learns only how many elements there are.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mpisparse.arrays import Bytes, Doubles, Floats, Ints
from mpisparse.backends import numpy_tallies
from mpisparse.backends.cuda.launcher import Launcher
from mpisparse.backends.cuda.launches import DTYPES, Found, Marks, bits_of
from mpisparse.backends.cuda.scores import Scores
from mpisparse.backends.cuda.weights import Weights
from mpisparse.backends.protocol import GROUP, Rows

RUNGS = 1024  # limit of one launch of tail_counts

ADDED = 32  # gradients that one launch of `accumulate` adds
ADDITION = np.dtype([("acc", "u8"), ("source", "u8"), ("size", "i8"), ("tiles", "i8"), ("kind", "u8")])
ADDITIONS = np.dtype([("at", ADDITION, ADDED)])


class Additions:
    """What backward adds to one vector: small gradients that wait for others, to be added by one launch.

    lowest: a word of the device, the lowest address at which a sum was not finite, or the largest number.
    """

    def __init__(self, lowest: Tensor) -> None:
        self.lowest = lowest.fill_(-1)
        self.waiting: list[tuple[Tensor, Tensor, int]] = []
        self.elements = 0

    def append(self, acc: Tensor, source: Tensor, kind: int) -> None:
        """Note a gradient, which lives until it is added."""
        self.waiting.append((acc, source, kind))
        self.elements += len(acc)

    def take(self) -> list[tuple[Tensor, Tensor, int]]:
        """All that wait; from now on none do."""
        taken, self.waiting, self.elements = self.waiting, [], 0
        return taken


class CudaBackend(Weights, Scores):
    """The CUDA backend on one device; mpisparse.backends.protocol documents its operations."""

    name = "cuda"

    def __init__(self, launcher: Launcher, host: Any = numpy_tallies, *, pooled: bool = False) -> None:
        """`host` codes indices and counts that are on the host. pooled: vectors are in memory that earlier ones had."""
        super().__init__(launcher, pooled=pooled)
        self.encode_indices, self.decode_indices = host.encode_indices, host.decode_indices
        self.encode_counts, self.decode_counts = host.encode_counts, host.decode_counts
        self.encode_falling, self.decode_falling = host.encode_falling, host.decode_falling
        self.least_borders = host.least_borders
        self._additions: dict[int, Additions] = {}  # by the address of the storage added to, as backends are shared

    def use_threads(self, count: int) -> None:
        """Do nothing: only host kernels use threads."""

    def hindrance(self) -> str:
        if not self.launcher.capturing:
            return ""
        return (
            "a CUDA graph cannot hold an exchange: ranks agree on the host, and each step sends other elements; capture "
            "forward and backward alone, and call step() outside"
        )

    # Arrays

    def array_of(self, tensor: Tensor) -> Tensor:
        return self.launcher.adopt(tensor)

    def copy(self, array: Tensor) -> Tensor:
        return self._allocate(len(array), array.dtype).copy_(array)

    def fill(self, array: Tensor, value: float) -> None:
        array.fill_(value)

    def view_as(self, array: Tensor, dtype: Any) -> Tensor:
        return array.view(DTYPES[np.dtype(dtype)])

    # Passes over the flat vector

    def accumulate_select(
        self, acc: Tensor, pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes, lo: int, hi: int,
        floor: float,
    ) -> Found:  # fmt: skip
        marks = self._marks(len(acc))
        gradients = self._gradients(pointers, ends, kinds)
        region = (np.int64(lo), np.int64(hi), bits_of(floor), np.int64(0))
        self._over_tiles("accumulate_select", len(acc), acc, np.int64(len(acc)), *gradients, *region, *marks)
        return self._selected(acc, 0, marks)

    def average_select(
        self, acc: Tensor, average: Tensor, rate: float, pointers: NDArray[np.uint64], ends: Ints,
        kinds: Bytes, lo: int, hi: int, floor: float,
    ) -> Found:  # fmt: skip
        marks = self._marks(len(acc))
        gradients = self._gradients(pointers, ends, kinds)
        rates = (np.float32(rate), np.float32(1) - np.float32(rate), np.int64(len(acc)))
        region = (np.int64(lo), np.int64(hi), bits_of(floor))
        self._over_tiles("average_select", len(acc), acc, average, *rates, *gradients, *region, *marks)
        return self._selected(average, 0, marks)

    def select(self, acc: Tensor, lo: int, hi: int, floor: float) -> Found:
        first = lo // self.tile
        length = max(0, hi - first * self.tile) if hi > lo else 0
        marks = self._marks(length)
        region = (np.int64(lo), np.int64(hi), bits_of(floor), np.int64(first))
        self._over_tiles("accumulate_select", length, acc, np.int64(hi), *_NO_GRADIENTS, *region, *marks)
        return self._selected(acc, first, marks)

    def accumulate(self, acc: Tensor, pointer: int, kind: int) -> int:
        """Launch and return -1, since backward must not wait; late_nonfinite() reports later."""
        if pointer and len(acc):
            self._add(self._additions_to(acc), [(acc, pointer, kind)])
        return -1

    def accumulate_soon(self, acc: Tensor, source: Tensor, kind: int) -> int:
        """As accumulate(), of a tensor; small ones wait for others until they fill a tile, or until flush()."""
        if len(acc):
            added = self._additions_to(acc)
            added.append(acc, source, kind)
            if added.elements >= self.tile or len(added.waiting) == ADDED:
                self.flush(acc)
        return -1

    def flush(self, acc: Tensor) -> None:
        """Add the gradients that wait to be added to acc, or to any part of its memory."""
        added = self._additions_to(acc)
        waiting = added.take()
        self._add(added, [(part, source.data_ptr(), kind) for part, source, kind in waiting])

    def first_bad(self, values: Tensor) -> Tensor:
        n, marks = len(values), self._marks(len(values))
        region = (np.int64(0), np.int64(n), bits_of(float("inf")), np.int64(0))
        self._over_tiles("accumulate_select", n, values, np.int64(n), *_NO_GRADIENTS, *region, *marks)
        return self._sums(marks.counts, marks.bads)[1][1:2]

    def spoil(self, payload: Tensor, value: int, bad: Tensor) -> None:
        self._for_each("spoil", len(payload), payload, np.int64(len(payload)), np.uint8(value), bad)

    def late_nonfinite(self, acc: Tensor) -> int:
        """Wait for the device and return the lowest non-finite index since the last call, or -1."""
        added = self._additions.get(acc.untyped_storage().data_ptr())
        if added is None:
            return -1
        self.flush(acc)
        address = int(self.to_host(added.lowest)[0])
        if address < 0:
            return -1
        added.lowest.fill_(-1)
        return (address - acc.data_ptr()) // acc.itemsize

    def first_nonfinite(self, pointers: NDArray[np.uint64], ends: Ints, kinds: Bytes) -> int:
        size = int(ends[-1]) if len(ends) else 0
        tiles = self._tiles(size)
        counts, bads = self.empty(tiles, np.uint32), self.empty(tiles, np.int64)
        gradients = self._gradients(pointers, ends, kinds)
        self._over_tiles("first_nonfinite", size, np.int64(size), *gradients, counts, bads)
        return self._scan(counts, bads)[2]

    # Counts

    def histogram(self, acc: Tensor, lo: int, hi: int) -> Ints:
        bins = self._zeros(2048, np.uint64)
        self._over_tiles("histogram", hi - lo, acc, np.int64(lo), np.int64(hi), bins)
        return self.to_host(bins).astype(np.int64)

    def piece_sums(self, values: Tensor, begins: Ints, ends: Ints) -> Doubles:
        pieces, bounds = len(begins), self.from_host(np.concatenate([begins, ends]))
        sums = self.empty(2 * pieces, np.float64)
        table = (bounds[:pieces], bounds[pieces:], np.int64(pieces))
        self._for_each("piece_sums", 32 * pieces, values, *table, sums)
        return self.to_host(sums)

    def tail_counts(self, magnitudes: Tensor, rungs: Floats) -> Ints:
        pieces = [self._tail_counts(magnitudes, rungs[at : at + RUNGS]) for at in range(0, len(rungs), RUNGS)]
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)

    def _tail_counts(self, magnitudes: Tensor, rungs: Floats) -> Ints:
        reached = self._zeros(len(rungs) + 1, np.uint64)
        n, count = np.int64(len(magnitudes)), np.uint32(len(rungs))
        self._over_tiles("tail_counts", len(magnitudes), magnitudes, n, self.from_host(rungs), count, reached)
        counts: Ints = np.cumsum(self.to_host(reached).astype(np.int64)[::-1])[::-1][1:]
        return counts

    def block_counts(self, index: Tensor, magnitude: Tensor, threshold: float, edges: Ints) -> Ints:
        counts, blocks = self.empty(len(edges) - 1, np.int64), len(edges) - 1
        found = (index, magnitude, np.int64(len(index)), np.float32(threshold))
        self._for_each("block_counts", 32 * blocks, *found, self.from_host(edges), np.int64(blocks), counts)
        return self.to_host(counts)

    def search(self, index: Tensor, values: Ints) -> Ints:
        places = self.empty(len(values), np.int64)
        wanted = self.from_host(np.asarray(values, dtype=np.int64))
        self._for_each("search", len(values), index, np.int64(len(index)), wanted, np.int64(len(values)), places)
        return self.to_host(places)

    def pick(self, index: Tensor, places: Ints) -> Ints:
        picked = self.empty(len(places), np.int64)
        wanted = self.from_host(np.asarray(places, dtype=np.int64))
        self._for_each("pick", len(places), index, wanted, np.int64(len(places)), picked)
        return self.to_host(picked)

    # Rows

    def compress_rows(
        self, index: Tensor, magnitude: Tensor, threshold: float, lo: int, row: int, rows: int
    ) -> tuple[Tensor, Tensor]:
        counts, columns = self.empty(rows, np.uint32), self.empty(len(index), np.uint16)
        self.pack_rows(index, magnitude, threshold, lo, row, counts, columns)
        return counts, columns[: int(self.to_host(counts).sum())]

    def pack_rows(
        self, index: Tensor, magnitude: Tensor, threshold: float, lo: int, row: int, counts: Tensor, columns: Tensor
    ) -> None:
        n, least, shape, rows = np.int64(len(index)), np.float32(threshold), (np.int64(lo), np.int64(row)), len(counts)
        self._for_each("row_counts", 32 * rows, index, magnitude, n, least, *shape, np.int64(rows), counts)
        marks = self._marks(len(index))
        self._over_tiles("mark_reached", len(index), magnitude, n, least, marks.masks, marks.counts)
        offsets, _ = self._sums(marks.counts)
        room = np.int64(len(columns))
        self._over_tiles("write_columns", len(index), index, *shape, marks.masks, offsets, columns, room)

    def expand_rows(self, counts: Tensor, columns: Tensor, lo: int, row: int, out: Tensor) -> bool:
        if len(columns) != len(out) or int(self.to_host(counts).sum()) != len(out):
            return False
        self.unpack_rows(counts, columns, lo, lo + row * len(counts), row, out)
        return True

    def unpack_rows(self, counts: Tensor, columns: Tensor, lo: int, hi: int, row: int, out: Tensor) -> None:
        offsets, _ = self._sums(counts)
        sizes = (np.int64(len(out)), np.int64(lo), np.int64(hi), np.int64(row))
        rows = np.int64(len(counts))
        self._for_each("expand_rows", len(out), offsets, rows, columns, *sizes, out, self._flag)

    # Reads and writes at an index

    def values_at(self, acc: Tensor, index: Tensor) -> Tensor:
        values = self.empty(len(index), np.float32)
        self._for_each("values_at", len(index), acc, index, np.int64(len(index)), values)
        return values

    def take(self, acc: Tensor, index: Tensor, out: Tensor) -> None:
        self._for_each("take", len(index), acc, index, np.int64(len(index)), out)

    def put(self, acc: Tensor, index: Tensor, values: Tensor) -> None:
        self._for_each("put", len(index), acc, index, np.int64(len(index)), values)

    def add_at(self, acc: Tensor, index: Tensor, values: Tensor) -> None:
        self._for_each("add_at", len(index), acc, index, np.int64(len(index)), values)

    def zero_at(self, address: int, kind: int, count: int, index: Tensor) -> None:
        self._for_each("zero_at", len(index), np.uint64(address), np.uint32(kind), index, np.int64(len(index)))

    def publish_at(self, address: int, kind: int, count: int, index: Tensor, values: Tensor) -> None:
        place = (np.uint64(address), np.uint32(kind))
        self._for_each("publish_at", len(index), *place, index, np.int64(len(index)), values)

    def add(self, total: Tensor, term: Tensor) -> None:
        self._for_each("add", len(total), total, term, np.int64(len(total)))

    def divide(self, values: Tensor, by: float) -> None:
        self._for_each("divide", len(values), values, np.float32(by), np.int64(len(values)))

    # Momentum

    def blend(
        self, index: Tensor, values: Tensor, carried: Tensor, previous: Tensor, share: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        n, m = len(index), len(carried)
        masks, counts, _ = self._marks(m)
        self._over_tiles("mark_absent", m, carried, np.int64(m), index, np.int64(n), masks, counts)
        absent, before = self._kept(carried, previous, masks, counts)
        shares = (np.float32(share), np.float32(1) - np.float32(share))
        both, mixed, selected = (self.empty(n + len(absent), kind) for kind in (np.int64, np.float32, np.uint8))
        others = np.int64(len(absent))
        first = (index, values, np.int64(n), carried, previous, np.int64(m), absent, others)
        self._for_each("blend_selected", n, *first, *shares, both, mixed, selected)
        second = (absent, before, others, index, np.int64(n))
        self._for_each("blend_carried", len(absent), *second, *shares, both, mixed, selected)
        return both, mixed, selected

    def drop_decayed(
        self, acc: Tensor, index: Tensor, values: Tensor, selected: Tensor, mean: Tensor,
        left: Tensor, pending: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        n = len(index)
        masks, counts, _ = self._marks(n)
        sent = (acc, index, values, selected, mean, left, np.int64(n), np.float32(pending))
        self._over_tiles("drop_decayed", n, *sent, masks, counts)
        return self._kept(index, values, masks, counts)

    # Codecs

    def encode_int8(self, x: Tensor, scales: Tensor, q: Tensor) -> None:
        self._launch("encode_int8", -(-len(x) // GROUP), GROUP, x, np.int64(len(x)), scales, q)

    def decode_int8(self, scales: Tensor, q: Tensor, x: Tensor) -> None:
        self._for_each("decode_int8", len(x), scales, q, np.int64(len(x)), x)

    def encode_fp16(self, x: Tensor, scales: Tensor, h: Tensor) -> None:
        self._launch("encode_fp16", -(-len(x) // GROUP), GROUP, x, np.int64(len(x)), scales, h)

    def decode_fp16(self, scales: Tensor, h: Tensor, x: Tensor) -> None:
        self._for_each("decode_fp16", len(x), scales, h, np.int64(len(x)), x)

    def encode_bf16(self, x: Tensor, h: Tensor) -> None:
        self._for_each("encode_bf16", len(x), x, np.int64(len(x)), h)

    def decode_bf16(self, h: Tensor, x: Tensor) -> None:
        self._for_each("decode_bf16", len(x), h, np.int64(len(x)), x)

    def add_int8(self, scales: Tensor, q: Tensor, total: Tensor) -> None:
        self._for_each("add_int8", len(total), scales, q, np.int64(len(total)), total)

    def add_fp16(self, scales: Tensor, h: Tensor, total: Tensor) -> None:
        self._for_each("add_fp16", len(total), scales, h, np.int64(len(total)), total)

    def add_bf16(self, h: Tensor, total: Tensor) -> None:
        self._for_each("add_bf16", len(total), h, np.int64(len(total)), total)

    def encode_int4(self, x: Tensor, scales: Tensor, codes: Tensor) -> None:
        self._launch("encode_int4", -(-len(x) // GROUP), GROUP, x, np.int64(len(x)), scales, codes)

    def pack_int4(self, x: Tensor, scales: Tensor, codes: Tensor) -> None:
        self._launch("pack_int4", -(-len(x) // GROUP), GROUP, x, np.int64(len(x)), scales, codes)

    def decode_int4(self, scales: Tensor, codes: Tensor, x: Tensor) -> None:
        self._for_each("decode_int4", len(x), scales, codes, np.int64(len(x)), x)

    def add_int4(self, scales: Tensor, codes: Tensor, total: Tensor) -> None:
        self._for_each("add_int4", len(total), scales, codes, np.int64(len(total)), total)

    def subtract_int4(self, scales: Tensor, codes: Tensor, total: Tensor) -> None:
        self._for_each("subtract_int4", len(total), scales, codes, np.int64(len(total)), total)

    def settle_int4(self, rows: Rows, by: float, error: Tensor, left: Tensor, scales: Tensor, codes: Tensor) -> Tensor:
        return self._settle("int4", rows, by, error, left, (scales, codes))

    def encode_int2(self, x: Tensor, scales: Tensor, codes: Tensor) -> None:
        self._launch("encode_int2", -(-len(x) // GROUP), GROUP, x, np.int64(len(x)), scales, codes)

    def pack_int2(self, x: Tensor, scales: Tensor, codes: Tensor) -> None:
        self._launch("pack_int2", -(-len(x) // GROUP), GROUP, x, np.int64(len(x)), scales, codes)

    def decode_int2(self, scales: Tensor, codes: Tensor, x: Tensor) -> None:
        self._for_each("decode_int2", len(x), scales, codes, np.int64(len(x)), x)

    def add_int2(self, scales: Tensor, codes: Tensor, total: Tensor) -> None:
        self._for_each("add_int2", len(total), scales, codes, np.int64(len(total)), total)

    def subtract_int2(self, scales: Tensor, codes: Tensor, total: Tensor) -> None:
        self._for_each("subtract_int2", len(total), scales, codes, np.int64(len(total)), total)

    def settle_int2(self, rows: Rows, by: float, error: Tensor, left: Tensor, scales: Tensor, codes: Tensor) -> Tensor:
        return self._settle("int2", rows, by, error, left, (scales, codes))

    def encode_sign(self, x: Tensor, scales: Tensor, codes: Tensor) -> None:
        self._launch("encode_sign", -(-len(x) // GROUP), GROUP, x, np.int64(len(x)), scales, codes)

    def pack_sign(self, x: Tensor, scales: Tensor, codes: Tensor) -> None:
        self._launch("pack_sign", -(-len(x) // GROUP), GROUP, x, np.int64(len(x)), scales, codes)

    def decode_sign(self, scales: Tensor, codes: Tensor, x: Tensor) -> None:
        self._for_each("decode_sign", len(x), scales, codes, np.int64(len(x)), x)

    def add_sign(self, scales: Tensor, codes: Tensor, total: Tensor) -> None:
        self._for_each("add_sign", len(total), scales, codes, np.int64(len(total)), total)

    def subtract_sign(self, scales: Tensor, codes: Tensor, total: Tensor) -> None:
        self._for_each("subtract_sign", len(total), scales, codes, np.int64(len(total)), total)

    def settle_sign(self, rows: Rows, by: float, error: Tensor, left: Tensor, scales: Tensor, codes: Tensor) -> Tensor:
        return self._settle("sign", rows, by, error, left, (scales, codes))

    def _settle(self, codec: str, rows: Rows, by: float, error: Tensor, left: Tensor, out: tuple[Tensor, Tensor]) -> Tensor:
        getattr(self, f"decode_{codec}")(*rows[0], left)
        for row in rows[1:]:
            getattr(self, f"add_{codec}")(*row, left)
        self.divide(left, by)
        self.add(left, error)
        bad = self.first_bad(left)
        getattr(self, f"encode_{codec}")(left, *out)
        return bad

    # Launches

    def _additions_to(self, acc: Tensor) -> Additions:
        """What backward adds to the memory of a vector, for as long as that lives."""
        storage = acc.untyped_storage()
        key = storage.data_ptr()
        if key not in self._additions:
            self._additions[key] = Additions(self.empty(1, np.int64))
            weakref.finalize(storage, self._additions.pop, key, None)
        return self._additions[key]

    def _add(self, added: Additions, gradients: list[tuple[Tensor, int, int]]) -> None:
        """Add some gradients, by one launch."""
        table, tiles = np.zeros(ADDED, dtype=ADDITION), 0
        for i, (acc, pointer, kind) in enumerate(gradients):
            tiles += self._tiles(len(acc))
            table[i] = (acc.data_ptr(), pointer, len(acc), tiles, kind)
        self._launch("accumulate", tiles, self.launcher.block, table.view(ADDITIONS)[0], added.lowest)

    def _selected(self, acc: Tensor, first: int, marks: Marks) -> Found:
        """Collect the marked elements with their magnitudes in acc; the marks start at tile `first`."""
        offsets, total, bad = self._scan(marks.counts, marks.bads)
        index, magnitude = self.empty(total, np.int64), self.empty(total, np.float32)
        if total:
            args = (acc, np.int64(first), marks.masks, offsets, index, magnitude)
            self._launch("write_selected", len(marks.counts), self.launcher.block, *args)
        return index, magnitude, bad

    def _kept(self, index: Tensor, values: Tensor, masks: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the marked elements of an index with their values."""
        offsets, total, _ = self._scan(counts)
        kept = self.empty(total, np.int64), self.empty(total, np.float32)
        self._over_tiles("write_kept", len(index), index, values, masks, offsets, *kept)
        return kept


_NO_GRADIENTS = (np.uint64(0), np.uint64(0), np.uint64(0), np.int64(0))
