"""Blocks, borders and owners: they cover everything, "best" is optimal, and "paper" follows the paper's rules."""

from __future__ import annotations

from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mpisparse.select import partition

Ints = NDArray[np.int64]


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


def assert_covers(edges: Ints, n: int) -> None:
    """Assert edges from 0 to n, strictly ascending (except for an empty vector's single block)."""
    assert edges.dtype == np.int64
    assert (edges[0], edges[-1]) == (0, n)
    assert len(edges) >= 2
    assert n == 0 or (np.diff(edges) > 0).all()


def assert_borders(borders: Ints, blocks: int, size: int) -> None:
    assert len(borders) == size + 1
    assert (borders[0], borders[-1]) == (0, blocks)
    assert (np.diff(borders) >= 0).all()


@given(n=st.integers(0, 5000), blocks=st.integers(1, 3000))
def test_even_edges(n: int, blocks: int) -> None:
    edges = partition.even_edges(n, blocks)
    assert_covers(edges, n)
    assert len(edges) - 1 == max(1, min(n, blocks))
    assert np.ptp(np.diff(edges)) <= 1


def test_even_edges_of_many_elements() -> None:
    """Products of element and block counts beyond 2^63 stay exact."""
    edges = partition.even_edges(2**60, 1024)
    assert edges.tolist() == [i * 2**50 for i in range(1025)]


@pytest.mark.parametrize(
    ("n", "blocks", "length", "last"),
    [
        (1024 * 1000, 1024, 992, 992 + 1024 * 8),  # 1000 rounded down to a multiple of 32, the remainder in the last
        (1024 * 32, 1024, 32, 32),
        (1024 * 32 - 1, 1024, 31, 31 + 1023),  # shorter than 32: not rounded, where the published code gets blocks of 0
        (10_000_000, 1024, 9760, 15_520),
        (100, 1024, 1, 1),
        (1, 1024, 1, 1),
        (1000, 4, 224, 328),
    ],
)
def test_paper_edges(n: int, blocks: int, length: int, last: int) -> None:
    edges = partition.paper_edges(n, blocks)
    assert_covers(edges, n)
    assert len(edges) - 1 == min(n, blocks)
    assert np.diff(edges)[:-1].tolist() == [length] * (min(n, blocks) - 1)
    assert edges[-1] - edges[-2] == last


