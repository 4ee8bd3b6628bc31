"""Planted bugs: each change to a kernel must make a check fail in some order of threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from checks import CHECKS, Device
from emulator import ORDERS, RUBBISH, Emulator, available, build
from far import check_far
from numpy.typing import NDArray
from planted import survives
from samples import Flat

from mpisparse.backends.cuda import source
from mpisparse.backends.cuda.backend import CudaBackend

pytestmark = pytest.mark.skipif(not available(), reason="no C++ compiler to build the emulator with")

SIZES = (1025, 33, 10 * 2048 + 77)
TILES = {"block": 64, "scan": 64}
RACES = "races_"  # before the name of a check: with the race checker
ALL = {**CHECKS, "far": check_far}


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
    Bug("a block that ends one element early", "pass", "i >= p.lo && i < p.hi;\n            if (given",
        "i >= p.lo && i < p.hi - 1;\n            if (given", "select"),
    Bug("what equals the floor is left out", "pass", "magnitude >= p.floor", "magnitude > p.floor", "select"),
    Bug("infinity is taken for a number", "pass", ">= INFINITE && i < seen.bad", "> INFINITE && i < seen.bad",
        "accumulate_select"),
    Bug("the last value that is not finite", "pass", ">= INFINITE && i < seen.bad", ">= INFINITE", "select"),
    Bug("a gradient read from the vector's begin", "pass", "place.kind, i - place.begin) : 0", "place.kind, i) : 0",
        "accumulate_select"),
    Bug("a parameter too late", "pass", "if (i >= place->end &&", "if (i > place->end &&", "accumulate_select"),
    Bug("the average's product first", "pass", "__fmul_rn(p.rate, absolute(gradient))", "__fmul_rn(p.rate, gradient)",
        "accumulate_select"),
    Bug("a parameter without gradient keeps its average", "pass", ": kept;", ": mean;", "accumulate_select"),
    Bug("backward forgets what was lower",
        "pass", "atomicMin(noted, (u64)(own.acc + bad))", "*noted = (u64)(own.acc + bad)",
        "accumulate"),
    Bug("backward adds from another gradient's first tile on",
        "pass", "(which ? added.at[which - 1].tiles : 0)", "0", "group"),
    Bug("backward adds a tile too many", "pass", "added.at[which].tiles <= blockIdx.x", "added.at[which].tiles < blockIdx.x",
        "group"),
    Bug("bins are not cleared", "tally", "own[b] = 0;", ";", "select"),
    Bug("no barrier after bins are cleared", "tally", "own[b] = 0;\n    __syncthreads();", "own[b] = 0;", "select"),
    Bug("no barrier before bins are added", "tally", "1u);\n    }\n    __syncthreads();", "1u);\n    }", "select"),
    Bug("a histogram that reads one too far", "tally", "item * BLOCK < hi", "item * BLOCK <= hi", "select"),
    Bug("a rung is reached by what lies above only", "tally", "ladder[middle] <= x", "ladder[middle] < x", "tail_counts"),
    Bug("NaN reaches all rungs", "tally", "x > INFINITE ? 0 : count", "count", "tail_counts"),
    Bug("a warp that counts lanes beyond its part", "tally", "i < last && magnitude", "i < n && magnitude", "block_counts"),
    Bug("a column of the neighbouring row", "rows", "& (row - 1)", "& row", "rows"),
    Bug("an empty row shifts the others", "rows", "upper_bound(offsets, 0, rows, i) - 1",
        "lower_bound(offsets, 0, rows, i)", "rows"),
    Bug("more columns than there is room for", "rows", "if (place < room) ", "if (place <= room) ", "damaged_rows"),
    Bug("rows that do not add up are not told", "rows", "if (!sound) atomicMin(flag, -1ll);", "", "damaged_rows"),
    Bug("indices of damaged rows anywhere", "rows", "sound ? found : lo", "found", "damaged_rows"),
    Bug("columns beyond the region", "rows", " && found < hi", "", "damaged_rows"),
    Bug("the flag is not in the summary", "common", "summary[2] = *flag;", "summary[2] = 0;", "damaged_rows"),
    Bug("what is not finite is sent", "scatter", "*bad >= 0", "*bad > 1 << 20", "late_sum"),
    Bug("what is finite is spoiled", "scatter", "*bad >= 0", "*bad >= -1", "late_sum"),
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
    Bug("-0 does not count as zero", "blend", "mean[i] == 0.0f", "bits_of(mean[i]) == 0", "blend"),
    Bug("the last offset is never written", "common", "offsets[n] = summary[0]", "summary[0]", "scan"),
    Bug("ties of int8 away from even", "codec", "rintf(", "roundf(", "int8_edges"),
    Bug("int8 is clamped at 128", "codec", "fminf(127.0f", "fminf(128.0f", "int8_edges"),
    Bug("an average that reports what was not added", "pass", "!AVERAGE && inside", "inside", "where_nothing_is_added"),
    Bug("only one round of tiles is read for what is not finite", "common", "&& bads[first + j] < bad",
        "&& start == 0 && bads[first + j] < bad", "scan"),
    Bug("16-bit row counts", "tally", "counts[r] = reached", "counts[r] = (u16)reached", "full_row"),
    Bug("gradients of a tile that are watched from its begin", "pass", "(const Four<Number>*)source + threadIdx.x",
        "(const Four<Number>*)source", "inner_tiles"),
    Bug("one round of a tile's gradients is watched",
        "pass", "start < 8; start += BATCH) {\n        Four<Number> g[BATCH];\n#",
        "start < 4; start += BATCH) {\n        Four<Number> g[BATCH];\n#", "inner_tiles"),
    Bug("32-bit threads", "common", "(i64)blockIdx.x * blockDim.x + threadIdx.x", "blockIdx.x * blockDim.x + threadIdx.x",
        "far"),
    Bug("32-bit tiles", "common", "#define TILE (32ll * BLOCK)", "#define TILE (32 * BLOCK)", "far"),
    Bug("32-bit tiles of a pass", "pass", "const i64 i = tile * TILE", "const int i = (int)tile * TILE", "far"),
    Bug("32-bit indices of what is selected", "pass", "const i64 i = first * TILE + element",
        "const u32 i = first * TILE + element", "far"),
    Bug("32-bit indices of what is marked", "common", "write(place++, blockIdx.x * TILE",
        "write(place++, (u32)blockIdx.x * 32 * BLOCK", "far"),
    Bug("bins that are added without an atomic, shared",
        "tally", "atomicAdd(&own[(bits_of(x[item]) & MAGNITUDE) >> 20], 1u)",
        "own[(bits_of(x[item]) & MAGNITUDE) >> 20] += 1u", "races_select"),
    Bug("bins that are added without an atomic, global", "tally", "atomicAdd(&bins[b], (u64)own[b])", "bins[b] += own[b]",
        "races_select"),
    Bug("rungs that are added without an atomic, shared", "tally", "atomicAdd(&own[from], 1u)", "own[from] += 1u",
        "races_tail_counts"),
    Bug("rungs that are added without an atomic, global", "tally", "atomicAdd(&counts[r], (u64)own[r])",
        "counts[r] += own[r]", "races_tail_counts"),
    Bug("tiles that share a word", "pass", "atomicMin(noted, (u64)(own.acc + bad))",
        "{ if ((u64)(own.acc + bad) < *noted) *noted = (u64)(own.acc + bad); }", "races_accumulate"),
    Bug("marks of another round", "pass", "marked << (4 * (start + round))", "marked << (4 * start)", "inner_tiles"),
    Bug("marks of a warp's other lanes", "pass", "8 * (lane % 4) + s", "8 * (lane % 4) + 7 - s", "inner_tiles"),
    Bug("marks outside of the region", "pass", "if (outside) p.floor = ALL;", "", "inner_tiles"),
    Bug("the index of what is not finite, a round too early", "pass", "first + item / 4 * 128", "first + item / 4 * 4",
        "inner_tiles"),
    Bug("a tile that ends in the next parameter", "pass", "end <= place.end ||", "begin <= place.end ||", "inner_tiles"),
    Bug("vectors of gradients that begin anywhere", "pass", "(!given || source % (place.kind == FP32 ? 16 : 8) == 0)",
        "true", "inner_tiles"),
    Bug("a vector's second half read from the first", "pass", "g[round].at[k]", "g[round].at[k & 1]", "inner_tiles"),
    Bug("32-bit tiles by vectors", "pass", "const i64 first = tile * TILE + threadIdx.x / 32",
        "const i64 first = (i64)(int)(tile * TILE) + threadIdx.x / 32", "far"),
    Bug("a 32-bit index of what is not finite", "pass", "seen.bad = first + item / 4 * 128 + item % 4",
        "seen.bad = (int)(first + item / 4 * 128 + item % 4)", "far"),
    Bug("a 32-bit index of a gradient that is not finite", "pass", "return tile * TILE + 4 * (item",
        "return (int)(tile * TILE) + 4 * (item", "far"),
    Bug("32-bit values of a group",
        "few_bits", "const i64 i = at_thread(), group", "const int i = at_thread(), group", "far"),
    Bug("a missing weight is a zero", "weights", "const bool given = i < end && move_to(&place, weights, i);",
        "const bool given = i < end; move_to(&place, weights, i); if (given && !place.source) { own[item] = 0.0f; "
        "other[item] = reference[i]; continue; }", "weights"),
    Bug("a tile of weights read from its parameter's begin", "weights", "place.source + (first - place.begin);",
        "place.source;", "weights"),
    Bug("a tile that ends in the next weight", "weights", "&& last <= place.end", "", "weights"),
    Bug("a difference the other way", "weights", "__fsub_rn(mean[i], own[i])", "__fsub_rn(own[i], mean[i])",
        "moved_weights"),
    Bug("what is not finite is watched where it may be selected only", "weights", "if (magnitude >= INFINITE && i < bad)",
        "if (magnitude >= INFINITE && i < bad && i >= lo && i < hi)", "weights"),
    Bug("the weights of the next parameter", "weights", "(i - place.begin);\n        *weight", "i;\n        *weight",
        "moved_weights"),
    Bug("a stretch that begins at the first weight", "weights", "values[i - lo]", "values[i % (hi - lo)]", "moved_weights"),
    Bug("lanes of two groups are added", "weights", "step = 8; step > 0", "step = 16; step > 0", "weights"),
    Bug("squares fused with their sum", "weights", "__fadd_rn(sum, __fmul_rn(x, x))", "fmaf(x, x, sum)", "weights"),
    Bug("a norm that is infinite", "weights", "root > most ? most : root", "root", "weights"),
    Bug("distances with a sign", "weights", "absolute(apart(&at, weights, reference, i))",
        "apart(&at, weights, reference, i)", "weights"),
    Bug("no barrier after bins of distances are cleared", "weights", "own[b] = 0;\n    __syncthreads();", "own[b] = 0;",
        "weights"),
    Bug("bins of distances without an atomic", "weights", "atomicAdd(&own[(bits_of(x) & MAGNITUDE) >> 20], 1u)",
        "own[(bits_of(x) & MAGNITUDE) >> 20] += 1u", "races_weights"),
    Bug("blocks from their begin", "weights", "(skip + i) % width", "i % width", "neighbours"),
    Bug("blocks of an owner that are not in turn", "weights", "/ width % size == owner", "/ width / size == owner",
        "owners"),
    Bug("places of another owner", "weights", "if (owner == rank) places[place - first]",
        "if (owner <= rank && first < offsets[(rank + 1) * tiles]) places[place < first ? 0 : place - first]", "owners"),
    Bug("places without their blocks", "weights", "/ (width * size) * width", "/ (width * size)", "owners"),
    Bug("squares of what has a sign", "sums", "(double)absolute(source[first])", "(double)source[first]", "sums"),
    Bug("a piece that ends one element early", "sums", "first < end ?", "first < end - 1 ?", "sums"),
    Bug("neighbours before halves", "sums", "step = 16; step > 0; step /= 2", "step = 1; step < 32; step *= 2", "sums"),
    Bug("lanes that are not all added", "sums", "step = 16; step > 0", "step = 16; step > 1", "sums"),
    Bug("squares in fewer bits", "sums", "__dmul_rn(x, x)", "(float)(x * x)", "sums"),
    Bug("32-bit pieces", "sums", "const i64 piece = at_thread()", "const u32 piece = at_thread()", "far"),
    Bug("a share of scores from 0", "scores", "__fadd_rn((float)score, 1.0f)", "(float)score", "scores"),
    Bug("scores one bit lower", "scores", "(u32)score << 23", "(u32)score << 22", "scores"),
    Bug("magnitudes before scores", "scores", "rule != PRODUCTS", "rule == PRODUCTS", "scores"),
    Bug("keys at the floor are left out", "scores", ">= floor;", "> floor;", "scores"),
    Bug("scores of the neighbour", "scores", "key_of(rule, acc[i], scores[i]));", "key_of(rule, acc[i], scores[i + 1]));",
        "scores"),
    Bug("elements before the region", "scores", "if (i < lo || i >= hi) return", "if (i >= hi) return", "scores"),
    Bug("no barrier after bins of keys are cleared", "scores", "own[b] = 0;\n    __syncthreads();", "own[b] = 0;",
        "scores"),
    Bug("bins of keys that are added without an atomic", "scores",
        "atomicAdd(&own[key_of(rule, acc[i], scores[i]) >> 20], 1u)", "own[key_of(rule, acc[i], scores[i]) >> 20] += 1u",
        "races_scores"),
    Bug("gradients recorded from the first on", "scores", "slots}, lo + i)", "slots}, i)", "recorded"),
    Bug("a recorded gradient read from the vector's begin", "scores", "place.kind, i - place.begin)", "place.kind, i)",
        "recorded"),
    Bug("one byte too many", "scores", "if (i < n) bytes[index[i]] =", "if (i <= n) bytes[index[i]] =", "recorded"),
    Bug("32-bit elements with scores", "scores", "const i64 i = first * TILE + place;",
        "const int i = (int)(first * TILE + place);", "far"),
    Bug("32-bit places of what has scores", "scores", "const i64 i = first * TILE + element",
        "const u32 i = first * TILE + element", "far"),
    Bug("no barrier before the sums are used again, any order", "common", "__syncthreads();\n    *total",
        "\n    *total", "races_scan"),
]  # fmt: skip


def planted(bug: Bug) -> str:
    """Return the source with the bug, of what its check needs only, because fewer kernels compile faster."""
    names = ("common", *sorted(NEEDED[bug.check.removeprefix(RACES)]))
    texts = {name: (source.directory() / f"{name}.cu").read_text() for name in names}
    assert bug.old in texts[bug.file], f"{bug.name}: the kernels have changed, plant this bug anew"
    texts[bug.file] = texts[bug.file].replace(bug.old, bug.new)
    return "\n".join(texts.values())


NEEDED = {
    "select": {"pass", "tally"}, "accumulate_select": {"pass"}, "accumulate": {"pass", "scatter"}, "rows": {"rows", "tally"},
    "block_counts": {"tally"}, "tail_counts": {"tally"}, "scattered": {"scatter"}, "codecs": {"codec"}, "blend": {"blend"},
    "few_bits": {"few_bits", "pass", "scatter"}, "scan": set(), "int8_edges": {"codec"}, "where_nothing_is_added": {"pass"},
    "inner_tiles": {"pass"},
    "damaged_rows": {"rows", "tally", "pass"}, "late_sum": {"pass", "scatter"},
    "group": {"pass"}, "full_row": {"rows", "tally"}, "sums": {"sums"},
    "scores": {"pass", "scores"}, "recorded": {"pass", "scores"},
    **{key: {"pass", "weights"} for key in ("neighbours", "weights", "moved_weights", "owners")},
    "far": {"pass", "sums", "scores", "weights", "tally", "rows", "scatter", "blend", "codec", "few_bits"},
}  # fmt: skip


class Roomy(Device):
    """Has gradients and weights in memory with room behind each: what a bug reads or writes there is always the same."""

    def gradients(self, x: NDArray[np.float32], cuts: list[int], kinds: list[int | None]) -> tuple[Flat, Flat, list[Any]]:
        _, twin, alive = super().gradients(x, cuts, kinds)
        room = 4 * (len(x) + 2 * self.backend.tile)
        ends = np.cumsum([-(-(t.nbytes + room) // 64) * 64 for t in alive]).tolist()
        memory = torch.full((ends[-1],), RUBBISH, dtype=torch.uint8)
        there = [memory[at : at + t.nbytes].view(t.dtype).copy_(t) for at, t in zip([0, *ends[:-1]], alive, strict=True)]
        pointers = [0 if kind is None else t.data_ptr() for kind, t in zip(kinds, there, strict=True)]
        return (np.array(pointers, dtype=np.uint64), *twin[1:]), twin, [memory, *alive, *there]


def check(text: str, name: str) -> None:
    """Run a check in all orders of threads and for all numbers of elements."""
    sanitize = "thread" if name.startswith(RACES) else ""
    for n in SIZES:
        for order in ORDERS:
            emulator = Emulator(**TILES, order=order, text=text, sanitize=sanitize)
            ALL[name.removeprefix(RACES)](Roomy(CudaBackend(emulator)), n)
            assert not emulator.damaged


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_is_noticed(bug: Bug) -> None:
    text = planted(bug)
    build(text, **TILES, sanitize="thread" if bug.check.startswith(RACES) else "")
    assert not survives(lambda: check(text, bug.check))


@pytest.mark.parametrize("name", sorted({bug.check for bug in BUGS}))
def test_without_bugs_all_is_well(name: str) -> None:
    """The same checks pass without bugs, so the failures above are due to the bugs."""
    check(source.joined(), name)
