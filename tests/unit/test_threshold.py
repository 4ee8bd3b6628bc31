"""Density control: the ladder, the choice of a rung, and whole runs over difficult accumulators."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mpisparse.backends import numpy_backend
from mpisparse.comm.agreement import Notice
from mpisparse.select.candidates import Candidates
from mpisparse.select.search import Settled, Settlement
from mpisparse.select.threshold import (
    HUGE,
    TINY,
    Choice,
    Controller,
    Fixed,
    Paper,
    TailAware,
    choose_rung,
    is_close,
    locate_rungs,
    nearest_rung,
    paper_factor,
    spread,
)
from mpisparse.select.view import Live, VectorKeys

Floats = NDArray[np.float32]

N = 100_000
MOST_ROUNDS = 8


def rungs(*values: float) -> Floats:
    return np.array(values, dtype=np.float32)


def counts(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


class Alone:
    """The messages of a single rank."""

    rank, size = 0, 1

    def allgather(self, row: NDArray[Any]) -> NDArray[Any]:
        return row[np.newaxis].copy()

    def allreduce_(self, values: NDArray[Any]) -> NDArray[Any]:
        return values


@dataclass
class Bounded:
    """A controller with a limit on calls per step."""

    controller: Controller
    rounds: int = 0

    def choose(self, *args: Any) -> Choice:
        self.rounds += 1
        assert self.rounds <= MOST_ROUNDS, "the search for a threshold does not end"
        return self.controller.choose(*args)

    def locate(self, *args: Any) -> Floats:
        return self.controller.locate(*args)


def settle(acc: Floats, controller: Controller, k: int) -> tuple[Settled, int]:
    """Find a step's threshold on one rank as a real step does; also returns the number of rounds."""
    ladder = controller.ladder(k)
    lo, hi, floor = (0, len(acc), float(ladder[0])) if len(ladder) else (0, 0, 0.0)
    bounded: Any = Bounded(controller)
    notice = Notice(k, np.zeros(1, dtype=np.bool_))
    live = Live(numpy_backend, acc, VectorKeys(numpy_backend, acc), acc.take)  # type: ignore[arg-type]
    settlement = Settlement(Alone(), numpy_backend, live, bounded, notice, len(acc))  # type: ignore[arg-type]
    settled = settlement.settle((0, len(acc)), ladder, Candidates(*numpy_backend.select(acc, lo, hi, floor)))
    assert settled.total[settled.rung] == (np.abs(acc) >= np.float32(settled.threshold)).sum()
    return settled, bounded.rounds


def control(series: Iterator[Floats] | list[Floats], ks: list[int]) -> Iterator[tuple[int, int]]:
    """Run the tail-aware controller over accumulators; yields the number selected and of rounds per step."""
    controller: Controller = TailAware()
    for acc, k in zip(series, ks, strict=True):
        settled, rounds = settle(acc, controller, k)
        controller = controller.after(settled.rungs, settled.total, settled.rung, k)
        yield int(settled.total[settled.rung]), rounds


def heavy(rng: np.random.Generator, step: int) -> Floats:
    return rng.standard_t(2, N).astype(np.float32)


def drifting(rng: np.random.Generator, step: int) -> Floats:
    return heavy(rng, step) * np.float32(0.97**step)


