"""Operations of a device against those of the host, to the last bit: for a machine that has no tests.

A check gets a backend and a number of elements, and returns what came of them. It is made on the device and on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mpisparse.arrays import Floats, Ints
from mpisparse.backends.keys import PRODUCTS, SCORES
from mpisparse.backends.kinds import BF16, FP16, FP32, round_to
from mpisparse.backends.protocol import FEW_BITS, GROUP, GROUP_OF_WEIGHTS, PIECE

Check = Callable[[Any, int], Iterator[Any]]
TINY = 1e-40  # not a normal number: a device that flushes these gives other bits


def draw(n: int, seed: int = 0) -> Floats:
    """Heavy-tailed values with ties, zeros of both signs, and numbers too small to be normal."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_t(3, n) * 0.01).astype(np.float32)
    x[::7], x[3::11], x[5::13] = np.float32(0.02), np.float32(TINY), np.float32(-0.0)
    return x


def some(n: int, seed: int = 0) -> Ints:
    """Ascending indices of a third of n elements."""
    return np.flatnonzero(np.random.default_rng(seed).random(n) < 1 / 3).astype(np.int64)


def address(array: Any) -> int:
    """Where an array begins, on the host or on a device."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr())


def gradients(backend: Any, n: int, kind: int) -> tuple[Any, ...]:
    """A gradient of n elements in two parts, as passes take it, and what must live as long."""
    part = backend.from_host(round_to(draw(n, 1), kind))
    half = n // 2
    begins = [address(part), address(part) + half * part.itemsize]
    table = np.array(begins, np.uint64), np.array([half, n], np.int64), np.array([kind, kind], np.uint8)
    return *table, part


def passes(backend: Any, n: int) -> Iterator[Any]:
    """Over the whole vector, with gradients of each type."""
    for kind in (FP32, FP16, BF16):
        *table, _alive = gradients(backend, n, kind)
        acc, average = backend.from_host(draw(n)), backend.from_host(np.abs(draw(n, 2)))
        yield backend.first_nonfinite(*table)
        yield backend.accumulate_select(acc, *table, n // 3, n, 0.02)
        yield backend.average_select(acc, average, 0.9, *table, 0, n - n // 4, 0.01)
        yield acc, average
        bad = backend.accumulate(acc, int(table[0][0]), kind) if kind == FP32 and n else -1
        yield max(bad, backend.late_nonfinite(acc)), acc
        yield backend.select(acc, n // 4, n, 0.02), backend.histogram(acc, 0, n)


def counts(backend: Any, n: int) -> Iterator[Any]:
    """Of candidates, and their places."""
    index, magnitude, _ = backend.select(backend.from_host(draw(n)), 0, n, 0.01)
    rungs = np.geomspace(0.005, 0.1, 256).astype(np.float32)
    edges = np.linspace(0, n, 9).astype(np.int64)
    yield backend.tail_counts(magnitude, rungs), backend.block_counts(index, magnitude, 0.02, edges)
    begins = np.arange(0, n, PIECE)
    yield backend.piece_sums(backend.from_host(draw(n)), begins, np.minimum(begins + PIECE, n))
    yield backend.search(index, edges), backend.pick(index, np.arange(0, len(index), 3))
    rows, columns = backend.compress_rows(index, magnitude, 0.0, 0, 65_536, -(-n // 65_536))
    union = backend.from_host(np.zeros(len(columns), dtype=np.int64))
    yield backend.expand_rows(rows, columns, 0, 65_536, union), union


def importance(backend: Any, n: int) -> Iterator[Any]:
    """Selection by scores, and the gradients that nets learn from."""
    scores, acc = backend.from_host(np.resize(np.arange(255, dtype=np.uint8), n)), backend.from_host(draw(n))
    for kind in (FP32, FP16, BF16):
        *table, _alive = gradients(backend, n, kind)
        yield backend.accumulate_select_scored(acc, scores, PRODUCTS, *table, n // 4, n, 0.004), acc
        rows, values = (backend.from_host(np.zeros(n, dtype=dtype)) for dtype in (np.uint16, np.float32))
        backend.record(*table, 0, rows)
        backend.gather(*table, backend.from_host(np.arange(n)), values)
        yield rows, values
    yield backend.select_scored(acc, scores, SCORES, n // 4, n, 0.02), backend.histogram_scored(acc, scores, SCORES, 0, n)
    index = backend.from_host(some(n))
    backend.put_bytes(scores, index, backend.from_host(np.full(len(index), 7, dtype=np.uint8)))
    yield scores, backend.bytes_at(scores, index)


def scattered(backend: Any, n: int) -> Iterator[Any]:
    """At some indices."""
    index, acc = backend.from_host(some(n)), backend.from_host(draw(n))
    new = backend.from_host(draw(len(index), 1))
    yield backend.values_at(acc, index)
    backend.put(acc, index, new)
    backend.add_at(acc, index, new)
    backend.divide(acc, 3)
    backend.add(acc, backend.from_host(draw(n, 2)))
    yield acc
    taken, buffer = backend.copy(new), backend.from_host(np.ones(n, dtype=np.float32))
    backend.take(acc, index, taken)
    backend.publish_at(address(buffer), FP32, n, index, taken)
    yield acc, taken, buffer
    backend.zero_at(address(buffer), FP32, n, index)
    yield buffer


def momentum(backend: Any, n: int) -> Iterator[Any]:
    """Values blended with what was sent before."""
    index, carried = some(n, 1), some(n, 2)
    sent = (backend.from_host(each) for each in (index, draw(len(index)), carried, draw(len(carried), 3)))
    both, mixed, selected = backend.blend(*sent, 0.7)
    mean = backend.from_host(np.where(np.arange(len(both)) % 2, np.float32(0), np.float32(1)).astype(np.float32))
    acc, left = backend.from_host(draw(n, 4)), backend.from_host(draw(len(both), 5))
    yield both, mixed, selected
    yield backend.drop_decayed(acc, both, mixed, selected, mean, left, 0.43), acc


def codecs(backend: Any, n: int) -> Iterator[Any]:
    """Values encoded, decoded and added."""
    groups = -(-n // GROUP)
    forms: dict[str, tuple[list[tuple[int, Any]], int]] = {
        "int8": ([(groups, np.float32), (n, np.int8)], n),
        "fp16": ([(groups, np.float32), (n, np.uint16)], n),
        "bf16": ([(n, np.uint16)], n),
    }
    for name, form in FEW_BITS.items():
        codes = n // form.group * form.nbytes + min(n % form.group, form.nbytes)
        forms[name] = [(-(-n // form.group), np.uint16), (codes, np.uint8)], n
    for name, (shapes, _) in forms.items():
        values, total = backend.from_host(draw(n)), backend.from_host(draw(n, 1))
        decoded = backend.from_host(np.zeros(n, dtype=np.float32))
        payload = [backend.from_host(np.zeros(count, dtype=dtype)) for count, dtype in shapes]
        getattr(backend, f"encode_{name}")(values, *payload)
        getattr(backend, f"decode_{name}")(*payload, decoded)
        getattr(backend, f"add_{name}")(*payload, total)
        yield (values, *payload, decoded, total)


def weights(backend: Any, n: int) -> Iterator[Any]:
    """Against shared ones, and an index dealt out to owners."""
    *table, own = gradients(backend, n, FP32)
    shared, index = backend.from_host(draw(n, 2)), backend.from_host(some(n))
    norms = backend.from_host(np.zeros(-(-n // GROUP_OF_WEIGHTS), dtype=np.float32))
    yield backend.select_apart(*table, shared, n // 4, n, 0.02), backend.histogram_apart(*table, shared, 0, n)
    yield backend.group_norms(*table, shared, norms), norms
    values, stretch = backend.from_host(draw(len(index), 3)), backend.from_host(draw(n - n // 3, 4))
    backend.move_apart(*table, shared, index, values, backend.values_apart(*table, shared, index))
    backend.add_stretch(*table, n // 3, stretch)
    yield own, shared
    backend.subtract_apart(*table, shared, n // 3, stretch)
    yield stretch, backend.by_owner(index, 64, 3, 1)


CHECKS: dict[str, Check] = {
    check.__name__: check for check in (passes, counts, importance, scattered, momentum, codecs, weights)
}


def differences(backend: Any, host: Any, sizes: tuple[int, ...]) -> dict[str, str]:
    """What each check says of the device: "same", or where its bits differ."""
    said = {}
    for name, check in CHECKS.items():
        try:
            said[name] = next((found for n in sizes if (found := _first(check, backend, host, n))), "same")
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def _first(check: Check, backend: Any, host: Any, n: int) -> str:
    with np.errstate(all="ignore"):
        for step, (got, expected) in enumerate(zip(check(backend, n), check(host, n), strict=True)):
            pairs = zip(_flat(backend, got), _flat(host, expected), strict=True)
            if any(a.dtype != b.dtype or a.tobytes() != b.tobytes() for a, b in pairs):
                return f"other bits in part {step} of {n} elements"
    return ""


def _flat(backend: Any, results: Any) -> Iterator[Any]:
    if isinstance(results, tuple):
        for each in results:
            yield from _flat(backend, each)
    else:
        yield np.array(backend.to_host(results) if hasattr(results, "shape") else results)
