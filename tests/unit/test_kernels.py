"""The native kernels against the NumPy backend, to the last bit, on every instruction set, on 1 and 3 threads."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import FLOORS, NONFINITE, SPECIAL, TYPES, assert_same, gradients, halfway, values

from mpisparse.backends import (
    numpy_apart,
    numpy_backend,
    numpy_chunks,
    numpy_few_bits,
    numpy_indices,
    numpy_nets,
    numpy_tallies,
)
from mpisparse.backends.keys import PRODUCTS, SCORES, keys_of
from mpisparse.backends.kinds import BF16, FP16, FP32, FP64, STORED, round_to
from mpisparse.backends.payloads import places_of
from mpisparse.backends.protocol import FEW_BITS, HIDDEN
from mpisparse.select.threshold import HUGE, TINY, spread
from mpisparse.wire.codecs import CODECS

cpu = pytest.importorskip("mpisparse._cpu", exc_type=ImportError)

ROOMS = (numpy_apart, numpy_backend, numpy_chunks, numpy_few_bits, numpy_indices, numpy_nets, numpy_tallies)
MODULES = [module.__name__ for module in ROOMS]
KERNELS = sorted(
    name for name, f in inspect.getmembers(numpy_backend, inspect.isfunction) if f.__module__ in MODULES and name[0] != "_"
)
VERBS = ("encode", "pack", "decode", "add", "subtract", "settle")
KERNELS += [f"{verb}_{codec}" for verb in VERBS for codec in FEW_BITS]
SPLIT = 3 * 32_768 + 77  # long enough for three threads
SIZES = (0, 1, 63, 64, 65, 1000, SPLIT)


@pytest.fixture(scope="module", params=[f"{isa}-{threads}" for isa in cpu.isas() for threads in (1, 3)])
def native(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The native kernels on one instruction set and a number of threads."""
    isa, threads = request.param.split("-")
    before, threads_before = cpu.isa(), cpu.threads()
    cpu.use_isa(isa)
    cpu.use_threads(int(threads))
    assert (cpu.isa(), cpu.threads()) == (isa, int(threads))
    yield cpu
    cpu.use_isa(before)
    cpu.use_threads(threads_before)


def assert_agree(native: Any, kernel: str, *args: Any, writes: tuple[int, ...] = ()) -> None:
    """Run a kernel natively and in NumPy; results and the arguments at `writes` must agree."""
    here = [arg.copy() if i in writes else arg for i, arg in enumerate(args)]
    there = [arg.copy() if i in writes else arg for i, arg in enumerate(args)]
    with np.errstate(all="ignore"):  # what overflows must overflow in both
        assert_same(getattr(native, kernel)(*here), getattr(numpy_backend, kernel)(*there))
    for i in writes:
        assert_same(here[i], there[i])