def layered(rng: np.random.Generator, step: int) -> Floats:
    return heavy(rng, step) * np.repeat(np.logspace(-4, 0, 10), N // 10).astype(np.float32)


def jumping(rng: np.random.Generator, step: int) -> Floats:
    return heavy(rng, step) * np.float32((1, 3, 1, 1 / 3, 3, 1 / 3)[step % 6])


def jumping_layers(rng: np.random.Generator, step: int) -> Floats:
    return layered(rng, step) * np.float32((1, 1 / 3, 1, 3)[step % 4])


def gaussian(rng: np.random.Generator, step: int) -> Floats:
    return rng.standard_normal(N).astype(np.float32)


def mostly_zero(rng: np.random.Generator, step: int) -> Floats:
    return np.where(rng.random(N) < 0.3, heavy(rng, step), np.float32(0))


def denormal(rng: np.random.Generator, step: int) -> Floats:
    return heavy(rng, step) * np.float32(1e-42)


def huge(rng: np.random.Generator, step: int) -> Floats:
    return gaussian(rng, step) * np.float32(6e37)


def waking(rng: np.random.Generator, step: int) -> Floats:
    return heavy(rng, step) * np.float32(0 if step < 2 else 1)


SERIES = [heavy, drifting, layered, jumping, jumping_layers, gaussian, mostly_zero, denormal, huge, waking]


@pytest.mark.parametrize("k", [1000, 1500, 20_000])
@pytest.mark.parametrize("make", SERIES)
def test_density_is_met(make: Any, k: int) -> None:
    rng = np.random.default_rng(0)
    run = list(control([make(rng, step) for step in range(14)], [k] * 14))
    assert all(abs(count - k) <= 0.05 * k for count, _ in run[2:])
    assert np.mean([count / k for count, _ in run[2:]]) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("k", [1, 2, 10, 100])
@pytest.mark.parametrize("make", [heavy, layered, jumping, mostly_zero])
def test_few_are_met(make: Any, k: int) -> None:
    """For small k control aims for k plus or minus one."""
    rng = np.random.default_rng(1)
    run = list(control([make(rng, step) for step in range(14)], [k] * 14))
    assert all(abs(count - k) <= 1 for count, _ in run[2:])


def test_density_may_change() -> None:
    """A warm-up from 25 % to 1 % and back, on layers, is met at every step."""
    ks = [25_000, 25_000, 6000, 6000, 1500, 1000, 1000, 25_000, 1000, 30_000]
    rng = np.random.default_rng(2)
    run = list(control([layered(rng, step) for step in range(len(ks))], ks))
    assert all(abs(count - k) <= 0.05 * k for (count, _), k in zip(run, ks, strict=True))


@pytest.mark.parametrize("make", [heavy, drifting, layered, gaussian])
def test_prediction_saves_messages(make: Any) -> None:
    """If steps are similar the first ladder contains k, so that control needs no further message."""
    rng = np.random.default_rng(3)
    run = list(control([make(rng, step) for step in range(20)], [1000] * 20))
    assert [rounds for _, rounds in run[2:]] == [1] * 18


@pytest.mark.parametrize("k", [1, 10, 1000, 60_000])
@pytest.mark.parametrize("value", [0.3, TINY, 1e-40, HUGE])
def test_equal_values(value: float, k: int) -> None:
    """A rung selects all or nothing: none gives k, and the search still ends."""
    run = list(control([np.full(N, value, dtype=np.float32)] * 4, [k] * 4))
    assert all(count in (0, N) for count, _ in run)


def equal(rng: np.random.Generator, step: int) -> Floats:
    return np.full(N, 0.3, dtype=np.float32)


def clipped(rng: np.random.Generator, step: int) -> Floats:
    return np.clip(heavy(rng, step), -1.8, 1.8)


@pytest.mark.parametrize("k", [1, 1000])
@pytest.mark.parametrize("make", [equal, clipped, heavy, layered, jumping])
def test_something_is_always_selected(make: Any, k: int) -> None:
    """Zero is never close enough to k: gradients tied at the top would wait in the residual forever."""
    rng = np.random.default_rng(4)
    assert all(count for count, _ in control([make(rng, step) for step in range(14)], [k] * 14))


def test_ties_in_the_middle() -> None:
    """Half of the elements tie at the threshold: all reach it, and those beyond k are dropped later."""
    acc = heavy(np.random.default_rng(5), 0)
    acc[::2] = 0.5
    above, reach = int((np.abs(acc) > 0.5).sum()), int((np.abs(acc) >= 0.5).sum())
    for k in (above + 5000, reach - 5000):
        assert [count for count, _ in control([acc] * 3, [k] * 3)] == [reach] * 3


@pytest.mark.parametrize("nonzero", [0, 1, 7, 800])
def test_fewer_than_k(nonzero: int) -> None:
    """Every nonzero element is selected, however small, and no zero."""
    rng = np.random.default_rng(6)
    series = np.zeros((5, N), dtype=np.float32)
    for step in range(5):
        series[step, rng.permutation(N)[:nonzero]] = 10.0 ** -(9 * step) * (1 + rng.random(nonzero))
    assert [count for count, _ in control(list(series), [1000] * 5)] == [nonzero] * 5


def test_the_largest_floats() -> None:
    """Magnitudes up to the largest float32 are located and distinguished."""
    acc = np.linspace(0.9 * HUGE, HUGE, 2000).astype(np.float32)
    assert [count for count, _ in control([acc] * 3, [1000] * 3)] == pytest.approx([1000] * 3, rel=0.01)


@given(
    low=st.floats(TINY, HUGE, width=32),
    high=st.floats(TINY, HUGE, width=32),
    count=st.integers(2, 256),
)
def test_spread(low: float, high: float, count: int) -> None:
    low, high = sorted((low, high))
    ladder = spread(low, high, count)
    assert ladder.dtype == np.float32
    assert 1 <= len(ladder) <= count
    assert (np.diff(ladder) > 0).all()
    assert (ladder[0], ladder[-1]) == (np.float32(low), np.float32(high))


def test_spread_is_geometric_and_has_bounds() -> None:
    np.testing.assert_allclose(spread(0.01, 1.0, 5), [0.01, 0.0316227766, 0.1, 0.316227766, 1.0], rtol=1e-6)
    assert spread(0.0, 0.0).tolist() == [TINY]
    assert spread(1.0, 1e300)[-1] == np.float32(HUGE)
    assert spread(1.0, 0.5).tolist() == [1.0]


def test_nearest_and_close() -> None:
    assert nearest_rung(counts(30, 12, 8, 0), 10) == 1
    assert nearest_rung(counts(30, 12, 9, 0), 10) == 2
    assert [is_close(count, 1000) for count in (989, 990, 1010, 1011)] == [False, True, True, False]
    assert [is_close(count, 10) for count in (8, 9, 11, 12)] == [False, True, True, False]


@pytest.mark.parametrize(
    ("ladder", "reached", "k", "rung"),
    [
        ((1, 2, 3), (2000, 1004, 500), 1000, 1),
        ((1, 2, 3), (1005, 995, 500), 1000, 0),
        ((1, 2, 3), (995, 900, 500), 1000, 0),  # just below the floor, but close
        ((TINY, 2, 3), (700, 600, 500), 1000, 0),  # nothing more to be had
        ((1, np.nextafter(np.float32(1), np.float32(2))), (5000, 900), 1000, 0),  # no float in between: at least k
        ((1, np.nextafter(np.float32(1), np.float32(2))), (1050, 100), 1000, 0),
    ],
)
def test_choose_takes_a_rung(ladder: tuple[float, ...], reached: tuple[int, ...], k: int, rung: int) -> None:
    assert choose_rung(rungs(*ladder), counts(*reached), k) == Choice(rung=rung)


def test_choose_finds_k_below_the_ladder() -> None:
    assert choose_rung(rungs(), counts(), 1000) == Choice()
    assert choose_rung(rungs(1, 2), counts(900, 10), 1000) == Choice()


@pytest.mark.parametrize(
    ("reached", "low", "high"),
    [((9000, 5000, 100), 2, 3), ((9000, 100, 50), 1, 2), ((9000, 5000, 2000), 3, HUGE), ((9000, 9000, 100), 2, 3)],
)
def test_choose_narrows_the_ladder(reached: tuple[int, ...], low: float, high: float) -> None:
    choice = choose_rung(rungs(1, 2, 3), counts(*reached), 1000)
    assert choice.rung is None
    assert choice.finer is not None
    np.testing.assert_array_equal(choice.finer, spread(low, high))


@given(seed=st.integers(0, 500), k=st.integers(1, 400), power=st.integers(-43, 37))
def test_located_ladders_hold_k(seed: int, k: int, power: int) -> None:
    """The floor selects k or more, the top fewer, and they are at most two bins apart."""
    rng = np.random.default_rng(seed)
    acc = (np.clip(rng.standard_t(2, 500), -9, 9) * 10.0**power).astype(np.float32)
    acc[: rng.integers(0, 400)] = 0
    ladder = locate_rungs(numpy_backend.histogram(acc, 0, 500), k)
    reached = numpy_backend.tail_counts(np.abs(acc), ladder)
    assert reached[0] >= k or (ladder[0] == np.float32(TINY) and reached[0] == np.count_nonzero(acc))
    assert reached[-1] < k
    assert ladder[-1] <= 1.34 * ladder[0] or ladder[0] < 1e-37


@pytest.mark.parametrize("bin_", [2036, 2037, 2038, 2039])
def test_located_ladders_end_at_the_largest_float(bin_: int) -> None:
    """The last finite bins: there are no rungs beyond float32."""
    histogram = np.zeros(2048, dtype=np.int64)
    histogram[bin_] = 100
    ladder = locate_rungs(histogram, 10)
    assert np.isfinite(ladder).all()
    assert ladder[0] == np.uint32(bin_ << 20).view(np.float32)
    assert ladder[0] < ladder[-1] <= np.float32(HUGE)


def test_tail_aware_learns_the_slope() -> None:
    """On a Pareto tail (count = threshold ** -slope) it predicts the threshold of another density."""
    controller, slope = TailAware(), 2.5
    for _ in range(12):
        ladder = controller.ladder(1000) if controller.threshold else spread(0.01, 1.0)
        reached = np.rint(ladder.astype(np.float64) ** -slope * 10).astype(np.int64)
        controller = controller.after(ladder, reached, nearest_rung(reached, 1000), 1000)
    assert controller.slope == pytest.approx(slope, rel=0.03)
    assert controller.trend == pytest.approx(0, abs=0.01)
    for k in (500, 1000, 10_000):
        ladder = controller.ladder(k)
        assert math.sqrt(ladder[0] * ladder[-1]) == pytest.approx((k / 10) ** (-1 / slope), rel=0.05)
    assert TailAware(**controller.state()) == controller  # type: ignore[arg-type]


def test_tail_aware_follows_a_trend_and_widens_after_a_miss() -> None:
    steady = TailAware(threshold=1.0, slope=3.0, trend=0.0, error=0.02, last_k=100)
    falling = steady
    for _ in range(20):
        threshold = falling.threshold * 0.9
        falling = falling.after(rungs(threshold), counts(100), 0, 100)
    assert falling.trend == pytest.approx(math.log(0.9), rel=0.01)
    ladder = falling.ladder(100)
    assert math.sqrt(ladder[0] * ladder[-1]) == pytest.approx(falling.threshold * 0.9, rel=0.01)
    missed = steady.after(rungs(2.5), counts(100), 0, 100)
    assert missed.ladder(100)[-1] / missed.ladder(100)[0] > 1.5 * steady.ladder(100)[-1] / steady.ladder(100)[0]


@pytest.mark.parametrize(
    ("ratio", "factor"),
    [
        (1e9, 1.005),
        (1.1000001, 1.005),
        (1.1, 1.00125),
        (1.0000001, 1.00125),
        (1.0, 0.9987),
        (0.9090001, 0.9987),
        (0.909, 0.995),
        (0.0, 0.995),
    ],
)
def test_paper_factor(ratio: float, factor: float) -> None:
    assert paper_factor(ratio) == factor


def test_paper_sequence() -> None:
    """It starts at 1 / (2 sqrt(k)), and each count scales it once."""
    controller, k = Paper(), 400
    threshold = 1 / 40
    for count, factor in (
        (4000, 1.005),
        (441, 1.005),
        (440, 1.00125),
        (400, 0.9987),
        (364, 0.9987),
        (363, 0.995),
        (0, 0.995),
    ):
        ladder = controller.ladder(k)
        assert ladder.dtype == np.float32
        assert ladder.tolist() == pytest.approx([threshold], rel=1e-6)
        assert controller.choose(ladder, counts(count), k) == Choice(rung=0)
        controller = controller.after(ladder, counts(count), 0, k)
        threshold *= factor
    assert Paper(**controller.state()) == controller


def test_paper_settles_in_one_round_and_in_the_band() -> None:
    """From a start that selects too few, one rung per step leads into the band around k."""
    acc, controller = heavy(np.random.default_rng(7), 0) * np.float32(0.001), Paper()
    for _ in range(400):
        settled, rounds = settle(acc, controller, 1000)
        assert rounds == 1
        controller = controller.after(settled.rungs, settled.total, settled.rung, 1000)
    assert 909 < settled.total[0] <= 1100


def test_a_fixed_threshold_is_that_of_the_first_step() -> None:
    random, k = np.random.default_rng(2), 500
    controller: Controller = Fixed()
    acc = random.standard_normal(50_000).astype(np.float32)
    settled, _ = settle(acc, controller, k)
    assert abs(settled.total[settled.rung] - k) <= 0.01 * k
    controller = controller.after(settled.rungs, settled.total, settled.rung, k)
    again, rounds = settle(2 * acc, controller, k)
    assert (again.threshold, rounds) == (settled.threshold, 1)
    assert again.total[again.rung] == np.count_nonzero(np.abs(2 * acc) >= np.float32(settled.threshold))
    assert controller.after(again.rungs, again.total, again.rung, k) == controller
