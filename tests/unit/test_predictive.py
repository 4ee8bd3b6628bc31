"""The parts of scheme predictive: k by scripted metrics, nets that learn, a thread that keeps its budget."""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mpisparse.backends import numpy_backend
from mpisparse.backends.device import load_backend
from mpisparse.backends.keys import PRODUCTS, SCORES
from mpisparse.backends.kinds import BF16, round_to, widen
from mpisparse.core.adaptive_k import AdaptiveK
from mpisparse.errors import ConfigurationError
from mpisparse.model.layout import Layout
from mpisparse.schemes.companion import Site
from mpisparse.schemes.predictive.background import Background, PredictorError
from mpisparse.schemes.predictive.features import Features
from mpisparse.schemes.predictive.nets import Job, Lesson, Nets, Slice
from mpisparse.schemes.predictive.sample import LEAST, draw

DEPTH = 4
ENDS = np.array([700, 700, 5000, 20_000])  # a layer of no elements too


def after(metrics: list[float], **options: Any) -> list[float]:
    """Return the factor on k after each metric."""
    demand, scales = AdaptiveK(factor=2.0, least=0.25, most=4.0, slow=0.01, fast=0.1, patience=2, **options), []
    for metric in metrics:
        demand = demand.observe(metric)
        scales.append(demand.scale)
    return scales


@pytest.mark.parametrize(
    ("metrics", "scales"),
    [
        ([0.5, 0.6, 0.7, 0.8], [1, 0.5, 0.25, 0.25]),  # fast progress lowers k, down to its bound
        ([0.5, 0.51, 0.52, 0.54], [1, 1, 1, 1]),  # steady progress leaves it
        ([0.5, 0.501, 0.502, 0.503, 0.503], [1, 1, 2, 2, 4]),  # a plateau raises it, each time after the patience
        ([0.5, 0.4, 0.3, 0.2], [1, 2, 4, 4]),  # a fall raises it at once, up to its bound
        ([0.5, math.nan, 0.5], [1, 2, 2]),  # not a number is a fall
        ([math.nan, 0.5, 0.4], [1, 1, 2]),  # nothing to compare with yet
        ([0.5, 0.502, 0.54, 0.541, 0.542], [1, 1, 1, 1, 2]),  # progress restarts the patience
        ([-2.0, -1.5, -1.6], [1, 0.5, 1]),  # losses, negated
        ([0.9, 0.5, 0.6, 0.7, 0.8, 0.85], [1, 2, 2, 2, 1, 1]),  # a setback raises k, and recovering from it does not
        ([0.9, 0.5, 0.52, 0.54, 0.56, 0.58, 0.6], [1, 2, 2, 2, 2, 2, 2]),  # not even if it takes long
        ([0.9, 0.5, 0.501, 0.502, 0.503], [1, 2, 2, 4, 4]),  # but standing still far below the best does
        ([0.8, 0.9, 0.8, 0.9, 0.8, 0.9], [1, 0.5, 1, 1, 2, 2]),  # to and fro is no progress
    ],
)
def test_k_moves_as_specified(metrics: list[float], scales: list[float]) -> None:
    assert after(metrics) == scales


def test_demand_goes_on_from_its_state() -> None:
    demand = AdaptiveK()
    for metric in (0.5, 0.5, 0.9, 0.1):
        demand = demand.observe(metric)
    again = AdaptiveK().loaded(dict(demand.state()))
    assert again == demand
    assert again.observe(0.1) == demand.observe(0.1)
    for damage in (
        {"scale": math.nan},
        {"scale": 100.0},
        {"since": -1},
        {"since": 1, "recent": np.array([0.5])},
        {"recent": np.array([0.5, math.nan])},
        {"recent": np.zeros(4)},
    ):
        with pytest.raises(ConfigurationError, match="the adaptive k in the state"):
            AdaptiveK().loaded({**demand.state(), **{f"demand.{key}": value for key, value in damage.items()}})


def test_k_stays_while_the_metric_recovers() -> None:
    """With default options."""
    demand, scales = AdaptiveK(), []
    for metric in (0.9, 0.5, 0.6, 0.7, 0.8, 0.85):
        demand = demand.observe(metric)
        scales.append(demand.scale)
    assert scales == pytest.approx([1, 1.5, 1.5, 1.5, 1, 1 / 1.5])


