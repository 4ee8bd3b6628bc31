"""Planted bugs: each change to a kernel must make a check fail in some order of threads."""

from __future__ import annotations

import faulthandler
import os
import signal
from dataclasses import dataclass

import pytest
from checks import CHECKS, Device
from emulator import ORDERS, DamageError, Emulator, available, build

from mpisparse.backends.cuda import source
from mpisparse.backends.cuda.backend import CudaBackend

pytestmark = pytest.mark.skipif(not available(), reason="no C++ compiler to build the emulator with")

SIZES = (1025, 33, 10 * 2048 + 77)
TILES = {"block": 64, "scan": 64}
PATIENCE = 60  # seconds


@dataclass(frozen=True)
class Bug:
    """Replaces the `nth` occurrence of `old` in a file by `new`; `check` must notice."""

    name: str
    file: str
    old: str
    new: str
    check: str
    nth: int = 0


BUGS = [
    Bug("no barrier before the warps' sums are read", "common", "__syncthreads();\n    Number", "\n    Number", "select"),
    Bug("no barrier before the sums are used again", "common", "__syncthreads();\n    *total", "\n    *total", "rows"),
    Bug("a scan that takes in the thread itself", "common", "before + sum - value", "before + sum", "select"),
    Bug("a scan that forgets the last step", "common", "step < 32; step *= 2", "step < 16; step *= 2", "select"),
    Bug("a scan that adds from too far", "common", "if (lane >= step)", "if (lane > step)", "select"),
    Bug("warps in the wrong order", "common", "if (w == warp) before = all;\n        all += warps[w];",
        "all += warps[w];\n        if (w == warp) before = all;", "blend"),
    Bug("a tile that is one element short", "common", "i < n && test(i)", "i < n - 1 && test(i)", "rows"),
    Bug("rounds of the scan that do not add up", "common", "done += total;", "done = total;", "rows"),
    Bug("the scan's last count is lost", "common", "first + j < n ? counts", "first + j < n - 1 ? counts", "select"),
    Bug("the lowest of a warp only", "common", "warps[w] < value) value = warps[w]", "false) value = 0", "select"),
    Bug("a search that stops early", "common", "data[middle] < x", "data[middle] <= x", "block_counts"),
    Bug("marks of the neighbouring word", "common", "+ 32 * threadIdx.x + __ffs", "+ 32 * threadIdx.x + 1 + __ffs", "rows"),
    Bug("a block that ends one element early", "pass", "i >= lo && i < hi;\n            if (given",
        "i >= lo && i < hi - 1;\n            if (given", "select"),
    Bug("what equals the floor is left out", "pass", "magnitude >= floor", "magnitude > floor", "select"),
    Bug("infinity is taken for a number", "pass", ">= INFINITE && i < bad", "> INFINITE && i < bad", "accumulate_select"),
    Bug("the last value that is not finite", "pass", ">= INFINITE && i < bad", ">= INFINITE", "select"),
    Bug("a gradient read from the vector's begin", "pass", "place.kind, i - place.begin) : 0", "place.kind, i) : 0",
        "accumulate_select"),
    Bug("a parameter too late", "pass", "if (i >= place->end &&", "if (i > place->end &&", "accumulate_select"),
    Bug("the average's product first", "pass", "__fmul_rn(rate, absolute(g[item]))", "__fmul_rn(rate, g[item])",
        "accumulate_select"),
    Bug("a parameter without gradient keeps its average", "pass", ": kept;", ": mean[item];", "accumulate_select"),
    Bug("backward forgets who was first", "pass", "&& *noted == 0", "", "accumulate"),
    Bug("bins are not cleared", "tally", "own[b] = 0;", ";", "select"),
    Bug("no barrier after bins are cleared", "tally", "own[b] = 0;\n    __syncthreads();", "own[b] = 0;", "select"),
    Bug("no barrier before bins are added", "tally", "1u);\n    }\n    __syncthreads();", "1u);\n    }", "select"),
    Bug("a histogram that reads one too far", "tally", "if (i < hi) atomicAdd", "if (i <= hi) atomicAdd", "select"),
    Bug("a rung is reached by what lies above only", "tally", "ladder[middle] <= x", "ladder[middle] < x", "tail_counts"),
    Bug("NaN reaches all rungs", "tally", "x > INFINITE ? 0 : count", "count", "tail_counts"),
    Bug("a warp that counts lanes beyond its part", "tally", "i < last && magnitude", "i < n && magnitude", "block_counts"),
    Bug("a column of the neighbouring row", "rows", "& (row - 1)", "& row", "rows"),
    Bug("an empty row shifts the others", "rows", "upper_bound(offsets, 0, rows, i) - 1",
        "lower_bound(offsets, 0, rows, i)", "rows"),
    Bug("taken but not cleared", "scatter", "acc[index[i]] = 0.0f;", "", "scattered"),
    Bug("one thread too many", "scatter", "if (i >= n) return;\n    out", "if (i > n) return;\n    out", "scattered"),
    Bug("rounding error lost", "scatter", "__fsub_rn(x, kept)", "0.0f", "scattered"),
    Bug("ties away from even", "common", "0x0fffu + ((magnitude >> 13) & 1u)", "0x1000u", "scattered"),
    Bug("an overflow to infinity", "common", "== 0x7f80u ?", "== 0x7f81u ?", "scattered"),
    Bug("no barrier before the group's largest", "codec", "__syncthreads();\n    most", "\n    most", "codecs"),
    Bug("a group's last warp is forgotten", "codec", "w < GROUP / 32; ++w", "w < GROUP / 32 - 1; ++w", "codecs"),
    Bug("truncation instead of rounding", "codec", "rintf(", "truncf(", "codecs"),
    Bug("a product fused with a difference", "codec", "__fsub_rn(value, __fmul_rn((float)steps, scale))",
        "fmaf(-(float)steps, scale, value)", "codecs"),
    Bug("a scale by the neighbouring group", "codec", "(float)q[i], scales[i / GROUP]",
        "(float)q[i], scales[(i + 1) / GROUP]", "codecs"),
    Bug("an exponent too high", "codec", ">> 23) - 14", ">> 23) - 13", "codecs"),
    Bug("no barrier before a group's values are read", "few_bits", "= value;\n    __syncthreads();", "= value;", "few_bits"),
    Bug("no barrier before a group's lanes are read", "few_bits", "= sum;\n    }\n    __syncthreads();", "= sum;\n    }",
        "few_bits"),
    Bug("no barrier before codes are packed", "few_bits", "= half;\n    __syncthreads();", "= half;", "few_bits"),
    Bug("the mean of a group that is not full", "few_bits", "rest < SIZE ? (float)rest : (float)SIZE", "(float)SIZE",
        "few_bits"),
    Bug("a tie goes down", "few_bits", "turned >= __fmul_rn", "turned > __fmul_rn", "few_bits"),
    Bug("codes of the neighbouring group", "few_bits", "codes[i / SIZE * NBYTES", "codes[(i + 1) / SIZE * NBYTES",
        "few_bits"),
    Bug("a sum that is written over", "few_bits", "__fadd_rn(total[i], decode_few<INT2", "(decode_few<INT2", "few_bits"),
    Bug("what is in both indices comes twice", "blend", "at == n || index[at] != carried[j]", "true", "blend"),
    Bug("momentum without its share", "blend", "__fmul_rn(rest, before)", "before", "blend"),
    Bug("what is selected comes to rest", "blend", "!selected[i] && mean", "mean", "blend"),
]  # fmt: skip


