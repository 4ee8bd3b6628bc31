"""Predictions and choices from made-up measurements, and the table of candidates on its page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpisparse.errors import ConfigurationError
from mpisparse.plan import candidates, times
from mpisparse.plan.candidates import ALL, BY_NAME, CHOICES, FLAT, NODES, OVERLAPPED, Candidate, named
from mpisparse.plan.measure import passes
from mpisparse.plan.messages import received_per_element
from mpisparse.plan.predict import (
    Links,
    Measured,
    Prediction,
    Window,
    check_slowdown,
    choose,
    corrected,
    predict,
    reason,
    ways,
)
from mpisparse.schemes import configure

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "choosing.md"
GIGABIT = Links(50e-6, 117e6, 117e6)


def cells(head: str) -> list[list[str]]:
    """Return the rows of a table of the page, by how its head begins."""
    lines = PAGE.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(head))
    table = lines[first + 2 :]
    end = next(i for i, line in enumerate(table) if not line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[:end]]


def measured(**changes: Any) -> Measured:
    """A model of 10 million parameters on four ranks."""
    passes = {each.name: 1e-3 for each in ALL}
    return replace(Measured(4, 10_000_000, 0.5, GIGABIT, passes), **changes)


def predictions(m: Measured, **suits: Any) -> list[Prediction]:
    return [predict(each, m) for each in candidates.suiting(adaptive=True, **suits)]


def chosen(m: Measured, slowdown: float = 1.1, now: Candidate | None = None, **suits: Any) -> str:
    return choose(predictions(m, **suits), m.computing, slowdown, now).candidate.name


# The table


def test_the_page_has_the_candidates_in_the_same_order() -> None:
    rows = cells("| candidate | options |")
    assert [row[0] for row in rows] == [f"`{each.name}`" for each in ALL]
    for row, each in zip(rows, ALL, strict=True):
        options = ", ".join(f'{k}="{v}"' if isinstance(v, str) else f"{k}={v:g}" for k, v in each.options.items())
        assert row[1] == f'`scheme="{each.scheme}", {options}`'
        assert float(row[2]) == pytest.approx(received_per_element(each, 10_000_000, 4), rel=0.02)
        assert row[3] == ("SGD" if each.kind == candidates.SPARSE else "all")


@pytest.mark.parametrize(
    ("name", "case", "elements"),
    [("dense fp32", "dense", 811_000), ("dense int4", "int4", 811_000), ("drift 17 % int2", "groups-int2-0.17", 811_000),
     ("drift 13 % sign", "groups-sign-0.13", 811_000), ("exdyna 1 % int8", "exdyna-0.01-int8", 270_000)],
)  # fmt: skip
def test_predicted_bytes_are_those_that_the_page_measured(name: str, case: str, elements: int) -> None:
    row = next(line for line in PAGE.read_text().splitlines() if f"| `{case}` |" in line)
    bytes_measured = float(re.findall(r"\| ([\d.]+) \|", row)[0])
    assert received_per_element(BY_NAME[name], elements, 4) == pytest.approx(bytes_measured, rel=0.05)


def test_every_candidate_is_an_exchange_that_can_be_built() -> None:
    for each in ALL:
        assert configure(each.scheme, **each.options).codec == each.codec
    assert len(BY_NAME) == len(CHOICES) == 2 * len(ALL)


def test_what_suits_an_optimizer() -> None:
    names = [each.name for each in candidates.suiting(adaptive=True)]
    assert "exdyna 1 % int8" not in names
    assert names.index("dense int4") < names.index("drift 17 % int2") < names.index("drift 13 % sign")
    plain = list(candidates.suiting(adaptive=False, kinds=("dense", "sparse"), coarsest="int4", least=0.01))
    assert [each.name for each in plain] == [
        "dense fp32", "dense bf16", "dense int8", "dense int4", "exdyna 10 % int8", "exdyna 1 % int8"
    ]  # fmt: skip


def test_rarer_exchanges_come_last_and_only_those_that_are_allowed() -> None:
    paces = [each.every for each in ALL]
    assert paces == sorted(paces)
    assert {each.every for each in candidates.suiting(adaptive=True)} == {1, 4}
    assert {each.every for each in candidates.suiting(adaptive=True, rarest=1)} == {1}
    assert {each.every for each in candidates.suiting(adaptive=True, rarest=16)} == {1, 4, 16}


def test_the_mean_step_of_a_rarer_exchange_has_its_share_of_one() -> None:
    m = measured()
    each, fourth = (predict(BY_NAME[name], m) for name in ("drift 13 % sign", "drift 13 % sign every 4"))
    assert fourth.exchange == pytest.approx(each.exchange / 4)
    assert fourth.step == pytest.approx(m.computing + each.exchange / 4)
    nodes = measured(ranks_a_node=2, inside=GIGABIT, between=GIGABIT)
    free = replace(nodes, inside=Links(0.0, 1e99, 1e99))
    saved = predict(each.candidate.by(NODES), nodes).exchange - predict(fourth.candidate.by(NODES), nodes).exchange
    assert saved == pytest.approx(0.75 * predict(each.candidate.by(NODES), free).exchange)  # a node sums in each step
    window = Window([0.5], [0.0], [2 * fourth.exchange])
    assert corrected(m, window, fourth.candidate).correction == pytest.approx(2.0)


def test_times_are_of_the_mean_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange after every fourth step; what comes before the first one is not known."""
    now = [0.0]
    monkeypatch.setattr(times, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    clock = times.Times()
    for _ in range(2):
        for part, seconds in ((clock.called, 8.0), (clock.agreed, 2.0), (lambda: clock.exchanged(4), 1.0)):
            now[0] += seconds
            part()
        clock.ended()
    assert clock.medians().tolist() == [2.0, 0.5, 0.25]
    assert len(clock) == 1
    clock.clear()
    for part, seconds in ((clock.called, 8.0), (clock.agreed, 2.0), (lambda: clock.exchanged(4), 1.0)):
        if part == clock.called:
            with clock.exchanging():  # in one of the steps before, as nodes do
                now[0] += 2.0
            with clock.waiting():  # for their roll call
                now[0] += 4.0
        now[0] += seconds
        part()
    assert clock.medians().tolist() == [2.0, 1.5, 0.75]
    clock.clear()
    assert len(clock) == 0
    clock.interrupted()
    clock.called()
    clock.agreed()
    clock.exchanged(1)
    assert clock.medians().tolist() == [0.0, 0.0, 0.0]


# The choice


@pytest.mark.parametrize(
    ("bandwidth", "expected"),
    [(1e11, "dense fp32"), (1.2e9, "dense bf16"), (500e6, "dense int8"), (200e6, "dense int4"), (20e6, "drift 17 % int2"),
     (8e6, "drift 13 % sign"), (4.5e6, "drift 17 % int2 every 4"), (1e6, "drift 13 % sign every 4")],
)  # fmt: skip
def test_the_richest_that_the_link_pays_for(bandwidth: float, expected: str) -> None:
    assert chosen(measured(links=Links(50e-6, bandwidth, bandwidth))) == expected


def test_where_nothing_fits_the_fastest_is_chosen_and_the_reason_says_so() -> None:
    m = measured(computing=1e-6)
    best = choose(predictions(m), m.computing, 1.1)
    assert best.step <= 1.05 * min(each.step for each in predictions(m))
    assert "the fastest, none is within 1.1 times" in reason(best, m.computing, 1.1)
    assert "the richest exchange within 100 times" in reason(predict(ALL[0], measured()), 0.5, 100)


def test_a_higher_slowdown_allows_a_richer_exchange() -> None:
    names = [each.name for each in ALL]
    places = [names.index(chosen(measured(), slowdown)) for slowdown in (1.0, 1.1, 1.5, 3.0)]
    assert places == sorted(places, reverse=True)
    assert places[0] > places[-1] == 0


def test_one_rank_and_one_parameter() -> None:
    assert chosen(measured(ranks=1, passes={})) == "dense fp32"
    assert chosen(measured(elements=1)) == "dense fp32"


def test_a_richer_exchange_must_be_sure_to_fit_before_another_is_left_for_it() -> None:
    just = Links(50e-6, 180e6, 180e6)  # int4 fits, by less than a quarter of its exchange
    m = measured(links=just)
    fits = predict(BY_NAME["dense int4"], m)
    assert m.computing < fits.step < 1.1 * m.computing < fits.step + 0.25 * fits.exchange
    assert chosen(m) == "dense int4"
    assert chosen(m, now=BY_NAME["drift 17 % int2"]) == "drift 17 % int2"
    assert chosen(m, now=BY_NAME["dense int4"]) == "dense int4"
    assert chosen(m, now=BY_NAME["dense fp32"]) == "dense int4"


def test_among_the_fastest_what_is_in_use_stays() -> None:
    m = measured(computing=1e-6)
    fastest = choose(predictions(m), m.computing, 1.1)
    near = replace(fastest, candidate=BY_NAME["dense int2"], step=1.04 * fastest.step)
    assert choose([near, fastest], m.computing, 1.1, now=fastest.candidate) is fastest
    assert choose([near, fastest], m.computing, 1.1) is near


@pytest.mark.parametrize("slowdown", [0.99, 0, -1, float("nan"), float("inf"), "1.1", True, None])
def test_a_slowdown_below_one_is_refused(slowdown: Any) -> None:
    with pytest.raises(ConfigurationError, match="slowdown must be a number >= 1"):
        check_slowdown(slowdown)


def test_measurements_survive_being_written() -> None:
    m = measured(inside=GIGABIT, between=GIGABIT, ranks_a_node=2)
    assert Measured.of(json.loads(json.dumps(m.record()))) == m


# Ways


def found(candidate: Candidate, m: Measured) -> list[str]:
    return [each.way for each in ways(candidate, m)]


def test_ways_of_an_exchange() -> None:
    m = measured(
        ranks_a_node=2, inside=Links(1e-6, 5e9, 5e9), between=Links(50e-6, 10e6, 10e6), links=Links(50e-6, 10e6, 10e6)
    )
    dense = BY_NAME["dense fp32"]
    assert found(dense, m) == [FLAT, NODES, OVERLAPPED]
    assert found(BY_NAME["drift 17 % int2"], m) == [FLAT, NODES]
    assert found(BY_NAME["drift 17 % int2"], measured()) == found(dense, measured(ranks=1)) == [FLAT]
    assert found(dense, measured()) == [FLAT, OVERLAPPED]
    flat, nodes, early = (predict(dense.by(way), m).step for way in (FLAT, NODES, OVERLAPPED))
    assert nodes < flat  # half of the elements, between half of the ranks
    first = 2 / 3 * m.computing / 5  # of five buckets; from then on the link is busy
    assert early == pytest.approx(m.computing / 3 + first + predict(dense.by(OVERLAPPED), m).exchange)
    small = replace(m, elements=1_000_000)  # one bucket, which is complete when backward ends
    assert predict(dense.by(OVERLAPPED), small).step == pytest.approx(predict(dense, small).step)
    few = predict(BY_NAME["dense int2"].by(OVERLAPPED), replace(m, links=GIGABIT))
    assert few.step == pytest.approx(m.computing + few.exchange / 5)  # the last bucket's


# Looking again


def test_a_slow_rank_is_told_from_a_slow_link() -> None:
    m = measured()
    usual = Window([0.5, 0.5, 0.49], [0.001, 0.001, 0.011], [0.05, 0.05, 0.05])
    assert not usual.off(0.55)
    slow_rank = Window([0.5, 1.0, 0.49], [0.501, 0.001, 0.511], [0.05, 0.05, 0.05])
    assert slow_rank.off(0.55)
    assert slow_rank.blame(m) == "rank 1 computes slower than the others"
    assert slow_rank.exchange == pytest.approx(0.051)
    slow_link = Window([0.5, 0.5, 0.5], [0.001, 0.001, 0.001], [0.5, 0.5, 0.5])
    assert slow_link.off(0.55)
    assert "the exchange takes longer" in slow_link.blame(m)
    faster = Window([0.2, 0.2, 0.2], [0.0, 0.0, 0.0], [0.05, 0.05, 0.05])
    assert faster.off(0.55)
    assert "computation" in faster.blame(m)


def test_what_was_measured_corrects_the_prediction_of_the_exchange_in_use() -> None:
    m, now = measured(), BY_NAME["dense int4"]
    took = 1.7 * predict(now, m).exchange
    again = corrected(m, Window([0.4, 0.6], [took / 10] * 2, [0.9 * took] * 2), now)
    assert predict(now, again).step == pytest.approx(0.6 + took)
    assert not Window([0.6], [took / 10], [0.9 * took]).off(predict(now, again).step)
    assert corrected(m, Window([0.5], [0.0], [1e9]), now).correction == 4.0  # one slow window says little


def test_passes_of_every_candidate_are_measured_and_leave_the_generators_alone() -> None:
    import torch

    torch.manual_seed(3)
    before = torch.get_rng_state()
    for elements in (1, 700, 40_000):
        assert all(passes(each, elements) > 0 for each in ALL)
    assert torch.equal(torch.get_rng_state(), before)


def test_of_the_ways_of_an_exchange_the_quickest_counts_unless_another_is_in_use_and_as_quick() -> None:
    slow = Links(50e-6, 10e6, 10e6)
    m = measured(ranks_a_node=2, links=slow, inside=Links(1e-6, 5e9, 5e9), between=slow)
    both = [predict(way, m) for each in candidates.suiting(adaptive=True) for way in (each, each.by(NODES))]
    best = choose(both, m.computing, 1.1)
    assert best.candidate.way == NODES
    without = choose([each for each in both if each.candidate.way == FLAT], m.computing, 1.1)
    assert ALL.index(best.candidate.flat) < ALL.index(without.candidate), "half of the bytes pay for a richer exchange"
    flat = best.candidate.flat
    for times_longer, expected in ((1.04, flat), (1.06, best.candidate)):
        two = [replace(best, candidate=flat, step=times_longer * best.step), best]
        assert choose(two, m.computing, 1.3, now=flat).candidate == expected  # all of them fit
        assert choose(two, m.computing, 1.3) is best


def test_the_way_in_use_is_left_if_only_the_other_one_fits() -> None:
    int8, int4 = BY_NAME["dense int8"], BY_NAME["dense int4"]
    steps = {int8: 112.0, int8.by(NODES): 109.0, int4: 104.0}
    known = [Prediction(each, step - 100.0, step) for each, step in steps.items()]
    for limit, expected in ((1.1, int8.by(NODES)), (1.12, int8), (1.05, int4)):
        assert choose(known, 100.0, limit, now=int8).candidate == expected
    assert choose(known[:2], 100.0, 1.05, now=int8).candidate == int8, "neither fits"


def test_statistics_name_what_is_in_use() -> None:
    assert [named({"choice": 3.0, "nodes_first": nodes}) for nodes in (0.0, 1.0)] == [
        "dense int4",
        "dense int4, nodes first",
    ]
    assert named({"choice": 3.0}) == "dense int4", "of an earlier version"
    assert named({}) == ""