@given(st.lists(st.floats(0.1, 1.0), min_size=2, max_size=12), st.integers(1, 4))
def test_a_metric_that_rises_fast_never_raises_k(metrics: list[float], patience: int) -> None:
    """Whatever came before: progress counts, not the best metric so far."""
    demand = AdaptiveK(patience=patience)
    for metric in metrics:
        demand = demand.observe(metric)
    for _ in range(6):
        scale = demand.scale
        demand = demand.observe(demand.recent[-1] * 1.1)
        assert demand.scale <= scale


def test_a_demand_of_an_earlier_version_goes_on_with_its_last_metric() -> None:
    old, stage = {"demand.scale": 2.0, "demand.best": 0.9, "demand.last": 0.5, "demand.still": 1}, AdaptiveK()
    assert stage.loaded(stage.upgraded(old)) == AdaptiveK(scale=2.0, recent=(0.5,))
    unseen = {**old, "demand.last": -math.inf, "demand.best": -math.inf}
    assert stage.upgraded(unseen)["demand.recent"].tolist() == []
    today = {"demand.recent": np.array([0.5, 0.6]), "demand.since": 1, "demand.last": 0.1}
    assert stage.upgraded(today) == today


def nets(key: int = PRODUCTS, backend: Any = None, **more: Any) -> Nets:
    return Nets(backend or load_backend(), ENDS, DEPTH, key=key, rate=0.01, seed=(3, 0), **more)


def lesson(number: int) -> Lesson:
    """Return elements with positive gain where recent gradients agree with the residual, whatever their magnitude."""
    rng = np.random.default_rng([9, number])
    index = draw(rng, ENDS, 4096, np.empty(0, dtype=np.int64))
    n = len(index)
    accumulated = rng.standard_normal(n).astype(np.float32)
    agreement = rng.choice([-1.0, 1.0], n)
    scale = np.where(index < 700, 100.0, 0.01)  # layers of other units
    gradients = scale * agreement * np.sign(accumulated) * (0.5 + rng.random((DEPTH, n)))
    rows = round_to(np.vstack([gradients, accumulated]).astype(np.float32).reshape(-1), BF16)
    gain = (agreement * np.abs(accumulated) + 0.1 * rng.standard_normal(n)).astype(np.float32)
    return Lesson(number, index, rows, np.abs(accumulated), gain)


@pytest.mark.parametrize("key", [PRODUCTS, SCORES])
def test_nets_learn_to_rank_what_they_have_not_seen(key: int) -> None:
    """The ranking is measured on each lesson before training on it: newly drawn elements of other layers."""
    learner = nets(key)
    results = [learner.work(Job(lesson(number), None)) for number in range(8)]
    assert results[0].ranking == pytest.approx(results[0].plain, abs=0.02)  # untrained nets add nothing
    assert all(0.4 < result.plain < 0.6 for result in results)  # magnitude says nothing of the sign of a gain
    assert results[-1].ranking > 0.8


def by_feature(number: int) -> Lesson:
    """Return elements whose gain has the sign of their only feature, of which gradients and magnitudes tell nothing."""
    index = lesson(number).index
    rng, n = np.random.default_rng([11, number]), len(index)
    accumulated, feature = rng.standard_normal(n).astype(np.float32), rng.choice([-1.0, 1.0], n)
    gradients = np.where(index < 700, 100.0, 0.01) * rng.standard_normal((DEPTH, n))
    seen = feature * np.sign(accumulated)
    rows = round_to(np.vstack([gradients, seen, accumulated]).astype(np.float32).reshape(-1), BF16)
    return Lesson(number, index, rows, np.abs(accumulated), (feature * np.abs(accumulated)).astype(np.float32))


@pytest.mark.parametrize("shared", [False, True])
def test_nets_learn_from_a_feature(shared: bool) -> None:
    learner = nets(features=1, shared=shared)
    results = [learner.work(Job(by_feature(number), None)) for number in range(8)]
    assert all(0.4 < result.plain < 0.6 for result in results)
    assert results[-1].ranking > 0.8


