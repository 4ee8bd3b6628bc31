"""Indices as compressed rows: they decode unchanged, and a damaged message is detected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mpisparse.backends import device
from mpisparse.comm.regions import Region, spans_of
from mpisparse.select.candidates import Candidates
from mpisparse.wire.indices import ROW, unite

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
    payloads = []
    for rank, mine in enumerate(selected):
        with pytest.raises(Sent) as sent:
            unite(Wire(rank), backend, *mine[:2], threshold, regions, workloads)  # type: ignore[arg-type]
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
    chosen = np.sort(rng.permutation(n)[: max(3, n // 50)])
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
        assert len(payloads[region.rank]) == 4 * rows + 4 * -(-workloads[region.rank] // 2)
    for rank, mine in enumerate(selected):
        got, tags = unite(Wire(rank, payloads), backend, *mine[:2], 1.0, regions, workloads)  # type: ignore[arg-type]
        assert tags is None
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
        union, arrived = unite(Wire(rank, payloads), backend, *mine[:2], 0.5, regions, workloads, tags[rank])  # type: ignore[arg-type]
        owner = np.concatenate([np.full(workloads[r.rank], r.rank) for r in regions])
        np.testing.assert_array_equal(arrived, np.stack(tags)[owner, union])


def test_unite_reports_the_damaged_rank(backend: Any) -> None:
    regions = [Region(1, 0, 100), Region(0, 100, 200)]
    selected = [found(np.array([150])), found(np.array([3, 7]))]
    payloads = send(backend, selected, regions, [1, 2], 0.5)
    payloads[1][0] += 1
    with pytest.raises(RuntimeError, match=r"^r0 \| the rows of rank 1 do not add up"):
        unite(Wire(0, payloads), backend, *selected[0][:2], 0.5, regions, [1, 2])  # type: ignore[arg-type]


def test_golden_payload(backend: Any) -> None:
    """The wire format: four bytes per row and two per column, padded with zeros to four."""
    regions = [Region(0, 10, 10 + ROW + 20)]
    selected = [found(np.array([10, 11, 10 + ROW - 1, 10 + ROW, 10 + ROW + 5]))]
    (payload,) = send(backend, selected, regions, [5], 0.5)
    assert payload.tobytes().hex(" ", 4) == "03000000 02000000 00000100 ffff0000 05000000"