@given(
    n=st.integers(1, 3000),
    blocks=st.integers(1, 300),
    share=st.floats(0, 1),
    seed=st.integers(0, 9),
)
def test_worked_edges(n: int, blocks: int, share: float, seed: int) -> None:
    """No block is longer than twice an even one, and none holds more than its share of the union."""
    selected = np.sort(np.random.default_rng(seed).permutation(n)[: int(share * n)])
    bounds = np.array([0, n // 3, n])
    edges = partition.worked_edges(n, blocks, selected, bounds)
    assert_covers(edges, n)
    assert np.diff(edges).max() <= -(-n // min(n, blocks - blocks // 2))
    assert partition.block_counts(selected, edges).max() <= max(1, len(selected) // max(1, blocks // 2))
    assert len(edges) - 1 <= 2 * blocks + 2
    assert np.isin(bounds, edges).all()


def test_worked_edges_follow_the_work() -> None:
    assert partition.worked_edges(100, 4, ints(80, 81, 82, 83), ints(0, 70, 100)).tolist() == [0, 50, 70, 81, 83, 100]
    assert partition.worked_edges(100, 4, ints(), ints(0, 50, 100)).tolist() == [0, 50, 100]


@pytest.mark.parametrize(
    ("size", "blocks"), [(1, 1024), (4, 1024), (5, 1280), (64, 16_384), (1000, 16_384), (20_000, 20_000)]
)
def test_default_blocks(size: int, blocks: int) -> None:
    assert partition.default_blocks(size) == blocks


@pytest.mark.parametrize(
    ("weights", "shares"),
    [([1, 1, 1], [20, 20, 20]), ([1, 2, 2], [30, 15, 15]), ([2, 1, 1], [12, 24, 24]), ([0, 7, 7], [47, 6, 6])],
    ids=str,
)
def test_a_part_that_weighs_more_is_shorter(weights: list[int], shares: list[int]) -> None:
    """Work is uniform: a part's length is inverse to its weight, at most four times that of mean weight."""
    work, edges = np.ones(60, dtype=np.int64), np.arange(61)
    borders = partition.best_borders([work] * 3, edges, weights=weights)
    assert borders[-1] == 60
    assert np.abs(np.diff(borders) - shares).max() <= 1


def test_parts_that_all_weigh_little_or_much_still_cover_everything() -> None:
    work, edges = np.arange(50, dtype=np.int64), np.arange(51)
    for weights in ([1, 10**9], [10**9, 1], [0, 0], [5, 5]):
        assert partition.best_borders([work] * 2, edges, weights=weights)[-1] == 50


@given(blocks=st.integers(0, 2000), size=st.integers(1, 70))
def test_even_borders(blocks: int, size: int) -> None:
    borders = partition.even_borders(blocks, size)
    assert_borders(borders, blocks, size)
    assert np.ptp(np.diff(borders)) <= 1


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_owners_rotate(size: int) -> None:
    """Every step assigns one rank per partition; over any `size` steps each rank visits each partition once."""
    for step in range(2 * size):
        mine = [partition.partition_of(rank, step, size) for rank in range(size)]
        assert sorted(mine) == list(range(size))
        assert [partition.owner(p, step, size) for p in mine] == list(range(size))
        assert mine == [(step + rank) % size for rank in range(size)]
    for rank in range(size):
        assert {partition.partition_of(rank, step, size) for step in range(5, 5 + size)} == set(range(size))


def test_block_counts() -> None:
    edges = ints(0, 3, 3, 10, 20)
    assert partition.block_counts(ints(0, 2, 3, 9, 10, 19), edges).tolist() == [2, 0, 2, 2]
    assert partition.block_counts(ints(), edges).tolist() == [0, 0, 0, 0]


def heaviest(work: list[Ints], borders: Ints | tuple[int, ...]) -> int:
    return max(int(w[a:b].sum()) for w, a, b in zip(work, borders[:-1], borders[1:], strict=True))


def cheapest(work: list[Ints], edges: Ints, limit: int) -> int:
    """Return the smallest possible maximum load over all borders with parts up to `limit`, by brute force."""
    size, blocks = len(work), len(edges) - 1
    tried = ((0, *inner, blocks) for inner in combinations_with_replacement(range(blocks + 1), size - 1))
    return min(heaviest(work, borders) for borders in tried if np.diff(edges[list(borders)]).max() <= limit)


small_work = st.integers(1, 4).flatmap(
    lambda size: st.integers(1, 7).flatmap(
        lambda blocks: st.lists(st.lists(st.integers(0, 9), min_size=blocks, max_size=blocks), min_size=size, max_size=size)
    )
)


@given(rows=small_work, lengths=st.lists(st.integers(1, 5), min_size=7, max_size=7), longest=st.none() | st.integers(1, 30))
def test_best_borders_are_optimal(rows: list[list[int]], lengths: list[int], longest: int | None) -> None:
    work = [ints(*row) for row in rows]
    size, blocks = len(work), len(rows[0])
    edges = np.cumsum(ints(0, *lengths[:blocks]))
    borders = partition.best_borders(work, edges, longest)
    assert_borders(borders, blocks, size)
    n = int(edges[-1])
    always_met = -(-n // size) + int(np.diff(edges).max())
    limit = n if longest is None else max(longest, always_met)
    assert heaviest(work, borders) == cheapest(work, edges, limit)
    assert np.diff(edges[borders]).max() <= limit


def test_best_borders_by_hand() -> None:
    edges = ints(0, 1, 2, 3, 4)
    same = ints(1, 1, 1, 3)
    assert partition.best_borders([same, same], edges).tolist() == [0, 3, 4]
    assert partition.best_borders([ints(4, 4, 4, 4), ints(1, 1, 1, 1)], edges).tolist() == [0, 1, 4]
    assert partition.best_borders([ints(0, 0, 0, 1)] * 2, edges, longest=1).tolist() == [0, 3, 4]
    free, dear = ints(0, 0, 0), ints(9, 9, 9)
    assert partition.best_borders([free, dear], edges[:4], longest=1).tolist() == [0, 3, 3]  # at most 2 + 1 elements


def test_best_borders_without_work_respect_the_longest() -> None:
    """With 18 elements on 2 ranks a part has at most 9 + 5, even if there is nothing to balance."""
    edges = ints(0, 5, 10, 15, 16, 17, 18)
    borders = partition.best_borders([ints(0, 0, 0, 0, 0, 0)] * 2, edges, longest=9)
    assert np.diff(edges[borders]).max() <= 14


@pytest.mark.parametrize("size", [1, 2, 3, 9])
@pytest.mark.parametrize("blocks", [1, 2, 8])
@pytest.mark.parametrize("longest", [None, 1, 100])
def test_best_borders_of_anything(size: int, blocks: int, longest: int | None) -> None:
    """Borders are optimal also with no work, all of it in one block, or more than 2^32 of it."""
    edges = partition.even_edges(10 * blocks, blocks)
    lone = np.eye(1, blocks, blocks - 1, dtype=np.int64)[0]
    for work in (0 * lone, lone, lone << 40, np.full(blocks, 1 << 40)):
        borders = partition.best_borders([work] * size, edges, longest)
        assert_borders(borders, blocks, size)
        assert heaviest([work] * size, borders) == int(work.max()) * (-(-blocks // size) if work.min() else 1)


@given(seed=st.integers(0, 1000), size=st.integers(2, 9))
def test_best_borders_respect_the_longest(seed: int, size: int) -> None:
    """With twice the mean length allowed, as the selector sets it, no region is longer."""
    rng = np.random.default_rng(seed)
    edges = partition.even_edges(10_000, 256)
    work = (rng.pareto(1, 256) * 100).astype(np.int64)
    longest = -(-20_000 // size)
    borders = partition.best_borders([work] * size, edges, longest)
    assert np.diff(edges[borders]).max() <= max(longest, -(-10_000 // size) + 40)


# The paper's sweep: 16 blocks of 10 elements, so that a block's average load is floor(10 * K / 160).
EDGES = np.arange(17, dtype=np.int64) * 10


@pytest.mark.parametrize(
    ("borders", "counts", "moved"),
    [
        # mean 100: 120 > 1.05 and 80 < 0.95238, so one block goes from the first to the second
        ((0, 8, 16), (120, 80), (0, 7, 16)),
        ((0, 8, 16), (80, 120), (0, 9, 16)),  # the mirror case
        ((0, 8, 16), (100, 100), (0, 8, 16)),
        # both bounds are strict: 105 is not above 1.05, and 96 of a mean of 100 not below 0.95238
        ((0, 8, 16), (105, 95), (0, 8, 16)),
        ((0, 8, 16), (106, 95), (0, 7, 16)),
        ((0, 5, 10, 16), (130, 96, 74), (0, 5, 10, 16)),
        # the mean is rounded down: 211 // 2 = 105, of which 111 is above 1.05 and 100 is not below 0.95238, 99 is
        ((0, 8, 16), (111, 100), (0, 8, 16)),
        ((0, 8, 16), (112, 99), (0, 7, 16)),
        # nothing selected, or less than one a rank: nothing to balance
        ((0, 8, 16), (0, 0), (0, 8, 16)),
        ((0, 8, 16), (1, 0), (0, 8, 16)),
        # a donor keeps 16 / (4 * 2) = 2 blocks
        ((0, 2, 16), (120, 80), (0, 2, 16)),
        ((0, 3, 16), (120, 80), (0, 2, 16)),
        ((0, 14, 16), (80, 120), (0, 14, 16)),
        ((0, 13, 16), (80, 120), (0, 14, 16)),
        ((0, 16), (50,), (0, 16)),  # one rank has no neighbour
    ],
)
def test_paper_borders(borders: tuple[int, ...], counts: tuple[int, ...], moved: tuple[int, ...]) -> None:
    start = ints(*borders)
    assert partition.paper_borders(start, ints(*counts), EDGES, 16).tolist() == list(moved)
    assert start.tolist() == list(borders)


def test_paper_borders_shift_loads_before_the_next_pair() -> None:
    """K = 300, a block's load is floor(10 * 300 / 160) = 18.

    (130, 94, 76): the first pair moves a block, 94 becomes 112, and so the second pair moves one too; without the shift
    it would not. (75, 110, 115): one comes back, 110 becomes 92, and so the second pair brings one back.
    """
    assert partition.paper_borders(ints(0, 5, 10, 16), ints(130, 94, 76), EDGES, 16).tolist() == [0, 4, 9, 16]
    assert partition.paper_borders(ints(0, 5, 10, 16), ints(75, 110, 115), EDGES, 16).tolist() == [0, 6, 11, 16]


def test_paper_borders_do_not_shift_loads_that_did_not_move() -> None:
    """The first pair would move a block, but its donor is at the minimum: the second pair sees unchanged counts."""
    assert partition.paper_borders(ints(0, 1, 8, 16), ints(130, 94, 76), EDGES, 16).tolist() == [0, 1, 8, 16]


def test_paper_borders_round_a_blocks_load_down() -> None:
    """K = 303, a block's load is floor(18.9) = 18: 88 becomes 106, just not above 1.05 * 101; 89 becomes 107."""
    counts = ints(140, 88, 75)
    assert partition.paper_borders(ints(0, 5, 10, 16), counts, EDGES, 16).tolist() == [0, 4, 10, 16]
    assert partition.paper_borders(ints(0, 5, 10, 16), counts + ints(-1, 1, 0), EDGES, 16).tolist() == [0, 4, 9, 16]


def test_paper_borders_balance_in_the_end() -> None:
    """The sweep leads two ranks with skewed work into the band, one block per step."""
    edges = partition.paper_edges(1024 * 64)
    selected = np.sort((1024 * 64 * np.random.default_rng(0).random(20_000) ** 1.5).astype(np.int64))
    borders = partition.even_borders(1024, 2)
    for _ in range(150):
        before, loads = borders, partition.block_counts(selected, edges[borders])
        borders = partition.paper_borders(borders, loads, edges)
        assert_borders(borders, 1024, 2)
        assert before[1] - borders[1] == (loads[0] > 10_500 and loads[1] < 9_523.8)
    assert loads.max() <= 10_500


@pytest.mark.parametrize("reads_region", [False, True])
def test_static_partitions_stay_and_rotate(reads_region: bool) -> None:
    from mpisparse.select.selector import ExclusiveSelector

    selector = ExclusiveSelector.first(
        1000, 3, controller="tail", partitioner="static", blocks=10, reads_region=reads_region, prior=0.0
    )
    for step in range(4):
        assert [(r.lo, r.hi) for r in selector.regions()] == [(0, 300), (300, 600), (600, 1000)]
        assert [r.rank for r in selector.regions()] == [(p - step) % 3 for p in range(3)]
        assert selector.scope(0) == [(0, 300), (300, 600), (600, 1000)][step % 3]
        selector = selector.after(np.arange(50), selector.controller, np.searchsorted, np.take)
