"""Indices, coded and as compressed rows: they decode unchanged, and a damaged message is detected."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mpisparse.backends import device
from mpisparse.backends.gaps import most_nbytes
from mpisparse.comm.agreement import FINE, NONFINITE, Notice, StepRefused
from mpisparse.comm.regions import Region, spans_of
from mpisparse.select.candidates import Candidates
from mpisparse.wire.indices import ROW, unite
from mpisparse.wire.stretches import pack, unpack

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]


@pytest.fixture(scope="module", params=["numpy", "native"])
def backend(request: pytest.FixtureRequest) -> Any:
    if request.param == "native":
        pytest.importorskip("mpisparse._cpu", exc_type=ImportError)
    return device.load_backend(request.param)


def found(index: Ints, magnitude: float = 1.0) -> Candidates:
    return Candidates(index, np.full(len(index), magnitude, dtype=np.float32))


class Sent(Exception):  # noqa: N818 - ends a rank's part once its payload is known
    pass


@dataclass
class Wire:
    """One rank of an all-gather, with known payloads or recording them."""

    rank: int
    payloads: list[Bytes] | None = None
    sizes: list[int] = field(default_factory=list)
    nbytes_control: int = 0

    def allgather(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        sizes = self.sizes if self.payloads is None else list(map(len, self.payloads))
        return np.array(sizes, dtype=np.int64)[:, None]

    def allgatherv(self, payload: Bytes, counts: list[int], places: list[int]) -> Bytes:
        assert len(payload) == counts[self.rank]
        if self.payloads is None:
            raise Sent(payload.copy())
        gathered = np.full(sum(counts), 0xAA, dtype=np.uint8)
        for sent, count, place in zip(self.payloads, counts, places, strict=True):
            gathered[place : place + count] = sent
        return gathered


def send(
    backend: Any, selected: list[Candidates], regions: list[Region], workloads: list[int], threshold: float
) -> list[Bytes]:
    """Return the payload of every rank."""
    owned = {r.rank: r for r in regions}
    chosen = [mine.reaching(threshold).index for mine in selected]
    sizes = [len(backend.encode_indices(index, owned[rank].lo, owned[rank].hi)) for rank, index in enumerate(chosen)]
    payloads = []
    for rank, mine in enumerate(selected):
        with pytest.raises(Sent) as sent:
            unite(Wire(rank, sizes=sizes), backend, *mine[:2], threshold, regions, workloads)  # type: ignore[arg-type]
        payloads.append(sent.value.args[0])
    return payloads


def compress(backend: Any, index: Ints, lo: int, hi: int) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    rows = -(-(hi - lo) // ROW)
    counts, columns = backend.compress_rows(index, np.ones(len(index), dtype=np.float32), 0.5, lo, ROW, rows)
    assert (counts.dtype, columns.dtype, len(counts)) == (np.uint32, np.uint16, rows)
    return counts, columns


@given(lo=st.integers(0, 2**40), offsets=st.sets(st.integers(0, 5 * ROW - 1), max_size=60), spare=st.integers(1, ROW))
def test_round_trip(backend: Any, lo: int, offsets: set[int], spare: int) -> None:
    index = np.array(sorted(offsets), dtype=np.int64) + lo
    counts, columns = compress(backend, index, lo, lo + max(offsets, default=0) + spare)
    assert counts.sum() == len(columns) == len(index)
    out = np.full(len(index), -1, dtype=np.int64)
    assert backend.expand_rows(counts, columns, lo, ROW, out)
    np.testing.assert_array_equal(out, index)


@pytest.mark.parametrize("lo", [0, 1, ROW - 1, ROW, 2**33 + 5])
def test_row_borders(backend: Any, lo: int) -> None:
    """The last column of a row and the first of the next, counted from the region's start."""
    offsets = np.array([0, ROW - 2, ROW - 1, ROW, ROW + 1, 3 * ROW - 1, 3 * ROW])
    counts, columns = compress(backend, offsets + lo, lo, lo + 3 * ROW + 1)
    assert counts.tolist() == [3, 2, 1, 1]
    assert columns.tolist() == [0, ROW - 2, ROW - 1, 0, 1, ROW - 1, 0]
    out = np.empty(7, dtype=np.int64)
    assert backend.expand_rows(counts, columns, lo, ROW, out)
    assert out.tolist() == (offsets + lo).tolist()


