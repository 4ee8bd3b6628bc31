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
from mpisparse.backends.kinds import BF16, FP16, FP32, FP64, STORED
from mpisparse.backends.protocol import FEW_BITS
from mpisparse.select.threshold import HUGE, TINY, spread

FEW_BITS_KERNELS = ("encode", "pack", "decode", "add", "subtract")

# Which arguments are arrays on the device.
ON_DEVICE = {
    "accumulate_select": (0,), "average_select": (0, 1), "select": (0,), "accumulate": (0,), "first_nonfinite": (),
    "histogram": (0,), "tail_counts": (0,), "block_counts": (0, 1), "search": (0,), "pick": (0,),
    "compress_rows": (0, 1), "expand_rows": (0, 1, 4),
    "values_at": (0, 1), "take": (0, 1, 2), "put": (0, 1, 2), "add_at": (0, 1, 2), "add": (0, 1), "divide": (0,),
    "blend": (0, 1, 2, 3), "drop_decayed": (0, 1, 2, 3, 4, 5),
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


def check_accumulate(device: Device, n: int) -> None:
    """During backward a non-finite value is reported later, once, at the index where the first pass found it."""
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
        whole = backend.from_host(np.zeros(2 * n, dtype=np.float32))
        places = (n + n // 2, n - 1)
        for at in places:
            bad_one = backend.from_host(np.full(1, value, dtype=np.float32))
            backend.put(whole, backend.from_host(np.array([at])), bad_one)
        backend.accumulate(whole[n:], int(clean[0][0]), FP32)
        backend.accumulate(whole[:n], int(clean[0][0]), FP32)
        assert backend.late_nonfinite(whole) == places[0]
        assert backend.late_nonfinite(whole) == -1


def check_tail_counts(device: Device, n: int) -> None:
    x = np.abs(draw(n, nonfinite=True))
    for low, high, count in ((0.001, 0.1, 256), (TINY, HUGE, 33), (TINY, 1e-40, 2), (0.5, 0.50001, 1), (0.001, 0.9, 1500)):
        rungs = spread(low, high, count)
        near = np.concatenate([rungs, np.nextafter(rungs, np.float32(0)), np.nextafter(rungs, np.float32(HUGE))])
        device.agrees("tail_counts", np.concatenate([x, near[::3]]), rungs)
    device.agrees("tail_counts", x, np.array([0.0, 0.02, 0.02, np.inf], dtype=np.float32))
    device.agrees("tail_counts", x, np.empty(0, dtype=np.float32))


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


def check_few_bits(device: Device, n: int) -> None:
    """Encode groups of zeros, denormals, huge values, equal values and random values."""
    pieces = [draw(256), np.zeros(256), np.full(256, 1e-40), draw(256, seed=3) * 1e-38, np.full(256, HUGE), draw(n)]
    for x in (np.concatenate(pieces).astype(np.float32)[:n], draw(n, seed=6)):
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


def check_settle(device: Device, codec: str, row: tuple[NDArray[np.uint16], NDArray[np.uint8]], n: int) -> None:
    """Sum a row with itself, and encode the sum, on the device and in NumPy."""
    backend = device.backend
    here = [draw(n, seed=7) / np.float32(4), np.zeros(n, np.float32), np.zeros_like(row[0]), np.zeros_like(row[1])]
    there = [backend.from_host(array) for array in here]
    rows = [tuple(backend.from_host(array) for array in row)] * 2
    bad = getattr(backend, f"settle_{codec}")(rows, 3.0, *there)
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
        small = np.float32(0.25)
        device.agrees("drop_decayed", draw(n) * small, both, mixed, selected, mean, draw(len(both)) * small, 0.43)


CHECKS: dict[str, Callable[[Device, int], None]] = {
    name.removeprefix("check_"): f
    for name, f in list(globals().items())
    if name.startswith("check_") and name not in ("check_publish", "check_settle")
}
