"""When auto changes: by windows of times that are given, over links that are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from mpisparse.comm.exchange import Exchange
from mpisparse.comm.virtual import run_virtual
from mpisparse.plan import choices, measure
from mpisparse.plan.candidates import BY_NAME, Candidate, suiting
from mpisparse.plan.judge import MOST_WINS, Judge
from mpisparse.plan.predict import Links, Measured, Window, predict

KNOWN = list(suiting(adaptive=True, kinds=("dense",)))
COMPUTING, ELEMENTS = 0.1, 10_000_000


def over(rate: float) -> Links:
    return Links(1e-5, rate, rate)


@pytest.fixture
def judging(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Returns the exchange in use after each window: of a step as long as predicted over a link, times a factor."""

    def windows(steps: Sequence[tuple[float, float]], now: str = "dense int4", ranks: int = 4) -> list[str]:
        link = [over(1e9)]
        monkeypatch.setattr(measure, "links", lambda exchange: link[0])
        monkeypatch.setattr(measure, "passes", lambda candidate, elements: 0.0)

        def run(comm: Any) -> list[str]:
            judge, used, history = Judge(Exchange(comm), ELEMENTS, 1.1), [], [(0, now)]
            for number, (rate, factor) in enumerate(steps):
                link[0] = over(rate)
                candidate = BY_NAME[history[-1][1]]
                moving = factor * exchange_over(candidate, link[0], ranks) if judge.measured else 0.01
                verdict = judge.verdict(
                    Window([COMPUTING] * ranks, [0.0] * ranks, [moving] * ranks), candidate, KNOWN, choices.returns(history)
                )
                if verdict is not None and verdict.candidate != candidate:
                    assert verdict.says
                    history.append((number + 1, verdict.candidate.name))
                used.append(history[-1][1])
            return used

        results = run_virtual(ranks, run)
        assert len({tuple(each) for each in results}) == 1, "the ranks choose apart"
        return results[0]

    return windows


def exchange_over(candidate: Candidate, links: Links, ranks: int) -> float:
    return predict(candidate, Measured(ranks, ELEMENTS, COMPUTING, links)).exchange


QUICK, SLOW = 1e11, 5e7  # bytes per second: float32 costs nothing, and much


def test_the_first_window_chooses_and_a_lasting_change_is_followed(judging: Callable[..., list[str]]) -> None:
    used = judging([(QUICK, 1)] * 3 + [(SLOW, 1)] * 3 + [(QUICK, 1)] * 3)
    assert used == ["dense fp32"] * 4 + ["dense int2"] * 3 + ["dense fp32"] * 2


def test_a_link_that_is_quick_again_is_noticed_where_the_exchange_in_use_is_a_small_part_of_the_step(
    judging: Callable[..., list[str]],
) -> None:
    """Two bits that fit over a link of 500 MB/s take 8 % of the step: it hardly gets shorter without them."""
    used = judging([(5e8, 1)] * 3 + [(QUICK, 1)] * 4)
    assert used == ["dense int2"] * 4 + ["dense fp32"] * 3
    assert judging([(5e8, 1)] * 3 + [(5e8, 0.7)] * 4) == ["dense int2"] * 7, "some noise is no reason"


def test_a_link_that_gets_a_hundred_times_slower_and_quick_again_is_followed(judging: Callable[..., list[str]]) -> None:
    used = judging([(1e10, 1)] * 3 + [(1e8, 1)] * 4 + [(1e10, 1)] * 4)
    assert used == ["dense fp32"] * 4 + ["dense int2"] * 4 + ["dense fp32"] * 3


def test_one_odd_window_changes_nothing(judging: Callable[..., list[str]]) -> None:
    used = judging([(QUICK, 1)] * 3 + [(SLOW, 1), (QUICK, 1)] * 6)
    assert used == ["dense fp32"] * len(used)


def test_each_return_asks_for_more(judging: Callable[..., list[str]]) -> None:
    """A link that changes every few windows is not followed for ever."""
    used = judging(([(SLOW, 1)] * 3 + [(QUICK, 1)] * 3) * 12)
    changes = sum(a != b for a, b in pairwise(used))
    assert 1 <= changes <= 4
    lasting = judging(([(SLOW, 1)] * 3 + [(QUICK, 1)] * 3) * 4 + [(SLOW, 1)] * 2 * MOST_WINS)
    assert lasting[-1] != "dense fp32", "but in the end a lasting one is"


def test_returns_are_counted_from_the_first_choice_on() -> None:
    names = ["dense int4", "dense fp32", "dense int4", "dense fp32", "dense int2", "dense fp32"]
    assert [choices.returns(list(enumerate(names[:count]))) for count in range(1, 7)] == [0, 0, 0, 1, 1, 2]