def test_one_net_learns_for_all_layers() -> None:
    """Also for one that it has seen nothing of: elements that are alike in units of their layers have the same score."""
    learner = nets(shared=True)
    results = [learner.work(Job(lesson(number), None)) for number in range(8)]
    assert results[-1].ranking > 0.8
    assert learner.nets.size == nets().nets.size // len(ENDS)
    learner.squares[:] = [4.0, 1.0, 1.0, 0.25]  # roots are powers of two, so that no bit is lost
    gradients = np.random.default_rng(5).standard_normal((DEPTH + 1, 700)).astype(np.float32)
    scores = []
    for lo, root in ((0, 2.0), (1000, 1.0), (6000, 0.5)):
        units = np.vstack([gradients[:DEPTH] * np.float32(root), gradients[DEPTH:]])
        scores.append(learner.score(Slice(lo, round_to(units.reshape(-1), BF16))))
    assert len(np.unique(scores[0])) > 20
    np.testing.assert_array_equal(scores[0], scores[1])
    np.testing.assert_array_equal(scores[0], scores[2])


@pytest.mark.parametrize("more", [{}, {"shared": True}], ids=["layer", "shared"])
@pytest.mark.parametrize("key", [PRODUCTS, SCORES])
def test_the_numpy_backend_learns_the_same_bits(key: int, more: dict[str, Any]) -> None:
    native, plain = nets(key, **more), nets(key, numpy_backend, **more)
    for number in range(2):
        first, second = (learner.work(Job(lesson(number), None)) for learner in (native, plain))
        assert first.ranking == second.ranking
    for name, value in native.state().items():
        np.testing.assert_array_equal(value, plain.state()[name], err_msg=name)
    rows = round_to(np.random.default_rng(1).standard_normal((DEPTH + 1) * 3000).astype(np.float32), BF16)
    part = Slice(600, rows)
    np.testing.assert_array_equal(native.score(part), plain.score(part))
    assert len(np.unique(native.score(part))) > 20


def test_a_slice_is_scored_as_its_pieces_are() -> None:
    learner = nets()
    for number in range(3):
        learner.work(Job(lesson(number), None))
    rows = round_to(np.random.default_rng(2).standard_normal((DEPTH + 1) * 6000).astype(np.float32), BF16).reshape(5, -1)
    whole = learner.score(Slice(0, rows.reshape(-1)))
    for cut in (1, 699, 700, 701, 5000, 5999):
        first = learner.score(Slice(0, np.ascontiguousarray(rows[:, :cut]).reshape(-1)))
        rest = learner.score(Slice(cut, np.ascontiguousarray(rows[:, cut:]).reshape(-1)))
        np.testing.assert_array_equal(np.append(first, rest), whole)


