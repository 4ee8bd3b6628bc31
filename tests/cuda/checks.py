"""Every CUDA operation against mpisparse.backends.numpy_backend, to the last bit.

They run on a given device with a given number of elements.
A check raises if a result differs. Tests run them on the emulator and on a GPU; planted bugs must make one of them fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from samples import FLOORS, NONFINITE, SPECIAL, TYPES, Flat, assert_same, gradients, halfway, values

from mpisparse.backends import numpy_backend
from mpisparse.backends.cuda.backend import CudaBackend
from mpisparse.backends.keys import PRODUCTS, SCORES
from mpisparse.backends.kinds import BF16, FP16, FP32, FP64, STORED
from mpisparse.backends.protocol import FEW_BITS, GROUP_OF_WEIGHTS, PIECE
from mpisparse.comm.regions import Groups, Part
from mpisparse.select.threshold import HUGE, TINY, spread

FEW_BITS_KERNELS = ("encode", "pack", "decode", "add", "subtract")

# Which arguments are arrays on the device.
ON_DEVICE = {
    "accumulate_select": (0,), "average_select": (0, 1), "select": (0,), "accumulate": (0,), "first_nonfinite": (),
    "histogram": (0,), "piece_sums": (0,), "tail_counts": (0,), "block_counts": (0, 1), "search": (0,), "pick": (0,),
    "compress_rows": (0, 1), "expand_rows": (0, 1, 4),
    "values_at": (0, 1), "take": (0, 1, 2), "put": (0, 1, 2), "add_at": (0, 1, 2), "add": (0, 1), "divide": (0,),
    "select_apart": (3,), "group_norms": (3, 4), "histogram_apart": (3,), "subtract_apart": (3, 5), "values_apart": (3, 4),
    "move_apart": (3, 4, 5, 6), "add_stretch": (4,), "by_owner": (0,),
    "accumulate_select_scored": (0, 1), "select_scored": (0, 1), "histogram_scored": (0, 1), "record": (4,),
    "gather": (3, 4), "bytes_at": (0, 1), "put_bytes": (0, 1, 2), "blend": (0, 1, 2, 3), "drop_decayed": (0, 1, 2, 3, 4, 5),
    "encode_int8": (0, 1, 2), "decode_int8": (0, 1, 2), "encode_fp16": (0, 1, 2), "decode_fp16": (0, 1, 2),
    "encode_bf16": (0, 1), "decode_bf16": (0, 1), "add_int8": (0, 1, 2), "add_fp16": (0, 1, 2), "add_bf16": (0, 1),
    **{f"{verb}_{name}": (0, 1, 2) for verb in FEW_BITS_KERNELS for name in FEW_BITS},
}  # fmt: skip
MIXED: list[int | None] = [FP32, FP16, BF16, None, FP32, BF16, None, FP16]


class Device:
    """A CUDA backend that takes and gives NumPy arrays; `place` is where torch allocates the gradients."""

    def __init__(self, backend: CudaBackend, place: str = "cpu") -> None:
        self.backend = backend
        self.place = place

    def gradients(self, x: NDArray[np.float32], cuts: list[int], kinds: list[int | None]) -> tuple[Flat, Flat, list[Any]]:
        """The same gradients for the device and for the NumPy backend, and what must live as long."""
        here, alive = gradients(x, cuts, kinds)
        if self.place == "cpu":
            return here, here, alive
        there = [t.to(self.place) for t in alive]
        pointers = [0 if kind is None else t.data_ptr() for kind, t in zip(kinds, there, strict=True)]
        return (np.array(pointers, dtype=np.uint64), *here[1:]), here, [*alive, *there]

    def __call__(self, name: str, *args: Any) -> tuple[Any, dict[int, NDArray[Any]]]:
        """Return the operation's results, and its array arguments after the call."""
        arrays = {i: self.backend.from_host(args[i]) for i in ON_DEVICE[name]}
        results = getattr(self.backend, name)(*(arrays.get(i, arg) for i, arg in enumerate(args)))
        after = {i: self.backend.to_host(array) for i, array in arrays.items()}
        return self._on_host(results), after

    def _on_host(self, result: Any) -> Any:
        if isinstance(result, tuple):
            return tuple(map(self._on_host, result))
        return self.backend.to_host(result) if isinstance(result, torch.Tensor) else result

    def agrees(self, name: str, *args: Any, expected: tuple[Any, ...] | None = None) -> None:
        """Results and arrays are those of the NumPy backend (called with `expected`, if its addresses are others)."""
        results, after = self(name, *args)
        twins = [a.copy() if isinstance(a, np.ndarray) else a for a in expected or args]
        with np.errstate(all="ignore"):
            assert_same(results, getattr(numpy_backend, name)(*twins))
        for i, array in after.items():
            assert_same(array, twins[i])