def planted(bug: Bug) -> str:
    """Return the source with the bug, only its file and the common ones, because fewer kernels compile faster."""
    others = {"pass", "tally", "rows", "blend"} if bug.file == "common" else {bug.file}
    texts = {
        name: (source.directory() / f"{name}.cu").read_text() for name in ("common", *sorted(others | NEEDED[bug.check]))
    }
    assert bug.old in texts[bug.file], f"{bug.name}: the kernels have changed, plant this bug anew"
    texts[bug.file] = texts[bug.file].replace(bug.old, bug.new)
    return "\n".join(texts.values())


NEEDED = {
    "select": {"pass", "tally"}, "accumulate_select": {"pass"}, "accumulate": {"pass", "scatter"}, "rows": {"rows", "tally"},
    "block_counts": {"tally"}, "tail_counts": {"tally"}, "scattered": {"scatter"}, "codecs": {"codec"}, "blend": {"blend"},
    "few_bits": {"few_bits", "pass", "scatter"},
}  # fmt: skip


def noticed(bug: Bug) -> bool:
    """Tell whether the check fails or memory is damaged in some thread order and for some number of elements.

    Runs in a separate process, since a bug may make a kernel write anywhere or never end.
    """
    text = planted(bug)
    build(text, **TILES)
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        signal.alarm(PATIENCE)
        os._exit(0 if sound(text, bug.check) else 1)
    _, status = os.waitpid(child, 0)
    return status != 0


def sound(text: str, check: str) -> bool:
    """Tell whether the check passes in all orders and for all numbers of elements."""
    for n in SIZES:
        for order in ORDERS:
            emulator = Emulator(**TILES, order=order, text=text)
            try:
                CHECKS[check](Device(CudaBackend(emulator)), n)
            except (AssertionError, DamageError, MemoryError, ValueError):
                return False
            if emulator.damaged:
                return False
    return True


SOME = [pytest.param(bug, marks=[pytest.mark.slow] if i % 4 else [], id=bug.name) for i, bug in enumerate(BUGS)]


@pytest.mark.parametrize("bug", SOME)
def test_is_noticed(bug: Bug) -> None:
    assert noticed(bug)


def test_without_bugs_all_is_well() -> None:
    """The same checks pass without bugs, so the failures above are due to the bugs."""
    for check in sorted({bug.check for bug in BUGS}):
        assert sound(source.joined(), check), check