def test_full_rows(backend: Any) -> None:
    """A row may hold all of its 65,536 elements, one more than a uint16 counts."""
    index = np.arange(7, 7 + 2 * ROW)
    counts, columns = compress(backend, index, 7, 7 + 2 * ROW)
    assert counts.tolist() == [ROW, ROW]
    out = np.empty(2 * ROW, dtype=np.int64)
    assert backend.expand_rows(counts, columns, 7, ROW, out)
    np.testing.assert_array_equal(out, index)


@pytest.mark.parametrize("damaged", [[1, 1], [2, 3], [0, 0], [4, 0], [2**32 - 1, 4], [5, 2**32 - 2]])
def test_damaged_counts(backend: Any, damaged: list[int]) -> None:
    """Counts that do not add up to the announced number, also those that would in 32 bits."""
    out = np.empty(3, dtype=np.int64)
    columns = np.array([1, 2, 3], dtype=np.uint16)
    assert not backend.expand_rows(np.array(damaged, dtype=np.uint32), columns, 0, ROW, out)
    assert backend.expand_rows(np.array([1, 2], dtype=np.uint32), columns, 0, ROW, out)
    assert not backend.expand_rows(np.array([1, 2], dtype=np.uint32), columns[:2], 0, ROW, out)


def split(n: int, size: int, step: int) -> list[Region]:
    """Return uneven regions in ascending order, the last one empty, with the owners of a later step."""
    bounds = [p * p * n // (size - 1) ** 2 for p in range(size)] + [n]
    return [Region((p - step) % size, bounds[p], bounds[p + 1]) for p in range(size)]


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("n", [5, 1000, 5 * ROW + 3])
def test_unite(backend: Any, n: int, step: int) -> None:
    """Three ranks with candidates below and above the threshold get the same sorted union and their own span."""
    rng = np.random.default_rng(n)
    chosen = np.sort(rng.permutation(n)[: max(3, n // 10)])
    magnitude = (0.5 + rng.random(len(chosen))).astype(np.float32)
    regions = split(n, 3, step)
    selected: list[Candidates] = [found(chosen[:0])] * 3
    for region in regions:
        inside = (chosen >= region.lo) & (chosen < region.hi)
        selected[region.rank] = Candidates(chosen[inside], magnitude[inside])
    union = chosen[magnitude >= 1]
    workloads = [int((mine.magnitude >= 1).sum()) for mine in selected]
    payloads = send(backend, selected, regions, workloads, 1.0)
    for region in regions:
        rows = -(-(region.hi - region.lo) // ROW)
        assert len(payloads[region.rank]) <= 4 * rows + 2 * workloads[region.rank]
    for rank, mine in enumerate(selected):
        got, tags, form, nbytes = unite(Wire(rank, payloads), backend, *mine[:2], 1.0, regions, workloads)  # type: ignore[arg-type]
        assert tags is None
        assert form == ("coded" if n > 100_000 else "padded")
        assert nbytes == sum(map(len, payloads)) - len(payloads[rank])
        spans = spans_of(backend.search, got, regions)
        np.testing.assert_array_equal(got, union)
        for region in regions:
            start, stop = spans[region.rank]
            np.testing.assert_array_equal(got[start:stop], union[(union >= region.lo) & (union < region.hi)])


def test_tags_travel_with_what_is_selected(backend: Any) -> None:
    """One byte per selected element follows the columns; ranks may have different counts."""
    n = 3 * ROW + 11
    regions = split(n, 2, 1)
    tags = [np.random.default_rng(rank).integers(0, 255, n).astype(np.uint8) for rank in range(2)]
    selected = [found(np.arange(r.lo, r.hi, 997)) for r in sorted(regions, key=lambda r: r.rank)]
    workloads = [len(mine.index) for mine in selected]
    payloads = []
    for rank, mine in enumerate(selected):
        with pytest.raises(Sent) as sent:
            unite(Wire(rank), backend, *mine[:2], 0.5, regions, workloads, tags[rank])  # type: ignore[arg-type]
        payloads.append(sent.value.args[0])
    for rank, mine in enumerate(selected):
        union, arrived, _, _ = unite(Wire(rank, payloads), backend, *mine[:2], 0.5, regions, workloads, tags[rank])  # type: ignore[arg-type]
        owner = np.concatenate([np.full(workloads[r.rank], r.rank) for r in regions])
        np.testing.assert_array_equal(arrived, np.stack(tags)[owner, union])


def test_unite_reports_the_damaged_rank(backend: Any) -> None:
    regions = [Region(1, 0, 100), Region(0, 100, 200)]
    selected = [found(np.array([150])), found(np.array([3, 7]))]
    payloads = send(backend, selected, regions, [1, 2], 0.5)
    payloads[1][0] += 1
    with pytest.raises(RuntimeError, match=r"^r0 \| the indices of rank 1 do not decode"):
        unite(Wire(0, payloads), backend, *selected[0][:2], 0.5, regions, [1, 2])  # type: ignore[arg-type]


def test_unite_reports_damaged_sizes(backend: Any) -> None:
    """A size beyond the bound is no size; and a code must fill its size."""
    n = 500_000
    regions, chosen = [Region(0, 0, n), Region(1, n, 2 * n)], np.arange(0, n, 37)
    selected = [found(chosen), found(chosen + n)]
    workloads = [len(chosen)] * 2
    payloads = send(backend, selected, regions, workloads, 0.5)
    for size, words in ((20_000, "the sizes of indices are"), (len(payloads[1]) + 1, "the indices of rank 1 do not decode")):
        longer = np.zeros(size, dtype=np.uint8)
        longer[: len(payloads[1])] = payloads[1][:size]
        with pytest.raises(RuntimeError, match=words):
            unite(Wire(0, [payloads[0], longer]), backend, *selected[0][:2], 0.5, regions, workloads)  # type: ignore[arg-type]


def test_a_status_travels_with_the_indices(backend: Any) -> None:
    """All ranks learn which one cannot go on; it takes nothing from the indices and the tags."""
    regions = [Region(1, 0, 100), Region(0, 100, 200)]
    selected, tags = [found(np.array([150])), found(np.array([3, 7]))], np.arange(200, dtype=np.uint8)
    for status in (FINE, NONFINITE):
        news = [Notice(3, np.zeros(0, dtype=bool)), Notice(3, np.zeros(0, dtype=bool), status, 17)]
        payloads = []
        for rank, mine in enumerate(selected):
            with pytest.raises(Sent) as sent:
                unite(Wire(rank), backend, *mine[:2], 0.5, regions, [1, 2], tags, news[rank])  # type: ignore[arg-type]
            payloads.append(sent.value.args[0])
        for rank, mine in enumerate(selected):
            given = (Wire(rank, payloads), backend, *mine[:2], 0.5, regions, [1, 2], tags, news[rank])
            if status == FINE:
                union, arrived, *_ = unite(*given)  # type: ignore[arg-type]
                assert union.tolist() == arrived.tolist() == [3, 7, 150]
            else:
                with pytest.raises(StepRefused) as refused:
                    unite(*given)  # type: ignore[arg-type]
                assert refused.value.statuses == [(FINE, 0), (NONFINITE, 17)]


# The code


def decoded(backend: Any, payload: Bytes, lo: int, hi: int, count: int) -> tuple[int, Ints]:
    out = np.full(count, -1, dtype=np.int64)
    return backend.decode_indices(payload, lo, hi, out), out


def check_code(backend: Any, index: Ints, lo: int, hi: int) -> int:
    """Return the bytes of an index that decodes unchanged, whatever follows it."""
    payload = backend.encode_indices(index, lo, hi)
    for follows in ([], [0] * 9, [255] * 9):
        used, out = decoded(backend, np.append(payload, np.array(follows, dtype=np.uint8)), lo, hi, len(index))
        assert used == len(payload)
        np.testing.assert_array_equal(out, index)
    assert len(payload) <= most_nbytes(len(index), hi - lo) <= 2 * len(index) + 4 * -(-(hi - lo) // ROW)
    return len(payload)


@given(lo=st.integers(0, 2**40), offsets=st.sets(st.integers(0, 2**34), max_size=60), spare=st.integers(1, ROW))
def test_code_round_trip(backend: Any, lo: int, offsets: set[int], spare: int) -> None:
    check_code(backend, np.array(sorted(offsets), dtype=np.int64) + lo, lo, lo + max(offsets, default=0) + spare)


@given(st.lists(st.sampled_from([1, 2, 3, 100, 129, 5000, 70_000, 10**6, 10**9]), max_size=400), st.integers(1, 300))
def test_code_of_uneven_gaps(backend: Any, gaps: list[int], spare: int) -> None:
    index = np.cumsum([7, *gaps])
    check_code(backend, index, 3, int(index[-1]) + spare)


@pytest.mark.parametrize("count", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize("length", [1000, ROW, 2**24 + 1, 2**33])
def test_code_of_everything_and_evenly(backend: Any, count: int, length: int) -> None:
    check_code(backend, np.arange(count), 0, count)
    check_code(backend, np.arange(5, 5 + count), 5, 5 + length)
    check_code(backend, np.arange(length - count, length), 0, length)
    check_code(backend, np.linspace(0, length - 1, count, dtype=np.int64), 0, length)


@pytest.mark.parametrize(("density", "bits"), [(0.1, 4.9), (0.01, 8.4), (0.001, 11.8), (0.0001, 15.2)])
def test_bits_of_random_positions(density: float, bits: float) -> None:
    backend = device.load_backend()
    n = 10_000_000
    index = np.flatnonzero(np.random.default_rng(3).random(n) < density)
    assert 8 * check_code(backend, index, 0, n) <= bits * len(index)


def test_clustered_positions_take_fewer_bits(backend: Any) -> None:
    """Groups of gaps have their own parameter, and a jump between clusters costs only itself."""
    rng = np.random.default_rng(5)
    starts = np.sort(rng.integers(0, 2**26, 50)) // 1000 * 1000
    index = np.unique(starts[:, None] + np.sort(rng.permutation(900)[:100]))
    plain = most_nbytes(len(index), 2**26)
    assert check_code(backend, index, 0, 2**26) < 0.4 * plain


@given(data=st.binary(max_size=200), count=st.integers(1, 400), length=st.sampled_from([1, 400, 70_000, 2**34]))
def test_any_bytes_decode_to_indices_of_the_region_or_not_at_all(data: bytes, count: int, length: int) -> None:
    """No read behind the end; the backends agree on what is damaged."""
    answers = []
    for name in ("numpy", "native"):
        backend = device.load_backend(name)
        used, out = decoded(backend, np.frombuffer(data, dtype=np.uint8).copy(), 10, 10 + length, count)
        assert used <= len(data)
        if used >= 0:
            assert out[0] >= 10
            assert out[-1] < 10 + length
            assert (np.diff(out) > 0).all()
        answers.append((used, out.tolist() if used >= 0 else []))
    assert answers[0] == answers[1]


@given(st.integers(0, 10**6), st.integers(0, 2**32))
def test_a_damaged_code_is_detected_or_stays_in_the_region(at: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    index = np.sort(rng.permutation(30_000)[: 1 + seed % 700]) + 100
    answers = []
    for name in ("numpy", "native"):
        backend = device.load_backend(name)
        payload = backend.encode_indices(index, 100, 30_100).copy()
        payload[at % len(payload)] ^= 1 << at % 8
        used, out = decoded(backend, payload[: len(payload) - at % 3], 100, 30_100, len(index))
        answers.append((used, out.tolist() if used >= 0 else []))
        if used >= 0:
            assert 100 <= out.min() <= out.max() < 30_100
    assert answers[0] == answers[1]


def test_golden_payload(backend: Any) -> None:
    """The wire format: gaps 0, 0, 65533, 0, 4 of 5 indices in 65,556 elements have 13 low bits and quotients up to 7."""
    regions = [Region(0, 10, 10 + ROW + 20)]
    selected = [found(np.array([10, 11, 10 + ROW - 1, 10 + ROW, 10 + ROW + 5]))]
    (payload,) = send(backend, selected, regions, [5], 0.5)
    assert payload.tobytes().hex(" ", 4) == "000000 00f47f00 4000061c"


# Stretches


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 200)), max_size=12), st.integers(0, 2**33))
def test_stretches(backend: Any, runs: list[tuple[int, int]], lo: int) -> None:
    """Runs of neighbours, (gap, length) each, come back; what follows is not touched."""
    index, at = [], lo
    for gap, length in runs:
        index.extend(range(at + gap, at + gap + length))
        at += gap + length
    sent = np.array(index, dtype=np.int64)
    payload = pack(backend, sent, lo, at + 1)
    got, used = unpack(backend, np.append(payload, np.full(5, 255, dtype=np.uint8)), lo, at + 1, len(sent))
    assert used == len(payload)
    np.testing.assert_array_equal(got, sent)
    assert len(payload) <= 8 + 2 * len(sent) + 8 * len(runs)


@given(st.binary(max_size=60), st.integers(1, 500))
def test_damaged_stretches(backend: Any, data: bytes, count: int) -> None:
    with contextlib.suppress(RuntimeError):
        index, used = unpack(backend, np.frombuffer(data, dtype=np.uint8).copy(), 5, 5000, count)
        assert len(index) == count
        assert used <= len(data)
        assert 5 <= index[0] <= index[-1] < 5000