def draw(n: int, *, nonfinite: bool = False, seed: int = 0) -> NDArray[np.float32]:
    return values(np.random.default_rng([n, seed]), n, nonfinite=nonfinite)


def some(n: int, share: float, seed: int = 0) -> NDArray[np.int64]:
    """Return ascending indices of a share of n elements."""
    return np.flatnonzero(np.random.default_rng([n, seed]).random(n) < share)


def stretches(n: int, tile: int) -> list[tuple[int, int]]:
    """Return parts of [0, n) that begin and end at, just before and just after tile boundaries."""
    places = sorted({min(max(at, 0), n) for at in (0, 1, 31, tile - 1, tile, tile + 1, n - 1, n)})
    return [(lo, hi) for i, lo in enumerate(places) for hi in places[i:]][::3]


def check_select(device: Device, n: int) -> None:
    for nonfinite in (False, True):
        acc = draw(n, nonfinite=nonfinite)
        for i, (lo, hi) in enumerate(stretches(n, device.backend.tile)):
            device.agrees("select", acc, lo, hi, FLOORS[i % len(FLOORS)])
            device.agrees("histogram", acc, lo, hi)
        device.agrees("select", acc, 0, n, 0.02)
    device.agrees("select", np.full(n, np.inf, dtype=np.float32), min(n, n // 2 + 33), n, HUGE)


def check_accumulate_select(device: Device, n: int) -> None:
    rng = np.random.default_rng(n)
    cuts = sorted([*rng.integers(0, n + 1, 5).tolist(), n // 2, n // 2])
    for nonfinite in (False, True):
        flat, twin, _alive = device.gradients(draw(n, nonfinite=nonfinite, seed=1), cuts, MIXED)
        device.agrees("first_nonfinite", *flat, expected=twin)
        acc, average = draw(n, nonfinite=nonfinite), np.abs(draw(n, seed=2))
        for i, (lo, hi) in enumerate([(0, 0), (0, n), (n // 3, n - n // 5), (n - n // 7, n)]):
            last = (lo, hi, FLOORS[(i + 2) % len(FLOORS)])
            device.agrees("accumulate_select", acc, *flat, *last, expected=(acc, *twin, *last))
            rate = (0.9, 1.0, 0.001)[i % 3]
            expected = (acc, average, rate, *twin, *last)
            device.agrees("average_select", acc, average, rate, *flat, *last, expected=expected)


def check_inner_tiles(device: Device, n: int) -> None:
    """Tiles inside one parameter, of every type or without a gradient; vectors begin at multiples of their size or not."""
    acc, average = draw(n), np.abs(draw(n, seed=2))
    for nonfinite in (False, True):
        for first, kind in ((8, FP32), (8, FP16), (8, BF16), (8, None), (5, FP32), (6, BF16)):
            x = draw(n, seed=1)
            if nonfinite and n > first:
                x[[2 * n // 3, -1]] = np.nan, np.inf
            flat, twin, _alive = device.gradients(x, [min(first, n)], [FP32, kind])
            device.agrees("first_nonfinite", *flat, expected=twin)
            for last in ((0, n, 0.02), (device.backend.tile, n, 0.01), (n // 3, n // 2, 0.0)):
                device.agrees("accumulate_select", acc, *flat, *last, expected=(acc, *twin, *last))
                device.agrees("average_select", acc, average, 0.9, *flat, *last, expected=(acc, average, 0.9, *twin, *last))


def check_where_nothing_is_added(device: Device, n: int) -> None:
    """A moving average reports what is not finite only where a gradient was added."""
    if n < 2:
        return
    acc, average = draw(n), np.abs(draw(n, seed=2))
    acc[n // 4] = np.inf
    flat, twin, _alive = device.gradients(draw(n, seed=1), [n // 2], [None, FP32])
    rest = (0, n, 0.02)
    device.agrees("average_select", acc, average, 0.5, *flat, *rest, expected=(acc, average, 0.5, *twin, *rest))


def check_scan(device: Device, n: int) -> None:
    """Every offset is written, also the one behind the last count; the lowest of many values that are not finite is told."""
    counts = np.random.default_rng(n).integers(0, 9000, n).astype(np.uint32)
    on_device = device.backend.from_host(counts)
    offsets, total, bad = device.backend._scan(on_device)
    assert (total, bad) == (counts.sum(), -1)
    assert_same(device.backend.to_host(offsets), np.cumsum([0, *counts.tolist()]))
    for places in ([n - 1], [n // 3, n - 1]):
        bads = np.full(n, np.iinfo(np.int64).max)
        if n:
            bads[places] = range(100, 100 - len(places), -1)
        *_, bad = device.backend._scan(on_device, device.backend.from_host(bads))
        assert bad == (bads.min() if n else -1)


def check_group(device: Device, n: int) -> None:
    """Small gradients are added together, large ones at once; of values that are not finite the lowest is told."""
    backend, tile = device.backend, device.backend.tile
    lengths = [3, n, 0, 1, 2 * tile + 5, 7, n // 3, *([2] * 40)]
    kinds: list[int | None] = [(FP32, FP16, BF16)[i % 3] for i in range(len(lengths))]
    ends = np.cumsum(lengths).tolist()
    for place in (-1, 0, ends[1] - 1, ends[4] - 1, ends[-1] - 1):
        x, expected = draw(ends[-1], seed=3), draw(ends[-1])
        if 0 <= place < ends[-1]:
            x[place], x[-1] = np.inf, np.nan
        flat, twin, _alive = device.gradients(x, ends[:-1], kinds)
        acc, sources = backend.from_host(expected), {a: t for t in _alive if (a := t.data_ptr())}
        for end, length, kind, here, there in reversed(list(zip(ends, lengths, kinds, twin[0], flat[0], strict=True))):
            part = slice(end - length, end)
            assert backend.accumulate_soon(acc[part], sources.get(int(there), acc[:0]), kind) == -1
            numpy_backend.accumulate(expected[part], int(here), kind)
        bad = np.flatnonzero(~np.isfinite(expected))
        assert backend.late_nonfinite(acc) == (bad[0] if len(bad) else -1)
        assert backend.late_nonfinite(acc) == -1
        assert_same(backend.to_host(acc), expected)


def check_accumulate(device: Device, n: int) -> None:
    """During backward a non-finite value is reported later, once, at the lowest index."""
    backend = device.backend
    for kind in (FP32, FP16, BF16):
        flat, twin, _alive = device.gradients(draw(n, seed=1), [], [kind])
        acc = draw(n)
        bad, after = device("accumulate", acc, int(flat[0][0]), kind)
        numpy_backend.accumulate(acc, int(twin[0][0]), kind)
        assert bad == -1
        assert_same(after[0], acc)
    if n == 0:
        return
    clean, _, _alive = device.gradients(np.zeros(n, dtype=np.float32), [], [FP32])
    for value in NONFINITE:
        for first, second in ((slice(n, 2 * n), slice(n)), (slice(n), slice(n, 2 * n))):
            spoiled = np.zeros(2 * n, dtype=np.float32)
            spoiled[[n - 1, n + n // 2]] = value
            whole = backend.from_host(spoiled)
            backend.accumulate(whole[first], int(clean[0][0]), FP32)
            backend.accumulate(whole[second], int(clean[0][0]), FP32)
            assert backend.late_nonfinite(whole) == n - 1
            assert backend.late_nonfinite(whole) == -1


def check_tail_counts(device: Device, n: int) -> None:
    x = np.abs(draw(n, nonfinite=True))
    for low, high, count in ((0.001, 0.1, 256), (TINY, HUGE, 33), (TINY, 1e-40, 2), (0.5, 0.50001, 1), (0.001, 0.9, 1500)):
        rungs = spread(low, high, count)
        near = np.concatenate([rungs, np.nextafter(rungs, np.float32(0)), np.nextafter(rungs, np.float32(HUGE))])
        device.agrees("tail_counts", np.concatenate([x, near[::3]]), rungs)
    device.agrees("tail_counts", x, np.array([0.0, 0.02, 0.02, np.inf], dtype=np.float32))
    device.agrees("tail_counts", x, np.empty(0, dtype=np.float32))


def check_sums(device: Device, n: int) -> None:
    """Pieces that lie apart, of all lengths up to the longest; of values whose sums depend on their order, too."""
    begins = np.arange(0, n, PIECE + 3)
    lengths = np.resize([PIECE, 1, PIECE - 1, 33, 0, 512, 31], len(begins))
    rng = np.random.default_rng(n)
    uneven = np.ldexp(rng.standard_normal(n), rng.integers(-30, 30, n)).astype(np.float32)
    for x in (draw(n), uneven):
        device.agrees("piece_sums", x, begins, np.minimum(begins + lengths, n))


def check_scores(device: Device, n: int) -> None:
    """Selection by both rules, of what a pass has added and of what is there."""
    rng = np.random.default_rng(n)
    cuts = sorted([*rng.integers(0, n + 1, 5).tolist(), n // 2, n // 2])
    scores = np.resize([0, 254, 127, 3, 254], n).astype(np.uint8)
    for nonfinite, key in ((False, PRODUCTS), (True, PRODUCTS), (False, SCORES), (True, SCORES)):
        acc, floors = draw(n, nonfinite=nonfinite), (*FLOORS, float(np.int32(127 << 23).view(np.float32)))
        for i, (lo, hi) in enumerate(stretches(n, device.backend.tile)[::2]):
            device.agrees("select_scored", acc, scores, key, lo, hi, floors[i % len(floors)])
            device.agrees("histogram_scored", acc, scores, key, lo, hi)
        flat, twin, _alive = device.gradients(draw(n, nonfinite=nonfinite, seed=1), cuts, MIXED)
        for lo, hi in [(0, 0), (0, n), (n // 3, n - n // 5)]:
            last = (lo, hi, 0.004)
            device.agrees(
                "accumulate_select_scored", acc, scores, key, *flat, *last, expected=(acc, scores, key, *twin, *last)
            )


def check_recorded(device: Device, n: int) -> None:
    """Gradients of each type, some missing, as bfloat16 and at an index; bytes at an index."""
    cuts = sorted([*np.random.default_rng(n).integers(0, n + 1, 5).tolist(), n // 2, n // 2])
    flat, twin, _alive = device.gradients(draw(n, seed=1), cuts, MIXED)
    for lo, hi in ((0, n), (n // 3, n - n // 5), (n, n)):
        out = np.zeros(hi - lo, dtype=np.uint16)
        device.agrees("record", *flat, lo, out, expected=(*twin, lo, out.copy()))
    index, values = some(n, 0.3), np.resize(np.arange(251, dtype=np.uint8), n)
    out = np.zeros(len(index), dtype=np.float32)
    device.agrees("gather", *flat, index, out, expected=(*twin, index, out.copy()))
    device.agrees("bytes_at", values, index)
    device.agrees("put_bytes", values, index, values[: len(index)] + np.uint8(1))


def check_block_counts(device: Device, n: int) -> None:
    index, magnitude, _ = numpy_backend.select(draw(n, nonfinite=True), 0, n, 0.01)
    for blocks in (1, 2, 100):
        edges = np.sort(np.append(np.random.default_rng(blocks).integers(0, n + 1, blocks - 1), [0, n]))
        for threshold in (0.0, 0.02, HUGE):
            device.agrees("block_counts", index, magnitude, threshold, edges)
        device.agrees("search", index, edges)
    device.agrees("pick", index, np.arange(0, len(index), 3))


def check_rows(device: Device, n: int) -> None:
    lo = n // 9
    index, magnitude, _ = numpy_backend.select(draw(n, nonfinite=True), lo, n, 0.001)
    for row in (64, 4096, 65_536):
        rows = -(-(n - lo) // row)
        for threshold in (0.0, 0.02, HUGE):
            device.agrees("compress_rows", index, magnitude, threshold, lo, row, rows)
            counts, columns = numpy_backend.compress_rows(index, magnitude, threshold, lo, row, rows)
            device.agrees("expand_rows", counts, columns, lo, row, np.zeros(len(columns), dtype=np.int64))
            for wrong in (len(columns) + 1, max(0, len(columns) - 1)):
                device.agrees("expand_rows", counts, columns, lo, row, np.zeros(wrong, dtype=np.int64))
            if rows:
                damaged = counts.copy()
                damaged[-1] += 1
                device.agrees("expand_rows", damaged, columns, lo, row, np.zeros(len(columns), dtype=np.int64))


def check_damaged_rows(device: Device, n: int) -> None:
    """Indices stay inside of the region, the next summary raises once, and no more columns are written than fit."""
    backend, lo = device.backend, 5
    index, magnitude, _ = numpy_backend.select(draw(n), lo, n, 0.001)
    if not len(index):
        return
    rows = -(-(n - lo) // 64)
    counts, columns = numpy_backend.compress_rows(index, magnitude, 0.0, lo, 64, rows)
    for room in (len(index), len(index) // 2):
        here = backend.empty(rows, np.uint32), backend.empty(room, np.uint16)
        backend.pack_rows(backend.from_host(index), backend.from_host(magnitude), 0.0, lo, 64, *here)
        assert_same(tuple(map(backend.to_host, here)), (counts, columns[:room]))
    more = counts.copy()
    more[-1] += 1
    for given, hi in ((counts, n), (more, n), (counts, int(index[-1]))):
        out = backend.empty(len(index), np.int64)
        backend.unpack_rows(backend.from_host(given), backend.from_host(columns), lo, hi, 64, out)
        found, beyond = backend.to_host(out), index >= hi
        assert_same(found, np.full(len(index), lo) if given is more else np.where(beyond, lo, index))
        assert _is_damaged(backend) == (given is more or beyond.any())
        assert not _is_damaged(backend)
    backend.unpack_rows(backend.from_host(more), backend.from_host(columns), lo, n, 64, backend.empty(len(index), np.int64))
    backend.forget_damage()
    assert not _is_damaged(backend)


def _is_damaged(backend: CudaBackend) -> bool:
    """Tell whether the next summary says so."""
    try:
        backend.select(backend.from_host(np.ones(3, dtype=np.float32)), 0, 3, 0.5)
    except RuntimeError as error:
        return "the message is damaged" in str(error)
    return False


def check_late_sum(device: Device, n: int) -> None:
    """A payload is spoiled exactly where some value is not finite, and the first such is known afterwards."""
    backend, values = device.backend, draw(n)
    for place in [-1, *([n - 1, n // 2] if n else [])]:
        if place >= 0:
            values[place] = np.inf
        bad = backend.first_bad(backend.from_host(values))
        payload = backend.from_host(np.arange(n + 3, dtype=np.uint8))
        backend.spoil(payload, 255, bad)
        assert int(backend.to_host(bad)[0]) == place
        assert_same(
            backend.to_host(payload), np.full(n + 3, 255, np.uint8) if place >= 0 else np.arange(n + 3, dtype=np.uint8)
        )


def check_full_row(device: Device, n: int) -> None:
    """A row that is selected whole has 65,536 elements, one more than 16 bits hold."""
    if n < 3000:
        return
    index = np.arange(70_000)
    device.agrees("compress_rows", index, np.ones(len(index), dtype=np.float32), 0.5, 0, 65_536, 2)


def check_scattered(device: Device, n: int) -> None:
    index, acc = some(n, 0.3), draw(n, nonfinite=True)
    new = draw(len(index), seed=1)
    device.agrees("values_at", acc, index)
    device.agrees("take", acc, index, np.empty(len(index), dtype=np.float32))
    device.agrees("put", acc, index, new)
    device.agrees("add_at", draw(n) / np.float32(4), index, new / np.float32(4))
    device.agrees("add", draw(n) / np.float32(4), draw(n, seed=1) / np.float32(4))
    device.agrees("divide", draw(n), 3)
    for kind in (FP32, FP16, BF16, FP64):
        x = np.random.default_rng(n).permutation(halfway(kind)) if kind in (FP16, BF16) else draw(n)
        check_publish(device, kind, np.concatenate([SPECIAL, x])[:n])


def check_publish(device: Device, kind: int, x: NDArray[np.float32]) -> None:
    backend, index = device.backend, np.arange(1, 2 * len(x), 2)
    twin, left = np.ones(2 * len(x), dtype=STORED[kind]), x.copy()
    buffer, values_left, places = (backend.from_host(a) for a in (twin, left, index))
    backend.publish_at(buffer.data_ptr(), kind, len(twin), places, values_left)
    numpy_backend.publish_at(twin.ctypes.data, kind, len(twin), index, left)
    assert_same(backend.to_host(buffer), twin)
    assert_same(backend.to_host(values_left), left)
    backend.zero_at(buffer.data_ptr(), kind, len(twin), places)
    numpy_backend.zero_at(twin.ctypes.data, kind, len(twin), index)
    assert_same(backend.to_host(buffer), twin)


def check_codecs(device: Device, n: int) -> None:
    """Encode groups of zeros, denormals, huge values, fp16 midpoints and random values."""
    middles = np.random.default_rng(n).permutation(halfway(FP16))
    pieces = [draw(256), np.zeros(256), np.full(256, 1e-40), draw(256, seed=3) * 1e-38, np.full(256, HUGE), middles, draw(n)]
    x = np.concatenate(pieces).astype(np.float32)[:n]
    groups, total = -(-n // 256), draw(n, seed=5) / np.float32(4)
    for name, dtype in (("int8", np.int8), ("fp16", np.uint16), ("bf16", np.uint16)):
        scales = [] if name == "bf16" else [np.empty(groups, dtype=np.float32)]
        codes = np.empty(n, dtype=dtype)
        device.agrees(f"encode_{name}", x, *scales, codes)
        with np.errstate(all="ignore"):
            getattr(numpy_backend, f"encode_{name}")(x.copy(), *scales, codes)
        device.agrees(f"decode_{name}", *scales, codes, np.empty(n, dtype=np.float32))
        device.agrees(f"add_{name}", *scales, codes, total)


def check_int8_edges(device: Device, n: int) -> None:
    """Encode values half-way between two codes, and groups whose scale is a denormal: rounded, it is far too small."""
    ties = np.append(np.arange(-127, 127) + 0.5, [127.0, -127.0]) * 0.25
    tiny = [np.full(256, units * TINY) * np.resize([1, -1, 0.5], 256) for units in (63, 64, 127, 190, 191, 317, 445)]
    x = np.concatenate([ties, *tiny]).astype(np.float32)
    scales, codes = np.empty(len(x) // 256, dtype=np.float32), np.empty(len(x), dtype=np.int8)
    device.agrees("encode_int8", x, scales, codes)


def check_few_bits(device: Device, n: int) -> None:
    """Encode groups of zeros, denormals, huge values, equal values, values half-way between levels, and random values."""
    levels = np.sort(decoded_levels())
    ties = np.resize(np.append((levels[1:] + levels[:-1]) / 2, 1.0), 256)
    pieces = [draw(256), np.zeros(256), np.full(256, 1e-40), draw(256, seed=3) * 1e-38, np.full(256, HUGE), draw(n)]
    for x in (np.concatenate(pieces).astype(np.float32)[:n], np.append(ties, draw(n)).astype(np.float32)[:n]):
        for name, form in FEW_BITS.items():
            scales = np.empty(-(-n // form.group), dtype=np.uint16)
            codes = np.empty(n // form.group * form.nbytes + min(n % form.group, form.nbytes), dtype=np.uint8)
            device.agrees(f"encode_{name}", x, scales, codes)
            device.agrees(f"pack_{name}", x, scales, codes)
            with np.errstate(all="ignore"):
                getattr(numpy_backend, f"encode_{name}")(x.copy(), scales, codes)
            device.agrees(f"decode_{name}", scales, codes, np.empty(n, dtype=np.float32))
            for verb in ("add", "subtract"):
                device.agrees(f"{verb}_{name}", scales, codes, draw(n, seed=5) / np.float32(4))
            check_settle(device, name, (scales, codes), n)


def decoded_levels() -> NDArray[np.float32]:
    """The levels of int4 for a scale of 1."""
    x, codes = np.empty(64, dtype=np.float32), np.resize(np.arange(16, dtype=np.uint8), 32)
    numpy_backend.decode_int4(np.array([0x3F80], dtype=np.uint16), codes, x)
    return np.unique(x)


def check_settle(device: Device, codec: str, row: tuple[NDArray[np.uint16], NDArray[np.uint8]], n: int) -> None:
    """Sum a row with itself, and encode the sum, on the device and in NumPy."""
    backend = device.backend
    here = [draw(n, seed=7) / np.float32(4), np.zeros(n, np.float32), np.zeros_like(row[0]), np.zeros_like(row[1])]
    there = [backend.from_host(array) for array in here]
    rows = [tuple(backend.from_host(array) for array in row)] * 2
    (bad,) = backend.to_host(getattr(backend, f"settle_{codec}")(rows, 3.0, *there)).tolist()
    with np.errstate(all="ignore"):
        assert bad == getattr(numpy_backend, f"settle_{codec}")([row, row], 3.0, *here)
    for device_array, array in zip(there, here, strict=True):
        assert bad >= 0 or assert_same(backend.to_host(device_array), array) is None


def check_halves(device: Device, n: int) -> None:
    """Every 16-bit pattern as a gradient."""
    patterns = np.arange(1 << 16, dtype=np.uint16)[-max(1, n) :]
    for kind in (FP16, BF16):
        source = device.backend.from_host(patterns)
        expected = torch.from_numpy(patterns.copy()).view(TYPES[kind]).float().numpy()
        _, after = device("accumulate", np.full(len(patterns), -0.0, dtype=np.float32), source.data_ptr(), kind)
        assert_same(after[0], expected)


def check_blend(device: Device, n: int) -> None:
    for a, b in ((0.3, 0.3), (1.0, 0.2), (0.0, 0.5), (0.4, 0.0)):
        index, carried = some(n, a, 1), some(n, b, 2)
        new, old = draw(len(index), seed=3), draw(len(carried), seed=4)
        for share in (0.7, 1.0):
            device.agrees("blend", index, new, carried, old, share)
        both, mixed, selected = numpy_backend.blend(index, new, carried, old, 0.7)
        mean = np.where(np.random.default_rng(n).random(len(both)) < 0.5, np.float32(0), mixed)
        mean[::3][mean[::3] == 0] = -0.0  # is zero, too
        small = np.float32(0.25)
        device.agrees("drop_decayed", draw(n) * small, both, mixed, selected, mean, draw(len(both)) * small, 0.43)


def check_weights(device: Device, n: int) -> None:
    """Weights against a reference: some far from it, some equal, some missing, some not finite."""
    rng = np.random.default_rng(n)
    cuts = sorted([*rng.integers(0, n + 1, 3).tolist(), n // 2])
    for nonfinite in (False, True):
        weights = draw(n, nonfinite=nonfinite)
        flat, twin, _alive = device.gradients(weights, cuts, [FP32, None, FP32, FP32, FP32])
        with np.errstate(all="ignore"):
            reference = weights * rng.choice(np.array([0.0, 0.5, 1.0, 2.0], dtype=np.float32), n)
        norms = np.zeros(-(-n // GROUP_OF_WEIGHTS), dtype=np.float32)
        device.agrees("group_norms", *flat, reference, norms, expected=(*twin, reference, norms.copy()))
        for i, (lo, hi) in enumerate(stretches(n, device.backend.tile)[::2]):
            device.agrees("histogram_apart", *flat, reference, lo, hi, expected=(*twin, reference, lo, hi))
            last = (lo, hi, FLOORS[i % len(FLOORS)])
            device.agrees("select_apart", *flat, reference, *last, expected=(*twin, reference, *last))
            out = np.empty(hi - lo, dtype=np.float32)
            device.agrees("subtract_apart", *flat, reference, lo, out, expected=(*twin, reference, lo, out.copy()))
        index = some(n, 0.4)
        device.agrees("values_apart", *flat, reference, index, expected=(*twin, reference, index))


def check_moved_weights(device: Device, n: int) -> None:
    """Weights and reference both move; a missing weight stays missing."""
    index, cuts, kinds = some(n, 0.4), [n // 3, n // 2], list[int | None]([FP32, None, FP32])
    moved = (draw(n, seed=4), index, draw(len(index), seed=1), draw(len(index), seed=2))
    for name, args in (("move_apart", moved), ("add_stretch", (n // 5, draw(n - n // 5, seed=3)))):
        flat, _, alive = device.gradients(draw(n), cuts, kinds)
        twin, twins = gradients(draw(n), cuts, kinds)
        copies = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
        _, after = device(name, *flat, *args)
        with np.errstate(all="ignore"):
            getattr(numpy_backend, name)(*twin, *copies)
        for i, array in after.items():
            assert_same(array, copies[i - len(flat)])
        for here, there in zip(alive[-len(kinds) :], twins, strict=True):
            assert_same(here.cpu().numpy(), there.numpy())


def check_owners(device: Device, n: int) -> None:
    """An index dealt out to owners."""
    index = some(n, 0.4)
    for size in (1, 2, 3, 8):
        for rank in {0, size // 2, size - 1}:
            device.agrees("by_owner", index, 64, size, rank)


def check_copied(device: Device, n: int) -> None:
    """A copy that nobody waits for has what was there when it began."""
    backend, values = device.backend, draw(n)
    there = backend.from_host(values)
    arrived = backend.copied(there)
    backend.fill(there, 1.0)
    assert_same(arrived(), values)


def check_neighbours(device: Device, n: int) -> None:
    """Parts and groups of a vector as an index that is written out."""
    for subset in (Part(3 * n, 3, 1), Groups(n, 16, some(-(-n // 16), 0.5))):
        for start, stop in ((0, len(subset)), (len(subset) // 3, len(subset)), (0, 0)):
            found = device.backend.neighbours(*subset.blocks(start, stop), stop - start)
            assert_same(device.backend.to_host(found), subset.index(start, stop))


CHECKS: dict[str, Callable[[Device, int], None]] = {
    name.removeprefix("check_"): f
    for name, f in list(globals().items())
    if name.startswith("check_") and name not in ("check_publish", "check_settle")
}