def regions(n: int) -> list[tuple[int, int]]:
    """Draw regions of [0, n] that start and end anywhere."""
    places = sorted({min(at, n) for at in (0, 1, 63, 64, 65, n // 3, n - n // 5, n)})
    return [(lo, hi) for i, lo in enumerate(places) for hi in places[i:]][:: 1 if n < SPLIT else 7]


def test_every_kernel_is_native() -> None:
    functions = {name for name in dir(cpu) if name[0] != "_" and callable(getattr(cpu, name))}
    assert functions == {*KERNELS, "isa", "isas", "use_isa", "threads"}
    with pytest.raises(ValueError, match="the number of threads must be at least 1, got 0"):
        cpu.use_threads(0)
    with pytest.raises(ValueError, match="no instruction set named sse9"):
        cpu.use_isa("sse9")


@pytest.mark.parametrize("nonfinite", [False, True])
@pytest.mark.parametrize("n", SIZES)
def test_select_and_histogram(native: Any, n: int, nonfinite: bool) -> None:
    acc = values(np.random.default_rng(n), n, nonfinite=nonfinite)
    for lo, hi in regions(n):
        assert_agree(native, "histogram", acc, lo, hi)
        for floor in FLOORS:
            assert_agree(native, "select", acc, lo, hi, floor)


@pytest.mark.parametrize("nonfinite", [False, True])
@pytest.mark.parametrize("n", SIZES)
def test_accumulate_select(native: Any, n: int, nonfinite: bool) -> None:
    rng = np.random.default_rng(n + 1)
    cuts = sorted([*rng.integers(0, n + 1, 5).tolist(), n // 2, n // 2])
    flat, _alive = gradients(values(rng, n, nonfinite=nonfinite), cuts, [FP32, FP16, BF16, None, FP32, BF16, None, FP16])
    acc = values(rng, n, nonfinite=nonfinite)
    assert_agree(native, "first_nonfinite", *flat)
    for lo, hi in regions(n)[::2]:
        for floor in FLOORS[::2]:
            assert_agree(native, "accumulate_select", acc, *flat, lo, hi, floor, writes=(0,))
            assert_agree(native, "peek_select", acc, *flat, lo, hi, floor)
            ahead, found = (
                getattr(native, name)(acc.copy(), *flat, lo, hi, floor) for name in ("peek_select", "accumulate_select")
            )
            assert_same(ahead[0], found[0])
            assert_same(ahead[1], found[1])


@pytest.mark.parametrize("nonfinite", [False, True])
@pytest.mark.parametrize("n", SIZES)
def test_average_select(native: Any, n: int, nonfinite: bool) -> None:
    rng = np.random.default_rng(n + 1)
    cuts = sorted([*rng.integers(0, n + 1, 5).tolist(), n // 2, n // 2])
    flat, _alive = gradients(values(rng, n, nonfinite=nonfinite), cuts, [FP32, FP16, BF16, None, FP32, BF16, None, FP16])
    acc, average = values(rng, n, nonfinite=nonfinite), np.abs(values(rng, n))
    for lo, hi in regions(n)[::3]:
        for rate, floor in zip((0.9, 1.0, 0.001), FLOORS[::2], strict=False):
            assert_agree(native, "average_select", acc, average, rate, *flat, lo, hi, floor, writes=(0, 1))


@pytest.mark.parametrize("nonfinite", [False, True])
@pytest.mark.parametrize("key", [PRODUCTS, SCORES])
@pytest.mark.parametrize("n", SIZES)
def test_selection_by_scores(native: Any, n: int, key: int, nonfinite: bool) -> None:
    rng = np.random.default_rng(n + 5)
    cuts = sorted([*rng.integers(0, n + 1, 3).tolist(), n // 2])
    flat, _alive = gradients(values(rng, n, nonfinite=nonfinite), cuts, [FP32, FP16, None, BF16, FP32])
    acc, scores = values(rng, n, nonfinite=nonfinite), rng.integers(0, 255, n).astype(np.uint8)
    for lo, hi in regions(n)[::3]:
        assert_agree(native, "histogram_scored", acc, scores, key, lo, hi)
        for floor in (*FLOORS[:2], 1e-4, 0.01, float(np.int32(100 << 23).view(np.float32)), HUGE):
            assert_agree(native, "select_scored", acc, scores, key, lo, hi, floor)
        assert_agree(native, "accumulate_select_scored", acc, scores, key, *flat, lo, hi, 0.01, writes=(0,))


@pytest.mark.parametrize("nonfinite", [False, True])
@pytest.mark.parametrize("n", SIZES)
def test_weights_against_a_reference(native: Any, n: int, nonfinite: bool) -> None:
    rng = np.random.default_rng(n + 3)
    cuts = sorted([*rng.integers(0, n + 1, 3).tolist(), n // 2])
    weights = values(rng, n, nonfinite=nonfinite)
    flat, alive = gradients(weights, cuts, [FP32, None, FP32, FP32, FP32])
    with np.errstate(all="ignore"):
        reference = weights * rng.choice(np.array([0.0, 0.5, 1.0, 2.0], dtype=np.float32), n)
    assert_agree(native, "group_norms", *flat, reference, np.empty(-(-n // 512), dtype=np.float32), writes=(4,))
    for lo, hi in regions(n)[::3]:
        assert_agree(native, "histogram_apart", *flat, reference, lo, hi)
        assert_agree(native, "subtract_apart", *flat, reference, lo, np.empty(hi - lo, dtype=np.float32), writes=(5,))
        for floor in FLOORS[::2]:
            assert_agree(native, "select_apart", *flat, reference, lo, hi, floor)
        index = np.arange(lo, hi, 3)
        assert_agree(native, "values_apart", *flat, reference, index)
        before = [own.clone() for own in alive]
        for kernel, more in (
            ("move_apart", (reference, index, values(rng, len(index)), values(rng, len(index)))),
            ("add_stretch", (lo, values(rng, hi - lo))),
        ):
            moved = []
            for backend in (native, numpy_backend):
                for own, old in zip(alive, before, strict=True):
                    own.copy_(old)
                copies = [copy.copy(argument) for argument in more]
                with np.errstate(all="ignore"):
                    getattr(backend, kernel)(*flat, *copies)
                moved.append([*(own.numpy().copy() for own in alive), np.asarray(copies[0])])
            for here, there in zip(*moved, strict=True):
                assert_same(here, there)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
def test_elements_are_dealt_out_to_owners(native: Any, size: int) -> None:
    rng = np.random.default_rng(size)
    for n in SIZES:
        index = np.flatnonzero(rng.random(n) < 0.3)
        for rank in range(size):
            assert_agree(native, "by_owner", index, 64, size, rank)


def test_weights_of_other_types_are_refused(native: Any) -> None:
    flat, _alive = gradients(np.ones(8, dtype=np.float32), [4], [FP32, BF16])
    for backend in (native, numpy_backend):
        with pytest.raises(ValueError, match="weights must be float32"):
            backend.select_apart(*flat, np.zeros(8, dtype=np.float32), 0, 8, 0.0)


@pytest.mark.parametrize("nonfinite", [False, True])
@pytest.mark.parametrize("by", [1, 2, 3, 64])
@pytest.mark.parametrize("n", SIZES)
def test_divide_into(native: Any, n: int, by: int, nonfinite: bool) -> None:
    rng = np.random.default_rng(n + 9)
    cuts = sorted([*rng.integers(0, n + 1, 3).tolist(), n // 2])
    flat, _alive = gradients(values(rng, n, nonfinite=nonfinite), cuts, [FP32, FP16, None, BF16, FP32])
    assert_agree(native, "divide_into", np.full(n, 7, dtype=np.float32), *flat, by, writes=(0,))


@pytest.mark.parametrize("bad", [None, 0, 3, 2_500_001, (1 << 22) + 12])
def test_divide_into_memory_that_no_cache_holds(native: Any, bad: int | None) -> None:
    n = (1 << 22) + 13
    source = np.resize(values(np.random.default_rng(1), 4099, nonfinite=False), n)
    if bad is not None:
        source[bad] = -np.inf
    flat, _alive = gradients(source, [5, 2_500_002], [FP32, FP32, FP32])
    for by in (2, 3):
        assert_agree(native, "divide_into", np.full(n, 7, dtype=np.float32), *flat, by, writes=(0,))


def test_keys_rank_by_score_then_by_magnitude() -> None:
    acc = np.array([1.0, -2.0, 1.0, 0.0, -1e-42, 5.0], dtype=np.float32)
    scores = np.array([3, 3, 4, 4, 0, 0], dtype=np.uint8)
    assert np.argsort(-keys_of(acc, scores, SCORES)).tolist() == [2, 3, 1, 0, 5, 4]
    np.testing.assert_array_equal(keys_of(acc, scores, PRODUCTS), np.abs(acc) * (scores.astype("f4") + 1) / 256)


@pytest.mark.parametrize("n", [0, 1, 63, 1000, SPLIT])
def test_record_and_gather(native: Any, n: int) -> None:
    rng = np.random.default_rng(n + 7)
    cuts = sorted(rng.integers(0, n + 1, 4).tolist())
    flat, _alive = gradients(values(rng, n, nonfinite=False), cuts, [FP32, BF16, None, FP16, FP32])
    index = np.flatnonzero(rng.random(n) < 0.2)
    assert_agree(native, "gather", *flat, index, np.ones(len(index), dtype=np.float32), writes=(4,))
    for lo, hi in regions(n)[::3]:
        assert_agree(native, "record", *flat, lo, np.ones(hi - lo, dtype=np.uint16), writes=(4,))


@pytest.mark.parametrize("depth", [3, 4, 5])
def test_predict_and_learn(native: Any, depth: int) -> None:
    rng = np.random.default_rng(depth)
    ends, size = np.array([0, 65, 65, 1000]), HIDDEN * (depth + 2) + 1
    n = int(ends[-1])
    history = round_to(values(rng, (depth + 1) * n), BF16)
    nets = rng.standard_normal(len(ends) * size).astype(np.float32)
    inverse = np.array([1.0, 0.0, 3.0, 1e3], dtype=np.float32)
    assert_agree(native, "predict", history, nets, inverse, ends, depth, np.empty(n, dtype=np.uint8), writes=(5,))
    magnitude = np.abs(values(rng, n))
    pairs, weights = rng.integers(0, n, 2 * 301), rng.random(301).astype(np.float32)
    memory = (np.zeros_like(nets), np.zeros_like(nets))
    corrections = np.linspace(10, 1, 8, dtype=np.float32)
    assert_agree(
        native, "learn", nets, *memory, history, inverse, ends, depth, magnitude, pairs, weights, 100, 0.01, corrections,
        writes=(0, 1, 2),
    )  # fmt: skip


@given(
    first=st.sets(st.integers(0, 60)), second=st.sets(st.integers(0, 60)), share=st.sampled_from([0.7, 1.0, 0.01]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_blend(native: Any, first: set[int], second: set[int], share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    indices = [np.array(sorted(s), dtype=np.int64) for s in (first, second)]
    new, old = (values(rng, len(i)) for i in indices)
    assert_agree(native, "blend", indices[0], new, indices[1], old, share)
    index, mixed, selected = numpy_backend.blend(indices[0], new, indices[1], old, share)
    mean = np.where(rng.random(len(index)) < 0.5, np.float32(0), mixed)
    rest = (index, mixed, selected, mean, values(rng, len(index)), 0.43)
    assert_agree(native, "drop_decayed", values(rng, 61), *rest, writes=(0, 5))


@pytest.mark.parametrize("kind", [FP32, FP16, BF16])
@pytest.mark.parametrize("n", SIZES)
def test_accumulate(native: Any, n: int, kind: int) -> None:
    for nonfinite in (False, True):
        rng = np.random.default_rng(n + 2)
        (pointers, _, _), _alive = gradients(values(rng, n, nonfinite=nonfinite), [], [kind])
        assert_agree(native, "accumulate", values(rng, n), int(pointers[0]), kind, writes=(0,))
    assert_agree(native, "accumulate", values(rng, n, nonfinite=True), 0, kind, writes=(0,))


@given(
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=5),
    kinds=st.lists(st.sampled_from([FP32, FP16, BF16, None]), min_size=5, max_size=5),
    ends=st.tuples(st.integers(0, 750), st.integers(0, 750)),
    floor=st.sampled_from(FLOORS),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_accumulate_select_anywhere(
    native: Any, lengths: list[int], kinds: list[int | None], ends: tuple[int, int], floor: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    n = sum(lengths)
    lo, hi = sorted(min(end, n) for end in ends)
    x = values(rng, n, nonfinite=seed % 2 == 1)
    flat, _alive = gradients(x, np.cumsum(lengths[:-1]).tolist(), kinds[: len(lengths)])
    assert_agree(native, "first_nonfinite", *flat)
    assert_agree(native, "accumulate_select", values(rng, n, nonfinite=seed % 3 == 1), *flat, lo, hi, floor, writes=(0,))


@pytest.mark.parametrize("at", [0, 63, 64, 32_768, SPLIT // 3, SPLIT - 70, SPLIT - 1])
def test_first_nonfinite_is_found(native: Any, at: int) -> None:
    """With one or two non-finite elements anywhere, every pass that reads them reports the first."""
    acc, zeros = np.zeros((2, SPLIT), dtype=np.float32)
    for bad in NONFINITE:
        acc[[at, SPLIT - 1]] = bad
        for kind in (FP32, FP16, BF16):
            (pointers, ends, kinds), _alive = gradients(acc, [at // 2], [kind, kind])
            assert native.first_nonfinite(pointers, ends, kinds) == at
            assert native.accumulate_select(zeros.copy(), pointers, ends, kinds, 0, 0, 0.0)[2] == at
        assert native.select(acc, 0, SPLIT, 1.0)[2] == at
        assert native.select(acc, at + 1, SPLIT - 1, 1.0)[2] == -1
        assert native.accumulate(acc.copy(), zeros.ctypes.data, FP32) == at


@pytest.mark.parametrize("kind", [FP16, BF16])
def test_every_half_is_read_exactly(native: Any, kind: int) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    expected = torch.from_numpy(patterns.copy()).view(TYPES[kind]).float().numpy()
    acc = np.full(1 << 16, -0.0, dtype=np.float32)
    native.accumulate(acc, patterns.ctypes.data, kind)
    assert_same(acc, expected)


@pytest.mark.parametrize("count", [0, 1, 2, 256])
def test_tail_counts(native: Any, count: int) -> None:
    x = np.abs(values(np.random.default_rng(count), 5000, nonfinite=True))
    for low, high in ((0.001, 0.1), (TINY, HUGE), (TINY, 1e-40), (1.0, 1.0), (0.5, 0.50001)):
        rungs = spread(low, high, count) if count else np.empty(0, dtype=np.float32)
        near = np.concatenate([rungs, np.nextafter(rungs, np.float32(0)), np.nextafter(rungs, np.float32(HUGE))])
        magnitudes = np.concatenate([x, near])
        assert_agree(native, "tail_counts", magnitudes, rungs)
        assert native.tail_counts(magnitudes, rungs).tolist() == [int((magnitudes >= r).sum()) for r in rungs]
    assert_agree(native, "tail_counts", x, np.array([0.0, 0.02, 0.02, np.inf], dtype=np.float32))
    assert_agree(native, "tail_counts", x[:0], np.ones(count, dtype=np.float32))


@pytest.mark.parametrize("n", [0, 1, 33, 1024, 1025, 5000, 200_000])
def test_piece_sums(native: Any, n: int) -> None:
    """By halves, as NumPy; and close to the sums in any other order."""
    x = values(np.random.default_rng(n), n)
    begins = np.arange(0, n, 1000)
    ends = np.minimum(begins + np.resize([1000, 1, 0, 999, 512], len(begins)), n)
    assert_agree(native, "piece_sums", x, begins, ends)
    for i, found in enumerate(native.piece_sums(x, begins, ends).reshape(-1, 2)):
        part = np.abs(x[begins[i] : ends[i]]).astype(np.float64)
        assert found == pytest.approx([part.sum(), np.square(part).sum()], rel=1e-13)
    with pytest.raises(ValueError, match="at most 1024 elements"):
        native.piece_sums(np.zeros(2000, np.float32), np.array([0]), np.array([1025]))


@pytest.mark.parametrize("blocks", [1, 2, 100, 20_000])
def test_block_counts(native: Any, blocks: int) -> None:
    index, magnitude, _ = numpy_backend.select(values(np.random.default_rng(blocks), 9000, nonfinite=True), 0, 9000, 0.01)
    edges = np.sort(np.append(np.random.default_rng(1).integers(0, 9001, blocks - 1), [0, 9000]))
    for threshold in FLOORS:
        assert_agree(native, "block_counts", index, magnitude, threshold, edges)
        assert native.block_counts(index, magnitude, threshold, edges).sum() == (magnitude >= np.float32(threshold)).sum()
    assert_agree(native, "block_counts", index[:0], magnitude[:0], 0.0, edges)


@pytest.mark.parametrize("row", [64, 4096, 65_536])
def test_rows(native: Any, row: int) -> None:
    lo, hi = 1234, 1234 + 5 * row + 7
    index, magnitude, _ = numpy_backend.select(values(np.random.default_rng(row), hi, nonfinite=True), lo, hi, 0.02)
    assert_agree(native, "compress_rows", index[:0], magnitude[:0], 0.0, lo, row, 6)
    for threshold in FLOORS:
        assert_agree(native, "compress_rows", index, magnitude, threshold, lo, row, 6)
        counts, columns = numpy_backend.compress_rows(index, magnitude, threshold, lo, row, 6)
        assert_agree(native, "expand_rows", counts, columns, lo, row, np.zeros(len(columns), dtype=np.int64), writes=(4,))
        damaged = counts + np.eye(1, 6, 3, dtype=np.uint32)[0]
        assert_agree(native, "expand_rows", damaged, columns, lo, row, np.zeros(len(columns), dtype=np.int64))
        for wrong in (len(columns) + 1, len(columns) - 1):
            assert_agree(native, "expand_rows", counts, columns, lo, row, np.zeros(wrong, dtype=np.int64))


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 5000])
@pytest.mark.parametrize("length", [5000, 70_000, 2**25, 2**31 - 1, 2**31, 2**40])
def test_coded_indices(native: Any, count: int, length: int) -> None:
    """Spread evenly, in clusters of several widths, and one after the other."""
    rng, lo = np.random.default_rng(count), 2**33
    scattered = np.unique(rng.integers(0, length, count))
    near = np.unique(np.minimum(np.cumsum(rng.geometric(np.repeat([0.9, 0.1, 0.01], 2000)[:count])), length - 1))
    for offsets in (scattered, near, np.unique(np.concatenate([scattered, near])), np.arange(min(count, length))):
        index = offsets.astype(np.int64) + lo
        assert_agree(native, "encode_indices", index, lo, lo + length)
        payload = numpy_backend.encode_indices(index, lo, lo + length)
        assert_agree(native, "decode_indices", payload, lo, lo + length, np.zeros(len(index), np.int64), writes=(3,))
        assert native.decode_indices(payload[:-1], lo, lo + length, index.copy()) == (-1 if len(index) else 0)


@pytest.mark.parametrize("slots", [0, 1, 2, 255, 1000])
@pytest.mark.parametrize("most", [0, 1, 3, 400, 2**33])
def test_counts_as_bytes(native: Any, slots: int, most: int) -> None:
    """Few items in many slots, many in few; damaged messages are noticed by both."""
    rng = np.random.default_rng(slots + most)
    for counts in (rng.integers(0, most + 1, slots), rng.integers(0, most + 1, slots) * (rng.random(slots) < 0.05)):
        total = int(counts.sum())
        assert_agree(native, "encode_counts", counts)
        payload = numpy_backend.encode_counts(counts)
        out = np.zeros(slots, np.int64)
        assert native.decode_counts(payload, total, out)
        assert np.array_equal(out, counts)
        assert_agree(native, "decode_counts", payload, total, np.zeros(slots, np.int64), writes=(2,))
        falling = np.cumsum(counts[::-1])[::-1].copy() + 7
        longer = np.full(len(payload) + 5, 0xFF, np.uint8)
        assert_agree(native, "encode_falling", falling, 7, longer, writes=(2,))
        native.encode_falling(falling, 7, longer)
        assert_agree(native, "decode_falling", longer, total, 7, np.zeros(slots, np.int64), writes=(3,))
        for damaged in (payload[:-1], payload[:0], np.bitwise_xor(payload, 0x55)):
            for wrong in (total, total + 1, max(0, total - 1), -1):
                outs = [np.zeros(slots, np.int64) for _ in range(2)]
                verdicts = [b.decode_counts(damaged, wrong, x) for b, x in zip((native, numpy_backend), outs, strict=True)]
                assert verdicts[0] == verdicts[1]
                assert not verdicts[0] or np.array_equal(*outs)


def test_counts_that_cannot_be_sent(native: Any) -> None:
    for backend in (native, numpy_backend):
        with pytest.raises(ValueError, match="negative"):
            backend.encode_counts(np.array([3, -1]))
        with pytest.raises(ValueError, match="room"):
            backend.encode_falling(np.array([900, 500, 20]), 0, np.zeros(1, np.uint8))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("blocks", [1, 5, 300])
def test_least_borders(native: Any, size: int, blocks: int) -> None:
    rng = np.random.default_rng(size + blocks)
    edges = np.concatenate([[0], np.cumsum(rng.integers(0, 50, blocks))])
    for sparse in (1.0, 0.2):
        work = [rng.integers(0, 900, blocks) * (rng.random(blocks) < sparse) for _ in range(size)]
        high = max(1, *(int(w.sum()) for w in work))
        for each in (work, [work[0]] * size):
            for limit in (int(edges[-1]), -(-int(edges[-1]) // size) + 50):
                assert_agree(native, "least_borders", each, edges, limit, [256] * size, 256, 0, high)
            rooms = rng.integers(1, 1024, size).tolist()
            assert_agree(native, "least_borders", each, edges, int(edges[-1]), rooms, 256, 0, high)


def test_reaching(native: Any) -> None:
    index, magnitude, _ = numpy_backend.select(values(np.random.default_rng(1), 9000, nonfinite=True), 0, 9000, 0.01)
    for threshold in FLOORS:
        assert_agree(native, "reaching", index, magnitude, threshold)


@pytest.mark.parametrize("count", [0, 1, 23, 24, 25, 700])
def test_scattered_reads_and_writes(native: Any, count: int) -> None:
    rng = np.random.default_rng(count)
    acc, new = values(rng, 1000, nonfinite=True), values(rng, count, nonfinite=True)
    index = np.sort(rng.permutation(1000)[:count])
    assert_agree(native, "values_at", acc, index, writes=(0,))
    assert_agree(native, "take", acc, index, np.empty(count, dtype=np.float32), writes=(0, 2))
    assert_agree(native, "put", acc, index, new, writes=(0,))
    finite = np.nan_to_num(new, posinf=1.0, neginf=-1.0) * np.float32(0.25)
    assert_agree(
        native, "add_at", np.nan_to_num(acc, posinf=1.0, neginf=-1.0) * np.float32(0.25), index, finite, writes=(0,)
    )


@pytest.mark.parametrize("n", SIZES)
def test_add(native: Any, n: int) -> None:
    rng = np.random.default_rng(n)
    assert_agree(native, "add", values(rng, n, nonfinite=True), values(rng, n, nonfinite=True), writes=(0,))
    with pytest.raises(ValueError, match="not as long as"):
        native.add(np.zeros(n, dtype=np.float32), np.zeros(n + 1, dtype=np.float32))


@pytest.mark.parametrize("n", SIZES)
def test_divide(native: Any, n: int) -> None:
    x = np.concatenate([SPECIAL, values(np.random.default_rng(n), n, nonfinite=True)])[:n]
    for by in (1, 3, 0.1, 7e-39):
        assert_agree(native, "divide", x, by, writes=(0,))
        divided = x.copy()
        native.divide(divided, by)
        assert_same(divided, torch.from_numpy(x.copy()).div_(by).numpy())


@pytest.mark.parametrize("kind", [FP32, FP16, BF16, FP64])
def test_publish_and_clear(native: Any, kind: int) -> None:
    """It rounds as torch does, to the nearest finite value, changes only the given indices, and keeps the error exactly."""
    x = np.concatenate([halfway(kind) if kind in (FP16, BF16) else values(np.random.default_rng(0), 999), SPECIAL])
    limit = min(torch.finfo(TYPES[kind]).max, HUGE)
    expected = torch.from_numpy(x).to(TYPES[kind]).double().clamp(-limit, limit)
    index = np.arange(1, 2 * len(x), 2)
    buffer, twin = np.ones((2, 2 * len(x)), dtype=STORED[kind])
    left, left_twin = x.copy(), x.copy()
    native.publish_at(buffer.ctypes.data, kind, len(buffer), index, left)
    numpy_backend.publish_at(twin.ctypes.data, kind, len(twin), index, left_twin)
    assert_same(buffer, twin)
    assert_same(left, left_twin)
    published = torch.from_numpy(buffer[1::2].copy()).view(TYPES[kind]).double()
    assert torch.equal(published, expected)
    np.testing.assert_array_equal(published.numpy() + left, x.astype(np.float64))
    native.zero_at(buffer.ctypes.data, kind, len(buffer), index)
    numpy_backend.zero_at(twin.ctypes.data, kind, len(twin), index)
    assert_same(buffer, twin)
    assert not buffer[1::2].any()
    assert (buffer[::2] == 1).all()


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1000])
@pytest.mark.parametrize("codec", ["int8", "fp16", "bf16"])
def test_encode_and_decode(native: Any, codec: str, count: int) -> None:
    ties = ((np.arange(count) % 509 - 254) / 2).astype(np.float32)  # halves between steps of one
    noise = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    for x in (ties, noise, *(noise * np.float32(scale) for scale in (1e-44, 1e-38, 1e36))):
        codes = np.empty(count, dtype=np.int8 if codec == "int8" else np.uint16)
        scales = [] if codec == "bf16" else [np.empty(-(-count // 256), dtype=np.float32)]
        assert_agree(native, f"encode_{codec}", x, *scales, codes, writes=tuple(range(2 + len(scales))))
        getattr(numpy_backend, f"encode_{codec}")(x.copy(), *scales, codes)
        assert_agree(native, f"decode_{codec}", *scales, codes, np.empty_like(x), writes=(1 + len(scales),))
        assert_agree(native, f"add_{codec}", *scales, codes, noise / np.float32(4), writes=(1 + len(scales),))


@pytest.mark.parametrize("count", [0, 1, 16, 63, 64, 65, 127, 128, 129, 1000, 70_001])
@pytest.mark.parametrize("codec", FEW_BITS)
def test_few_bits(native: Any, codec: str, count: int) -> None:
    form, rng = FEW_BITS[codec], np.random.default_rng(count)
    noise = rng.standard_t(2, count).astype(np.float32)
    special = np.concatenate([SPECIAL, noise])[:count]
    steps = (np.arange(count) % 129 - 64).astype(np.float32) / 256  # values in the middle of two levels
    for x in (noise, special, steps, np.abs(noise), *(noise * np.float32(scale) for scale in (0, 1e-44, 1e-38, 1e36))):
        scales = np.empty(-(-count // form.group), np.uint16)
        codes = np.empty(count // form.group * form.nbytes + min(count % form.group, form.nbytes), np.uint8)
        assert_agree(native, f"encode_{codec}", x, scales, codes, writes=(0, 1, 2))
        assert_agree(native, f"pack_{codec}", x, scales, codes, writes=(0, 1, 2))
        getattr(numpy_backend, f"encode_{codec}")(x.copy(), scales, codes)
        assert_agree(native, f"decode_{codec}", scales, codes, np.empty_like(x), writes=(2,))
        assert_agree(native, f"add_{codec}", scales, codes, noise / np.float32(4), writes=(2,))
        assert_agree(native, f"subtract_{codec}", scales, codes, noise / np.float32(4), writes=(2,))
        for by in (3.0, 4.0):
            assert_settled_alike(native, codec, (scales, codes), by, noise)


def assert_settled_alike(native: Any, codec: str, row: tuple[Any, Any], by: float, error: Any) -> None:
    """Three equal rows; where a sum is not finite, the rest means nothing."""
    here, there = ([np.zeros_like(error), *map(np.zeros_like, row)] for _ in range(2))
    with np.errstate(all="ignore"):
        bad = getattr(numpy_backend, f"settle_{codec}")([row] * 3, by, error, *there)
    assert getattr(native, f"settle_{codec}")([row] * 3, by, error, *here) == bad
    if bad < 0:
        assert_same(tuple(here), tuple(there))


@pytest.mark.parametrize("codec", FEW_BITS)
def test_what_overflows_at_the_owner_is_reported(native: Any, codec: str) -> None:
    count, border = 70_001, 40_064  # where a group of either size begins
    form, huge = FEW_BITS[codec], np.full(count, HUGE, np.float32)
    scales = np.empty(-(-count // form.group), np.uint16)
    codes = np.empty(count // form.group * form.nbytes + min(count % form.group, form.nbytes), np.uint8)
    getattr(numpy_backend, f"encode_{codec}")(np.where(np.arange(count) < border, np.float32(1), huge), scales, codes)
    out = (np.empty(count, np.float32), np.zeros_like(scales), np.zeros_like(codes))
    with np.errstate(all="ignore"):
        for kernels in (native, numpy_backend):
            bad = getattr(kernels, f"settle_{codec}")([(scales, codes)] * 2, 1.0, np.zeros(count, np.float32), *out)
            assert bad == border


@pytest.mark.parametrize("nbytes", [0, 1, 2, 8191, 8192, 8193, 40_001])
def test_fletcher32(native: Any, nbytes: int) -> None:
    """Compared with the checksum's definition: two one's-complement sums of big-endian words, with 65535 for 0."""
    rng = np.random.default_rng(nbytes)
    for low, high in ((0, 1), (255, 256), (0, 256)):
        data = rng.integers(low, high, nbytes, dtype=np.uint8)
        one = two = 0
        for at in range(0, nbytes, 2):
            one += int.from_bytes(data[at : at + 2].tobytes().ljust(2, b"\0"))
            two += one
        folded = [(total - 1) % 65535 + 1 if total else 0 for total in (two, one)]
        assert native.fletcher32(data) == numpy_backend.fletcher32(data) == folded[0] << 16 | folded[1]


def test_indices_beyond_2_24(native: Any) -> None:
    """Odd indices beyond 2^24 are not exact in float32; selecting, compressing, sending and publishing must keep them."""
    n, row = 2**24 + 1000, 65_536
    acc = np.zeros(n, dtype=np.float32)
    expected = np.array([5, 2**24 - 1, 2**24, 2**24 + 1, 2**24 + 3, 2**24 + 997, n - 1])
    acc[expected] = np.arange(1, 8)
    index, magnitude, bad = native.select(acc, 3, n, 0.5)
    assert (index.tolist(), magnitude.tolist(), bad) == (expected.tolist(), [1, 2, 3, 4, 5, 6, 7], -1)
    counts, columns = native.compress_rows(index, magnitude, 2.0, 3, row, -(-(n - 3) // row))
    union = np.empty(6, dtype=np.int64)
    assert native.expand_rows(counts, columns, 3, row, union)
    assert union.tolist() == expected[1:].tolist()
    moved = np.empty(6, dtype=np.float32)
    native.take(acc, union, moved)
    assert moved.tolist() == [2, 3, 4, 5, 6, 7]
    assert np.flatnonzero(acc).tolist() == [5]
    native.add_at(acc, union, moved)
    native.publish_at(acc.ctypes.data, FP32, n, union[3:], np.full(3, -9, dtype=np.float32))
    assert np.flatnonzero(acc).tolist() == expected.tolist()
    assert acc[expected].tolist() == [1, 2, 3, 4, -9, -9, -9]
    native.zero_at(acc.ctypes.data, FP32, n, union[:1])
    native.put(acc, union[1:2], np.array([8], dtype=np.float32))
    assert acc[expected].tolist() == [1, 0, 8, 4, -9, -9, -9]


CHUNK = 4096
LENGTHS = (0, 1, 65, CHUNK, CHUNK + 63, 3 * CHUNK + 2049, SPLIT)


def quarters(rng: np.random.Generator, n: int) -> Any:
    """Values whose sums are finite, three or four of them."""
    return np.float32(0.25) * np.clip(values(rng, n, nonfinite=False), -6e4, 6e4)


def payload_of(codec: str, borders: list[int]) -> Any:
    """Room for the payloads of all chunks between borders, filled with what must be overwritten."""
    form, lengths = FEW_BITS[codec], [hi - lo for lo, hi in pairwise(borders)]
    sizes = [n // CHUNK * places_of(form, CHUNK).end + places_of(form, n % CHUNK).end for n in lengths]
    return np.full(sum(sizes), 0xAA, dtype=np.uint8)


@pytest.mark.parametrize("codec", FEW_BITS)
@pytest.mark.parametrize("n", LENGTHS)
def test_chunks_of_few_bits(native: Any, codec: str, n: int) -> None:
    rng = np.random.default_rng(n)
    cuts = sorted(rng.integers(0, n + 1, 3).tolist())
    flat, _alive = gradients(quarters(rng, n), cuts, [FP32, FP16, None, BF16])
    borders, acc = [0, n // 3, n], quarters(rng, n)
    added = (codec, acc, *flat, np.array(borders), CHUNK, payload_of(codec, borders))
    assert_agree(native, "accumulate_chunks", *added, writes=(1, 7))
    rows = [payload_of(codec, [0, n]) for _ in range(3)]
    none = np.zeros(1, np.uint64), np.array([n]), np.zeros(1, np.uint8)
    for row in rows:
        assert native.accumulate_chunks(codec, quarters(rng, n), *none, np.array([0, n]), CHUNK, row) == -1
    error = quarters(rng, n)
    settled = (codec, rows, CHUNK, 3.0, error, np.empty(n, np.float32), payload_of(codec, [0, n]))
    assert_agree(native, "settle_chunks", *settled, writes=(5, 6))
    assert_agree(native, "decode_chunks", codec, rows[0], CHUNK, np.empty(n, np.float32), writes=(3,))


@pytest.mark.parametrize("codec", FEW_BITS)
def test_chunks_have_the_bits_of_their_payloads(native: Any, codec: str) -> None:
    n = 2 * CHUNK + 100
    rng = np.random.default_rng(n)
    acc, grad = quarters(rng, n), quarters(rng, n)
    flat, _alive = gradients(grad, [], [FP32])
    left, payload = acc.copy(), payload_of(codec, [0, n])
    assert native.accumulate_chunks(codec, left, *flat, np.array([0, n]), CHUNK, payload) == -1
    plain, at, form = acc + grad, 0, CODECS[codec]
    for start in range(0, n, CHUNK):
        part = plain[start : start + CHUNK]
        whole, size = part.copy(), form.nbytes(len(part))
        alone = np.empty(size, np.uint8)
        form.encode(native_kernels(native), part, alone)
        assert_same(payload[at : at + size], alone)
        form.decode(native_kernels(native), alone, whole)
        out = np.empty(len(part), np.float32)
        native.decode_chunks(codec, payload[at : at + size], CHUNK, out)
        assert_same(out, whole)
        at += size
    assert at == len(payload)
    assert_same(left, plain)


def native_kernels(native: Any) -> Any:
    """What codecs call of the native kernels on the instruction set that a test chose."""
    return SimpleNamespace(view_as=np.ndarray.view, **{name: getattr(native, name) for name in KERNELS})


@pytest.mark.parametrize("at", [0, CHUNK - 1, CHUNK, 2 * CHUNK + 77])
def test_chunks_tell_the_first_nonfinite_index(native: Any, at: int) -> None:
    n = 2 * CHUNK + 100
    grad = np.ones(n, np.float32)
    grad[[at, n - 1]] = np.inf, np.nan
    flat, _alive = gradients(grad, [70], [FP32, FP32])
    payload, borders = payload_of("int4", [0, n // 2, n]), np.array([0, n // 2, n])
    for backend in (native, numpy_backend):
        assert backend.accumulate_chunks("int4", np.zeros(n, np.float32), *flat, borders, CHUNK, payload) == at
        row, out = payload_of("int4", [0, n]), np.empty(n, np.float32)
        row[:] = 0
        assert backend.settle_chunks("int4", [row], CHUNK, 1.0, grad, out, payload_of("int4", [0, n])) == at


def test_decoding_past_the_caches_gives_the_same_bits(native: Any) -> None:
    n = (1 << 22) + 4096 + 5
    acc, payload = np.resize(values(np.random.default_rng(2), 4099, nonfinite=False), n), payload_of("int2", [0, n])
    none = np.zeros(1, np.uint64), np.array([n]), np.zeros(1, np.uint8)
    assert native.accumulate_chunks("int2", acc, *none, np.array([0, n]), CHUNK, payload) == -1
    room = np.empty(n + 1, np.float32)
    for shift in (0, 1):  # aligned to what is written at once, and not
        out = room[shift : shift + n]
        out[:] = np.nan
        native.decode_chunks("int2", payload, CHUNK, out)
        expected = np.empty(n, np.float32)
        numpy_backend.decode_chunks("int2", payload, CHUNK, expected)
        assert_same(out, expected)


def test_payloads_that_do_not_fit_are_refused(native: Any) -> None:
    x, none = np.zeros(100, np.float32), (np.zeros(1, np.uint64), np.array([100]), np.zeros(1, np.uint8))
    room, short = payload_of("int4", [0, 100]), payload_of("int4", [0, 64])
    with pytest.raises(ValueError, match="does not fit the number of values"):
        native.decode_chunks("int4", short, CHUNK, x)
    with pytest.raises(ValueError, match="a multiple of 2048"):
        native.decode_chunks("int4", room, 100, x)
    with pytest.raises(ValueError, match="no codec of few bits named int8"):
        native.decode_chunks("int8", room, CHUNK, x)
    with pytest.raises(ValueError, match="the error does not fit"):
        native.settle_chunks("int4", [room], CHUNK, 1.0, x[1:], x, room.copy())
    with pytest.raises(ValueError, match="borders and payload do not fit"):
        native.accumulate_chunks("int4", x, *none, np.array([0, 64]), CHUNK, short)