def test_a_sample_has_some_of_every_layer_and_of_the_candidates() -> None:
    candidates = np.arange(6000, 8000, 3)
    drawn = draw(np.random.default_rng(0), ENDS, 400, candidates)
    assert (np.diff(drawn) > 0).all()
    counts = np.diff(np.searchsorted(drawn, ENDS), prepend=0)
    assert counts[1] == 0
    assert (counts[[0, 2, 3]] > LEAST // 2).all()
    assert 150 < np.isin(drawn, candidates).sum() <= 280
    np.testing.assert_array_equal(drawn, draw(np.random.default_rng(0), ENDS, 400, candidates))


class Tables(nn.Module):
    """A parameter of each kind; one lies in memory by columns, another by channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.plain = nn.Linear(8, 12)
        self.turned = nn.Parameter(torch.randn(9, 7).t())
        self.convolution = nn.Conv2d(5, 6, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def tables(kind: Any, **options: Any) -> tuple[Layout, Features, Any]:
    """The layout of a model that was trained a little, the features of its elements, and the optimizer."""
    torch.manual_seed(4)
    model = Tables()
    layout = Layout(model)
    optimizer = kind(model.parameters(), lr=0.01, **options)
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    site = Site(model, layout, [SimpleNamespace(optimizer=optimizer)])
    return layout, Features(layout.slots, site, kinds=True), optimizer


def written(features: Features, index: Any, waiting: Any) -> Any:
    """What write() gives as float32, in which the sign of what waits is taken out again where nets take it out."""
    out = np.zeros(features.count * len(index), dtype=np.uint16)
    features.write(index, round_to(waiting[index], BF16), out)
    rows = widen(out, BF16).reshape(features.count, -1)
    rows[1:] *= np.copysign(np.float32(1), waiting[index])
    return rows


def coming(optimizer: Any, p: torch.Tensor) -> torch.Tensor:
    state = optimizer.state[p]
    if isinstance(optimizer, torch.optim.AdamW):
        move: torch.Tensor = state["exp_avg"] / state["exp_avg_sq"].sqrt()
    else:
        move = state["momentum_buffer"]
    return move / move.square().mean().sqrt()


@pytest.mark.parametrize(("kind", "options"), [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {})])
def test_what_nets_see_besides_gradients(kind: Any, options: dict[str, Any]) -> None:
    """Of all elements, and of some: an element's row and column are those of its tensor in any order of memory."""
    layout, features, optimizer = tables(kind, **options)
    waiting = np.random.default_rng(1).standard_normal(layout.size).astype(np.float32)
    waiting *= np.random.default_rng(2).choice([0.1, 1.0, 5.0], layout.size)
    features.measure(waiting)
    kinds = {"embedding.weight": 3.0, "plain.weight": 0.0, "turned": 0.0, "convolution.weight": 1.0}
    expected = np.zeros((4, layout.size), dtype=np.float32)
    for slot, p in zip(layout.slots, layout.params, strict=True):
        squares = slot.view(torch.from_numpy(waiting)).square()
        lines = [torch.ones(()), torch.ones(())]
        if p.dim() > 1:
            for d in (0, 1):
                mean = squares.mean([other for other in range(p.dim()) if other != d], keepdim=True)
                lines[d] = (mean / squares.mean()).sqrt()
        for row, value in enumerate((coming(optimizer, p), *lines, torch.tensor(kinds.get(slot.name, -1.0)))):
            slot.view(torch.from_numpy(expected[row])).copy_(value.expand(p.shape))
    every = written(features, np.arange(layout.size), waiting)
    np.testing.assert_allclose(every, expected, rtol=0.01)
    some = np.sort(np.random.default_rng(3).permutation(layout.size)[:50])
    np.testing.assert_array_equal(written(features, some, waiting), every[:, some])


def test_without_an_optimizer_nothing_is_known_of_its_step() -> None:
    """Nor of one that keeps no momentum, and what was measured before is what counts."""
    layout, features, _ = tables(torch.optim.SGD)
    waiting = np.ones(layout.size, dtype=np.float32)
    features.measure(waiting)
    rows = written(features, np.arange(layout.size), waiting)
    assert not rows[0].any()
    assert (rows[1:3] == 1).all()
    _, other, _ = tables(torch.optim.SGD, momentum=0.9)
    other.load(features.state())
    np.testing.assert_array_equal(written(other, np.arange(layout.size), waiting), rows)
    assert Features(layout.slots, None, kinds=True).kinds[0] == 0.0  # the shape of an embedding is a matrix
    with pytest.raises(ConfigurationError, match=r"the features\.lines in the state"):
        other.check({**other.state(), "features.lines": np.ones(3)})
    with pytest.raises(ConfigurationError, match=r"the features\.factors in the state"):
        other.check({**other.state(), "features.factors": other.factors * np.nan})


def test_results_come_in_the_order_of_jobs_and_failures_are_told() -> None:
    def work(job: int) -> int:
        if job == 3:
            raise ValueError("three")
        return 10 * job

    background: Background[int, int] = Background(work, cores=1.0)
    for job in range(5):
        background.submit(job)
    assert [background.take() for _ in range(3)] == [0, 10, 20]
    for _ in range(2):
        with pytest.raises(PredictorError, match="the predictor failed: ValueError: three"):
            background.take()
    background.close()


def test_the_thread_rests_unless_somebody_waits() -> None:
    """Two jobs whose CPU budget would take a minute finish at once if somebody waits for them."""

    def work(_: int) -> float:
        began = time.thread_time()
        while time.thread_time() - began < 0.02:
            pass
        return time.perf_counter()

    background: Background[int, float] = Background(work, cores=0.02 / 60)
    background.submit(0)
    background.submit(1)
    while background._results.empty():
        time.sleep(0.01)
    time.sleep(0.2)
    assert background._results.qsize() == 1  # it rests
    waited = time.perf_counter()
    first, second = background.take(), background.take()
    assert first < waited < second  # it is woken
    assert background.seconds >= 0.04
    background.close()
    assert not any(thread.name == "mpisparse-predictor" and thread.is_alive() for thread in threading.enumerate())
