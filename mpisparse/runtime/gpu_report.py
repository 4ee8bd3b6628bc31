"""mpisparse doctor --gpu: does this machine's GPU compute the bits of the host, and how fast; one file with all of it.

Bandwidths are compared with the bytes that docs/results/gpu.md counts for each kernel, and with a plain addition.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpisparse.backends.device import load_backend, local_device
from mpisparse.backends.keys import PRODUCTS
from mpisparse.backends.kinds import BF16, FP32
from mpisparse.backends.protocol import PIECE
from mpisparse.runtime.gpu_checks import address, differences, draw, some
from mpisparse.version import __version__

ELEMENTS, SHARE, ROUNDS = 1 << 26, 1000, 20  # of one in so many elements are selected
SIZES = (1, 33, 8191, 8193, 1_000_003)
FAILED = "failed"
ROWS = ("mpisparse", "python", "host", "torch", "cupy", "nvrtc", "device", "capability", "memory", "driver")


def run(file: Path) -> int:
    """Check and measure the first GPU, and write a file; return 1 if a bit differs. Needs no MPI."""
    device = local_device(0)
    examination = examined(load_backend(device=device), sizes=SIZES, elements=ELEMENTS, rounds=ROUNDS)
    return write({**facts(device), **examination, "tests": tests()}, file)


def write(report: dict[str, Any], file: Path) -> int:
    """Write a report and print what matters of it; return 1 if a bit differs."""
    file.write_text(json.dumps(report, indent=1) + "\n")
    for name, said in report["checks"].items():
        print(f"{name:<28} {said}")
    for record in report["kernels"]:
        print(f"{record['kernel']:<28} {record['ms']:>9.3f} ms {record['GB_per_s']:>9.1f} GB/s")
    print(f"{'launch, wait':<28} {report['launch_us']:>9.1f} us {report['wait_us']:>9.1f} us")
    print(f"{'tests':<28} {report['tests'][-1]}")
    wrong = [name for name, said in report["checks"].items() if said != "same"]
    verdict = f"the device does not compute the host's bits: {', '.join(wrong)}" if wrong else "the same bits as the host"
    print(f"doctor --gpu: {verdict}; all of it is in {file}")
    return 1 if wrong or report["tests"][0] == FAILED else 0


def tests() -> list[str]:
    """What the tests that need a GPU say, if this is a checkout with pytest: how they ended, and their output."""
    where = Path(__file__).parents[2] / "tests" / "cuda"
    if not where.is_dir() or importlib.util.find_spec("pytest") is None:
        return ["not run", "this is no checkout with its tests, or pytest is not installed"]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", str(where)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=where.parents[1])
    return ["passed" if ended.returncode == 0 else FAILED, *(ended.stdout + ended.stderr).strip().splitlines()]


def facts(device: torch.device) -> dict[str, Any]:
    """Which device, driver and libraries these are."""
    from mpisparse.backends.cuda.binding import versions

    compiler, driver = versions()
    seen = torch.cuda.get_device_properties(device)
    values: Sequence[Any] = (
        __version__, platform.python_version(), platform.node(), torch.__version__, importlib.metadata.version(_cupy()),
        str(compiler), seen.name, f"{seen.major}.{seen.minor}", seen.total_memory, driver,
    )  # fmt: skip
    return dict(zip(ROWS, values, strict=True))


def _cupy() -> str:
    names = {dist.metadata["Name"] for dist in importlib.metadata.distributions()}
    return next(name for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy") if name in names)


def examined(backend: Any, *, sizes: tuple[int, ...], elements: int, rounds: int) -> dict[str, Any]:
    """Check each operation, then measure kernels of so many elements."""
    checks = differences(backend, load_backend("numpy"), sizes)
    small = backend.from_host(np.zeros(1, dtype=np.float32))
    return {
        "checks": checks,
        "elements": elements,
        "kernels": [measured(backend, *work, rounds) for work in works(backend, elements)],
        "launch_us": 1e6 * timed(backend, lambda: [backend.divide(small, 1.0) for _ in range(100)], rounds) / 100,
        "wait_us": 1e6 * timed(backend, lambda: backend.to_host(small), rounds),
    }


def works(backend: Any, n: int) -> list[tuple[str, float, Callable[[], Any]]]:
    """Kernels with the bytes that each moves, by the formulas of the roofline."""
    acc, average = backend.from_host(draw(n)), backend.from_host(np.zeros(n, dtype=np.float32))
    grad, half = backend.from_host(np.zeros(n, np.float32)), backend.from_host(np.zeros(n, np.uint16))
    table, halves = (
        (np.array([address(g)], np.uint64), np.array([n]), np.array([kind], np.uint8))
        for g, kind in ((grad, FP32), (half, BF16))
    )
    index = backend.from_host(some(n)[:: max(1, SHARE // 3)])
    k = len(index)
    values = backend.from_host(np.zeros(k, dtype=np.float32))
    scales, codes = backend.empty(-(-k // 256), np.float32), backend.empty(k, np.int8)
    scores, begins = backend.from_host(np.zeros(n, np.uint8)), np.arange(0, n, PIECE)
    inf = float("inf")
    return [
        ("plain addition", 12 * n, lambda: backend.add(acc, grad)),
        ("accumulate_select", 12.25 * n, lambda: backend.accumulate_select(acc, *table, 0, n, inf)),
        ("accumulate_select, bf16", 10.25 * n, lambda: backend.accumulate_select(acc, *halves, 0, n, inf)),
        ("average_select", 20.25 * n, lambda: backend.average_select(acc, average, 0.9, *table, 0, n, inf)),
        ("accumulate", 12 * n, lambda: backend.accumulate(acc, address(grad), FP32)),
        ("select", 4.25 * n, lambda: backend.select(acc, 0, n, inf)),
        ("select_apart", 8.25 * n, lambda: backend.select_apart(*table, acc, 0, n, inf)),
        ("select_scored", 5.25 * n, lambda: backend.select_scored(acc, scores, PRODUCTS, 0, n, inf)),
        ("piece_sums", 4 * n, lambda: backend.piece_sums(acc, begins, np.minimum(begins + PIECE, n))),
        ("histogram", 4 * n, lambda: backend.histogram(acc, 0, n)),
        ("take", 76 * k, lambda: backend.take(acc, index, values)),
        ("put", 76 * k, lambda: backend.put(acc, index, values)),
        ("add_at", 76 * k, lambda: backend.add_at(acc, index, values)),
        ("zero_at", 72 * k, lambda: backend.zero_at(address(acc), FP32, n, index)),
        ("encode_int8", 9.02 * k, lambda: backend.encode_int8(values, scales, codes)),
    ]


def measured(backend: Any, kernel: str, nbytes: float, call: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """The median time of a kernel, and the bandwidth that follows from its bytes."""
    seconds = timed(backend, call, rounds)
    return {"kernel": kernel, "bytes": nbytes, "ms": 1e3 * seconds, "GB_per_s": nbytes / seconds / 1e9}


def timed(backend: Any, call: Callable[[], Any], rounds: int) -> float:
    """The median time of a call, until the device has done it."""
    word, times = backend.from_host(np.zeros(1, dtype=np.uint8)), []
    for _ in range(rounds + 2):
        backend.to_host(word)
        start = time.perf_counter()
        call()
        backend.to_host(word)  # waits
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])
