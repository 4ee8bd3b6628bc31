"""Indices beyond 2^32, without the memory: addresses before an array's begin, and launches that begin with a late block.

Each kernel runs on arrays as they are, and on the same arrays as the end of vectors that have AWAY elements before them.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from checks import Device, draw, some
from emulator import Emulator
from numpy.typing import NDArray
from samples import assert_same

from mpisparse.backends import numpy_backend
from mpisparse.backends.cuda.backend import ADDED, ADDITION, ADDITIONS, CudaBackend
from mpisparse.backends.kinds import BF16, FP16, FP32
from mpisparse.backends.protocol import FEW_BITS, GROUP, GROUP_OF_WEIGHTS

AWAY = 1 << 32  # elements; a multiple of all tiles


def far(array: torch.Tensor, by: int = AWAY) -> torch.Tensor:
    """The array as the end of a vector that has `by` elements before it, which must not be touched."""
    nbytes = (by + len(array)) * array.itemsize
    memory = (ctypes.c_uint8 * nbytes).from_address(array.data_ptr() - by * array.itemsize)
    return torch.frombuffer(memory, dtype=array.dtype)


@dataclass(frozen=True)
class Along:
    """An array of which so many elements belong to each element of the vector."""

    array: NDArray[Any]
    per: float = 1


@dataclass(frozen=True)
class Here:
    """An array that is not as long as the vector, and so is not far away."""

    array: NDArray[Any]


@dataclass(frozen=True)
class Count:
    """The number of elements."""

    n: int


@dataclass(frozen=True)
class Pair:
    """What is one near and another one far away."""

    near: Any
    far: Any


class Twice:
    """Runs kernels near and far away, and compares what they write. only: runs no other. seen: which there are."""

    def __init__(self, backend: CudaBackend, emulator: Emulator, only: str = "") -> None:
        self.backend = backend
        self.emulator = emulator
        self.only = only
        self.seen: set[str] = set()
        self.tile = 32 * emulator.block

    def tiles(self, name: str, n: int, *args: Any) -> None:
        """A launch of a block for each tile of n elements."""
        self._compare(name, -(-n // self.tile), AWAY // self.tile, self.emulator.block, args)

    def threads(self, name: str, n: int, *args: Any, block: int = 0, per: int = 1) -> None:
        """A launch of a thread for each of n elements, or of `per` threads."""
        block = block or self.emulator.block
        self._compare(name, -(-n * per // block), AWAY * per // block, block, args)

    def _compare(self, name: str, grid: int, before: int, block: int, args: Any) -> None:
        self.seen.add(name)
        if self.only not in ("", name):
            return
        near, far_away = self._run(name, grid, 0, block, args), self._run(name, grid, before, block, args)
        for a, b in zip(near, far_away, strict=True):
            assert_same(a, b)

    def _run(self, name: str, grid: int, before: int, block: int, args: Any) -> list[NDArray[Any]]:
        arrays, given = [], []
        for arg in args:
            if isinstance(arg, Along | Here):
                arrays.append(self.backend.from_host(arg.array.copy()))
                per = arg.per if before and isinstance(arg, Along) else 0
                address = arrays[-1].data_ptr() - int(AWAY * per) * arrays[-1].itemsize
                given.append(np.uint64(address % (1 << 64)))  # an empty array has none
            elif isinstance(arg, Count):
                given.append(np.int64(arg.n + (AWAY if before else 0)))
            else:
                given.append((arg.far if before else arg.near) if isinstance(arg, Pair) else arg)
        with self.emulator.beginning_with(before):
            self.backend._launch(name, grid, block, *given)
        return [self.backend.to_host(array) for array in arrays]


def check_far(device: Device, n: int) -> None:
    """Every kind of index: of threads, of tiles, of what is selected, of rows."""
    backend, emulator = device.backend, device.backend.launcher
    assert isinstance(emulator, Emulator)
    values = draw(n)
    acc = backend.from_host(values)
    index, magnitude, bad = backend.select(far(acc), AWAY + 3 * n // 5, AWAY + n, 0.02)
    near = numpy_backend.select(values, 3 * n // 5, n, 0.02)
    assert_same((backend.to_host(index), backend.to_host(magnitude), bad), (near[0] + AWAY, *near[1:]))
    assert_same(backend.to_host(backend.values_at(far(acc), index)), values[near[0]])
    edges = np.array([0, n // 2, n])
    expected = numpy_backend.block_counts(*near[:2], 0.5, edges)
    assert_same(backend.block_counts(index, magnitude, 0.5, edges + AWAY), expected)
    _check_rows(backend, index, magnitude, near)
    run_twice(Twice(backend, emulator), n)
    _check_additions(backend, emulator, n)
    _check_written(backend, emulator, n)


def run_twice(twice: Twice, n: int) -> None:
    """Every kernel whose threads or blocks have a place in a vector."""
    _check_scattered(twice, n)
    _check_blend(twice, n)
    _check_codecs(twice, n)
    _check_passes(twice, n)
    _check_weights(twice, n)
    _check_scores(twice, n)


def _check_rows(backend: CudaBackend, index: torch.Tensor, magnitude: torch.Tensor, near: tuple[Any, Any, int]) -> None:
    rows = -(-(int(near[0][-1]) + 1) // 64) if len(near[0]) else 1
    counts, columns = backend.compress_rows(index, magnitude, 0.02, AWAY, 64, rows)
    union = backend.empty(len(index), np.int64)
    assert backend.expand_rows(counts, columns, AWAY, 64, union)
    assert_same(backend.to_host(union), near[0] + AWAY)


def _check_scattered(twice: Twice, n: int) -> None:
    index, x, y = some(2 * n, 0.4), draw(2 * n), draw(2 * n, seed=1)
    k, acc = len(index), Here(x)
    new, at = Along(y[:k]), Along(index)
    for name in ("values_at", "take", "put", "add_at"):
        twice.threads(name, k, acc, at, Count(k), new)
    buffer, sorted_ = Here(np.ones(2 * n, dtype=np.float32)), Here(index)
    twice.threads("zero_at", k, buffer, np.uint32(FP32), at, Count(k))
    twice.threads("publish_at", k, buffer, np.uint32(FP32), at, Count(k), new)
    twice.threads("add", k, Along(x[:k]), Along(y[:k]), Count(k))
    twice.threads("divide", k, new, np.float32(3), Count(k))
    twice.threads("spoil", k, Along(np.zeros(k, np.uint8)), Count(k), np.uint8(255), Here(np.zeros(1, np.int64)))
    wanted = Along(np.arange(k))
    twice.threads("search", k, sorted_, np.int64(k), wanted, Count(k), Along(np.zeros(k, dtype=np.int64)))
    twice.threads("pick", k, sorted_, wanted, Count(k), Along(np.zeros(k, dtype=np.int64)))
    counts, columns = numpy_backend.compress_rows(index, np.ones(k, np.float32), 0.5, 0, 64, -(-2 * n // 64))
    starts = np.cumsum([0, *counts.tolist()])
    offsets = Pair(twice.backend.from_host(starts), twice.backend.from_host(starts + AWAY))
    shape = (np.int64(0), np.int64(1 << 40), np.int64(64), Along(np.zeros(k, dtype=np.int64)), Here(np.zeros(1, np.int64)))
    twice.threads("expand_rows", k, offsets, np.int64(len(counts)), Along(columns), Count(k), *shape)
    magnitudes, edges = Here(np.ones(k, dtype=np.float32)), np.linspace(0, 2 * n, 8).astype(np.int64)
    blocks = (Along(edges), Count(7), Along(np.zeros(7, dtype=np.int64)))
    twice.threads("block_counts", 7, sorted_, magnitudes, np.int64(k), np.float32(0.5), *blocks, per=32)
    bounds = np.arange(0, 2 * n, 300)
    parts = (Along(bounds), Along(np.minimum(bounds + 300, 2 * n)), Count(len(bounds)), Along(np.zeros(2 * len(bounds)), 2))
    twice.threads("piece_sums", len(bounds), acc, *parts, per=32)
    rows = (Pair(np.int64(0), np.int64(-64 * AWAY)), np.int64(64), Count(7), Along(np.zeros(7, dtype=np.uint32)))
    twice.threads("row_counts", 7, sorted_, magnitudes, np.int64(k), np.float32(0.5), *rows, per=32)


def _check_blend(twice: Twice, n: int) -> None:
    index, carried, k = some(n, 0.4, 1), some(n, 0.3, 2), len(some(n, 0.4, 1))
    new, old = draw(k, seed=3), draw(len(carried), seed=4)
    words = -(-max(k, len(carried), 1) // twice.tile) * twice.tile // 32
    masks, counts = Along(np.zeros(words, np.uint32), 1 / 32), Along(np.zeros(words, np.uint32), 1 / twice.tile)
    twice.tiles("mark_absent", len(carried), Along(carried), Count(len(carried)), Here(index), np.int64(k), masks, counts)
    absent = np.setdiff1d(carried, index)
    before = old[np.isin(carried, absent)]
    out = [Along(np.zeros(k + len(absent), dtype)) for dtype in (np.int64, np.float32, np.uint8)]
    shares, others = (np.float32(0.7), np.float32(0.3)), (Here(carried), Here(old), np.int64(len(carried)))
    twice.threads(
        "blend_selected", k, Along(index), Along(new), Count(k), *others, Here(absent), np.int64(len(absent)), *shares, *out
    )
    last = (Here(index), np.int64(k), *shares, *out)
    twice.threads("blend_carried", len(absent), Along(absent), Along(before), Count(len(absent)), *last)
    selected, mean = (np.arange(k) % 3 == 0).astype(np.uint8), np.where(np.arange(k) % 2, np.float32(0), new)
    sent = (Along(index), Along(new), Along(selected), Along(mean), Along(draw(k, seed=5)), Count(k))
    twice.tiles("drop_decayed", k, Here(draw(n) / np.float32(4)), *sent, np.float32(0.43), masks, counts)
    marks = np.full(words, 0x5555_5555, dtype=np.uint32)
    offsets = Along(np.arange(words * 32 // twice.tile + 1) * (twice.tile // 2), 1 / twice.tile)
    whole = Along(np.arange(words * 32)), Along(draw(words * 32))
    kept = Here(np.zeros(words * 16, np.int64)), Here(np.zeros(words * 16, np.float32))
    twice.tiles("write_kept", words * 32, *whole, Along(marks, 1 / 32), offsets, *kept)
    columns = Here(np.zeros(words * 16, np.uint16))
    row = (np.int64(0), np.int64(65_536))
    twice.tiles("write_columns", words * 32, whole[0], *row, Along(marks, 1 / 32), offsets, columns, np.int64(words * 16))


def _check_codecs(twice: Twice, n: int) -> None:
    x, total, groups = draw(n), Along(draw(n, seed=5) / np.float32(4)), -(-n // GROUP)
    for name, dtype in (("int8", np.int8), ("fp16", np.uint16), ("bf16", np.uint16)):
        scales = [] if name == "bf16" else [np.zeros(groups, dtype=np.float32)]
        codes, left = np.zeros(n, dtype=dtype), x.copy()
        far_scales = [Along(s, 1 / GROUP) for s in scales]
        block = 0 if name == "bf16" else GROUP
        twice.threads(f"encode_{name}", n, Along(x), Count(n), *far_scales, Along(codes), block=block)
        getattr(numpy_backend, f"encode_{name}")(left, *scales, codes)
        for verb in ("decode", "add"):
            twice.threads(f"{verb}_{name}", n, *[Along(s, 1 / GROUP) for s in scales], Along(codes), Count(n), total)
    for name, form in FEW_BITS.items():
        scales_of = np.zeros(-(-n // form.group), dtype=np.uint16)
        codes = np.zeros(n // form.group * form.nbytes + min(n % form.group, form.nbytes), dtype=np.uint8)
        sent = (Along(scales_of, 1 / form.group), Along(codes, form.bits / 8))
        for verb in ("encode", "pack"):
            twice.threads(f"{verb}_{name}", n, Along(x), Count(n), *sent, block=GROUP)
        getattr(numpy_backend, f"encode_{name}")(x.copy(), scales_of, codes)
        for verb in ("decode", "add", "subtract"):
            twice.threads(f"{verb}_{name}", n, *sent, Count(n), total)


def _check_passes(twice: Twice, n: int) -> None:
    """Over all elements, also with values that are not finite, in whole tiles and in others."""
    tiles = -(-n // twice.tile)
    masks = Along(np.zeros(tiles * twice.tile // 32, np.uint32), 1 / 32)
    marks = (masks, Along(np.zeros(tiles, np.uint32), 1 / twice.tile))
    x, magnitudes = draw(n) / np.float32(4), np.abs(draw(n, seed=2))
    twice.tiles("mark_reached", n, Along(magnitudes), Count(n), np.float32(0.02), *marks)
    twice.tiles("histogram", n, Along(x), np.int64(0), Count(n), Here(np.zeros(2048, np.uint64)))
    counts = Here(np.zeros(3, np.uint64))
    rungs = Here(np.array([0.01, 0.5], dtype=np.float32))
    twice.tiles("tail_counts", n, Along(magnitudes), Count(n), rungs, np.uint32(2), counts)
    x[[n // 2, -1]] = np.nan, np.inf
    gradients = {FP32: draw(n, seed=1) / np.float32(4), FP16: np.zeros(n, np.uint16), BF16: np.zeros(n, np.uint16)}
    for kind, gradient in gradients.items():
        here, there = (_source(twice.backend, gradient, kind, by) for by in (0, AWAY))
        bads, bads_there = (_Bads(twice.backend, tiles, by) for by in (0, AWAY // twice.tile))
        area = (Pair(np.int64(0), np.int64(AWAY)), Count(n), np.uint32(0x3C00_0000))
        pass_ = (Count(n), *map(Pair, here.table, there.table), np.int64(1), *area)
        twice.tiles("accumulate_select", n, Along(x), *pass_, np.int64(0), *marks, Pair(bads.array, bads_there.array))
        assert twice.only or bads.found() == bads_there.found() == n // 2
        average = (Along(x), Along(magnitudes), np.float32(0.9), np.float32(0.1))
        twice.tiles("average_select", n, *average, *pass_, *marks, Pair(bads.array, bads_there.array))
        assert twice.only or bads.found() == bads_there.found() == n // 2
        here, there = (_source(twice.backend, _spoiled(gradient, kind), kind, by) for by in (0, AWAY))
        watched = (*map(Pair, here.table, there.table), np.int64(1), marks[1], Pair(bads.array, bads_there.array))
        twice.tiles("first_nonfinite", n, Count(n), *watched)
        assert twice.only or bads.found() == bads_there.found() == n // 2


def _check_weights(twice: Twice, n: int) -> None:
    """Weights against a reference, in several tiles."""
    tiles, x, weights = (
        -(-n // twice.tile),
        draw(n) / np.float32(4),
        draw(n, seed=1) / np.float32(4),
    )  # all differences are finite
    weights[[n // 2, -1]] = np.nan, np.inf
    here, there = (_source(twice.backend, weights, FP32, by) for by in (0, AWAY))
    table = (*map(Pair, here.table, there.table), np.int64(1))
    masks, counts = (
        Along(np.zeros(tiles * twice.tile // 32, np.uint32), 1 / 32),
        Along(np.zeros(tiles, np.uint32), 1 / twice.tile),
    )
    begin, region = Pair(np.int64(0), np.int64(AWAY)), (np.int64(0), Count(n))
    bads, bads_there = (_Bads(twice.backend, tiles, by) for by in (0, AWAY // twice.tile))
    marks = (masks, counts, Pair(bads.array, bads_there.array))
    twice.tiles("select_apart", n, *table, Along(x), Count(n), begin, Count(n), np.uint32(0x3C00_0000), *marks)
    assert twice.only or bads.found() == bads_there.found() == n // 2
    norms = Along(np.zeros(-(-n // GROUP_OF_WEIGHTS), np.float32), 1 / GROUP_OF_WEIGHTS)
    twice.tiles("group_norms", n, *table, Along(x), Count(n), norms, *marks[1:])
    assert twice.only or bads.found() == bads_there.found() == n // 2
    twice.tiles("histogram_apart", n, *table, Along(x), *region, Here(np.zeros(2048, np.uint64)))
    twice.tiles("subtract_apart", n, *table, Along(x), *region, Along(np.zeros(n, np.float32)))
    twice.tiles("add_stretch", n, *table, *region, Along(x))
    index = some(n, 0.4)
    k, values = len(index), Along(draw(len(index), seed=2))
    near = (*here.table, np.int64(1), Here(x), Along(index), Count(k))
    twice.threads("values_apart", k, *near, Along(np.zeros(k, np.float32)))
    twice.threads("move_apart", k, *near, values, Along(draw(k, seed=3)))
    skip = Pair(np.int64(0), np.int64(-AWAY))
    twice.threads("neighbours", k, Here(index), np.int64(1), skip, Count(k), Along(np.zeros(k, np.int64)))
    words = -(-max(k, 1) // twice.tile) * twice.tile // 32
    owned = (Along(np.zeros(words, np.uint32), 1 / 32), Along(np.zeros(words, np.uint32), 1 / twice.tile))
    many = Pair(np.int64(-(-k // twice.tile)), np.int64(AWAY // twice.tile + -(-k // twice.tile)))
    twice.tiles("mark_owned", k, Along(index), Count(k), many, np.int64(64), np.int64(1), *owned)


def _check_scores(twice: Twice, n: int) -> None:
    """Elements with scores, gradients that are recorded, and bytes at an index."""
    tiles, x, scores = -(-n // twice.tile), draw(n), np.resize(np.arange(255, dtype=np.uint8), n)
    x[[n // 2, -1]] = np.nan, np.inf
    bads, bads_there = (_Bads(twice.backend, tiles, by) for by in (0, AWAY // twice.tile))
    marks = (
        Along(np.zeros(tiles * twice.tile // 32, np.uint32), 1 / 32),
        Along(np.zeros(tiles, np.uint32), 1 / twice.tile),
        Pair(bads.array, bads_there.array),
    )
    area = (np.uint32(1), Pair(np.int64(0), np.int64(AWAY)), Count(n), np.uint32(0x3B00_0000), np.int64(0))
    twice.tiles("select_scored", n, Along(x), Along(scores), *area, *marks)
    assert twice.only or bads.found() == bads_there.found() == n // 2
    bins = Here(np.zeros(2048, np.uint64))
    twice.tiles("histogram_scored", n, Along(draw(n)), Along(scores), np.uint32(2), np.int64(0), Count(n), bins)
    here, there = (_source(twice.backend, draw(n, seed=1), FP32, by) for by in (0, AWAY))
    table = (*map(Pair, here.table, there.table), np.int64(1))
    twice.threads("record", n, *table, np.int64(0), Count(n), Along(np.zeros(n, np.uint16)))
    index = some(n, 0.4)
    k, at = len(index), Along(index)
    twice.threads("gather", k, *here.table, np.int64(1), at, Count(k), Along(np.zeros(k, np.float32)))
    twice.threads("bytes_at", k, Here(scores), at, Count(k), Along(np.zeros(k, np.uint8)))
    twice.threads("put_bytes", k, Here(scores), at, Count(k), Along(np.zeros(k, np.uint8)))


def _check_written(backend: CudaBackend, emulator: Emulator, n: int) -> None:
    """What is selected of weights, and dealt out to owners, far from the first element."""
    before, tiles = AWAY // backend.tile, -(-n // backend.tile)
    weights, reference = draw(n), draw(n, seed=1)
    there, other = _source(backend, weights, FP32, AWAY), backend.from_host(reference)
    masks = np.full(tiles * emulator.block, 0x5555_5555, dtype=np.uint32)
    marked = np.arange(0, n, 2)
    masks[n // 32] &= np.uint32((1 << n % 32) - 1)
    masks[n // 32 + 1 :] = 0
    ends = np.minimum(np.arange(tiles + 1) * backend.tile // 2, len(marked))
    offsets, bits = backend.from_host(ends), backend.from_host(masks)
    far_offsets, far_bits = far(offsets, before), far(bits, AWAY // 32)
    index, magnitude = backend.empty(len(marked), np.int64), backend.empty(len(marked), np.float32)
    args = (*there.table, np.int64(1), far(other), far_bits, far_offsets, index, magnitude)
    scores, rule = backend.from_host(np.full(n, 254, np.uint8)), np.uint32(1)
    places, keys = backend.empty(len(marked), np.int64), backend.empty(len(marked), np.float32)
    scored = (far(other), far(scores), rule, np.int64(0), far_bits, far_offsets, places, keys)
    order, dealt = backend.empty(len(marked), np.int64), backend.from_host(np.arange(n))
    shape = (np.int64(before + tiles), np.int64(64), np.int64(1), np.int64(1))  # this rank owns nothing
    with emulator.beginning_with(before):
        backend._launch("write_apart", tiles, emulator.block, *args)
        backend._launch("write_scored", tiles, emulator.block, *scored)
        backend._launch("write_owned", tiles, emulator.block, far(dealt), *shape, far_bits, far_offsets, order, order)
    assert_same(backend.to_host(index), marked + AWAY)
    with np.errstate(over="ignore"):
        assert_same(backend.to_host(magnitude), np.abs(weights - reference)[marked])
    assert_same(backend.to_host(places), marked + AWAY)
    assert_same(backend.to_host(keys), numpy_backend.keys_of(reference, np.full(n, 254, np.uint8), 1)[marked])
    assert_same(backend.to_host(order), marked + AWAY)


def _spoiled(gradient: NDArray[Any], kind: int) -> NDArray[Any]:
    """The gradient with infinities."""
    copy = gradient.copy()
    copy[[len(copy) // 2, -1]] = np.inf if kind == FP32 else {FP16: 0x7C00, BF16: 0x7F80}[kind]
    return copy


class _source:  # noqa: N801 - reads as a function
    """A gradient of a vector whose first `by` elements have the same gradient, as a table on the device."""

    def __init__(self, backend: CudaBackend, gradient: NDArray[Any], kind: int, by: int) -> None:
        self.alive = backend.from_host(gradient)
        self.table = (
            backend.from_host(np.array([far(self.alive, by).data_ptr()], dtype=np.uint64)),
            backend.from_host(np.array([by + len(gradient)])),
            backend.from_host(np.array([kind], dtype=np.uint8)),
        )


class _Bads:
    """Where each tile notes its first value that is not finite."""

    def __init__(self, backend: CudaBackend, tiles: int, before: int) -> None:
        self.backend = backend
        self.away = before * 32 * backend.launcher.block
        self.near = backend.empty(tiles, np.int64)
        self.array = far(self.near, before)

    def found(self) -> int:
        """The lowest index, near."""
        return int(self.backend.to_host(self.near).min()) - self.away


def _check_additions(backend: CudaBackend, emulator: Emulator, n: int) -> None:
    """A gradient of more than 2^32 elements, added during backward: its last tiles."""
    values, more = draw(n) / np.float32(4), draw(n, seed=1) / np.float32(4)
    more[-1] = np.inf
    total, term, lowest = backend.from_host(values), backend.from_host(more), backend.empty(1, np.int64).fill_(-1)
    before, tiles = AWAY // backend.tile, -(-n // backend.tile)
    table = np.zeros(ADDED, dtype=ADDITION)
    table[0] = (far(total).data_ptr(), far(term).data_ptr(), AWAY + n, before + tiles, FP32)
    with emulator.beginning_with(before):
        backend._launch("accumulate", tiles, emulator.block, table.view(ADDITIONS)[0], lowest)
    assert_same(backend.to_host(total), values + more)
    assert int(backend.to_host(lowest)[0]) == total[-1:].data_ptr()
