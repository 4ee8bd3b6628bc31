"""bench kernels: each kernel against a plain pass over the same memory, interleaved, on all ranks at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpisparse.arrays import Floats
from mpisparse.backends.device import load_backend
from mpisparse.runtime.table import show
from mpisparse.wire.codecs import CODECS, Codec, codec_names
from mpisparse.wire.codecs.protocol import add_decoded

Work = dict[str, tuple[Callable[[], Any], int, str | None]]
COLUMNS = {"kernel": "", "ms": ".3f", "GB_per_s": ".1f", "limit": "", "of_limit": ".2f"}
WARM_UP = 2


def run(elements: int, density: float, rounds: int, *, as_json: bool) -> int:
    """Measure and print on rank 0; collective. `of_limit` is the kernel's bandwidth relative to the plain pass's."""
    comm = MPI.COMM_WORLD
    backend = load_backend()
    work = _work(backend, elements, density, comm.rank)
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(WARM_UP + rounds):
        for name, (kernel, _, _) in work.items():
            comm.Barrier()
            start = time.perf_counter()
            kernel()
            if turn >= WARM_UP:
                times[name].append(time.perf_counter() - start)
    if comm.rank == 0:
        records = [_record(name, nbytes, limit, times) for name, (_, nbytes, limit) in work.items()]
        for record in records:
            record.update(elements=elements, ranks=comm.size, backend=backend.name)
        if not as_json:
            isa = f" ({backend.isa()})" if backend.name == "native" else ""
            print(f"{elements:,} float32, {comm.size} ranks at once, {backend.name}{isa}; medians of {rounds} rounds")
        show(records, COLUMNS, as_json=as_json)
    return 0


def _record(name: str, nbytes: int, limit: str | None, times: dict[str, list[float]]) -> dict[str, Any]:
    seconds = statistics.median(times[name])
    share = statistics.median(b / a for a, b in zip(times[name], times[limit], strict=True)) if limit else None
    return {"kernel": name, "ms": 1e3 * seconds, "GB_per_s": nbytes / seconds / 1e9, "limit": limit or "", "of_limit": share}


def _work(backend: Any, n: int, density: float, seed: int) -> Work:
    """Return kernels by name, with the bytes that each moves and the plain pass to compare it with."""
    random = np.random.default_rng(seed)
    acc = random.standard_t(3, n).astype(np.float32)
    grad = np.zeros(n, dtype=np.float32)
    half, k = max(1, n // 2), max(1, int(density * n))
    sample = np.abs(acc[:: max(1, n // 1_000_000)])
    floor = float(np.quantile(sample, max(0.0, 1.0 - 1.6 * density)))
    gradients = (np.array([grad.ctypes.data], np.uint64), np.array([n], np.int64), np.zeros(1, np.uint8))
    index = np.sort(random.choice(n, k, replace=False)).astype(np.int64)
    found = backend.select(acc, 0, half, floor)
    rungs = np.geomspace(floor, 1.5 * floor, 256).astype(np.float32) if floor > 0 else np.zeros(1, np.float32)
    values = np.empty(k, dtype=np.float32)
    work: Work = {
        "plain in-place add": (lambda: np.add(acc, grad, out=acc), 12 * n, None),
        "accumulate + select": (
            lambda: backend.accumulate_select(acc, *gradients, 0, half, floor),
            12 * n,
            "plain in-place add",
        ),
        "accumulate": (lambda: backend.accumulate(acc, grad.ctypes.data, 0), 12 * n, "plain in-place add"),
        "plain read of half": (lambda: np.max(acc[:half]), 4 * half, None),
        "select in half": (lambda: backend.select(acc, 0, half, floor), 4 * half, "plain read of half"),
        "histogram of half": (lambda: backend.histogram(acc, 0, half), 4 * half, "plain read of half"),
        "tail counts": (lambda: backend.tail_counts(found[1], rungs), 4 * len(found[1]), None),
        "take at k": (lambda: backend.take(acc, index, values), 16 * k, None),
        "put at k": (lambda: backend.put(acc, index, values), 16 * k, None),
    }
    return {**work, **_codec_work(backend, acc.copy())}


def _codec_work(backend: Any, values: Floats) -> Work:
    """Return encoding, adding and decoding of all elements by each codec; adding restores what encoding took away."""
    n, decoded = len(values), np.empty(len(values), dtype=np.float32)
    one = np.float32(1)
    work: Work = {
        "plain read and write": (lambda: np.multiply(values, one, out=values), 8 * n, None),
        "plain write": (lambda: decoded.fill(0.0), 4 * n, None),
    }
    for codec in (CODECS[name] for name in codec_names(blended=False)):
        message = _Message(codec, backend, n)
        passes: dict[str, tuple[Callable[[], Any], int, str]] = {
            "encode": (partial(message.encode, values), 8 * n, "plain read and write"),
            "add": (partial(message.add, values), 8 * n, "plain read and write"),
            "decode": (partial(message.decode, decoded), 4 * n, "plain write"),
        }
        for name, (kernel, nbytes, limit) in passes.items():
            work[f"{name} {codec.name}"] = (kernel, nbytes + len(message.room), limit)
    return work


class _Message:
    """The bytes that a codec makes of n values; of one with payloads of variable size, those that it wrote last."""

    def __init__(self, codec: Codec, backend: Any, n: int) -> None:
        self.codec = codec
        self.backend = backend
        self.payload = self.room = np.empty(codec.nbytes(n), dtype=np.uint8)

    def encode(self, values: Floats) -> None:
        self.payload = self.room[: self.codec.encode(self.backend, values, self.room)]

    def add(self, values: Floats) -> None:
        add_decoded(self.codec, self.backend, self.payload, values)

    def decode(self, values: Floats) -> None:
        self.codec.decode(self.backend, self.payload, values)
