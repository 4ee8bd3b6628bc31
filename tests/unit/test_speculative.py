"""Scheme speculative without MPI: influence, granularity, policies, updates of single weights, and indices as bytes."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from mpisparse.backends.device import load_backend
from mpisparse.errors import ConfigurationError
from mpisparse.model.layout import Layout
from mpisparse.schemes import configure
from mpisparse.schemes.speculative.granularity import Filter
from mpisparse.schemes.speculative.influence import Influence, Probe
from mpisparse.schemes.speculative.local import LocalUpdate, check_elementwise
from mpisparse.schemes.speculative.policy import Informed, Learned, Policy, Rule, Schedule, Seen
from mpisparse.schemes.speculative.weights import Tolerance, TwoSets
from mpisparse.wire.stretches import pack, unpack

Floats = NDArray[np.float32]

# Influence


class Quadratic(nn.Module):
    """w H w / 2 with a dense H; its gradient is H w, its Hessian H."""

    def __init__(self, n: int = 24) -> None:
        super().__init__()
        root = torch.randn(n, n, generator=torch.Generator().manual_seed(1)) / n**0.5
        self.hessian = root @ root.T + torch.diag(torch.linspace(0.5, 4.0, n))
        self.w = nn.Parameter(torch.randn(n, generator=torch.Generator().manual_seed(2)))

    def forward(self) -> torch.Tensor:
        return self.w @ self.hessian @ self.w / 2


def probe_of(model: nn.Module, loss: Any, epsilon: float = 1e-2) -> Probe:
    return Probe(model, Layout(model), loss, epsilon=epsilon, seed=3)


def test_curvature_of_a_quadratic() -> None:
    """One probe gives z (H z); the average of many converges to the diagonal of H."""
    model = Quadratic()
    probe = probe_of(model, model)
    rolling = Influence(24, rate=1.0, epsilon=1e-2)
    total = np.zeros(24)
    for step in range(400):
        loss, diagonal = probe.run(step, rank=0)
        signs = np.sign(np.random.Generator(np.random.Philox(key=[3, step << 20])).integers(0, 2, 24, dtype=np.int8) * 2 - 1)
        assert np.allclose(diagonal, signs * (model.hessian.numpy() @ signs), atol=2e-3)
        total += diagonal.numpy()
        rolling.learn(diagonal)
    off = model.hessian - torch.diag(torch.diag(model.hessian))
    deviation = off.square().sum(1).sqrt().numpy() / math.sqrt(400)
    assert (np.abs(total / 400 - torch.diag(model.hessian).numpy()) < 5 * deviation).all()
    assert (rolling.curvature - torch.diag(model.hessian)).abs().max() < 1.5
    assert loss == pytest.approx(model().item(), abs=0.05)


def test_influence_is_what_the_loss_gains() -> None:
    """epsilon |g| + epsilon^2 h / 2 is the change of loss when one weight of the quadratic moves uphill by epsilon."""
    model, epsilon = Quadratic(), 0.05
    gradient = (model.hessian @ model.w).detach()
    influence = Influence(24, rate=1.0, epsilon=epsilon)
    influence.learn(torch.diag(model.hessian).clone())
    influence.update(gradient)
    with torch.no_grad():
        for i in range(24):
            before, kept = model().double(), model.w[i].clone()
            model.w[i] += epsilon * gradient[i].sign()
            assert influence.scores[i] == pytest.approx(float(model().double() - before), abs=2e-5)
            model.w[i] = kept


def test_rolling_average() -> None:
    influence = Influence(3, rate=0.25, epsilon=2.0)
    for acc in ([1, -1, 0], [3, 0, 0]):
        influence.update(torch.tensor(acc, dtype=torch.float32))
    assert influence.scores.tolist() == [0.75 * 0.5 + 0.25 * 6, 0.75 * 0.5, 0.0]
    influence.learn(torch.tensor([0, 0, -1e9]))
    influence.update(torch.zeros(3))
    assert influence.scores[2] == 0.0  # never below


def of_updates(gradient: np.ndarray, moves: np.ndarray, curvature: np.ndarray | None) -> np.ndarray:
    """Influence by the coming updates, with the curvature or without."""
    influence = Influence(len(gradient), rate=1.0, epsilon=1e-3)
    if curvature is not None:
        influence.learn(torch.from_numpy(curvature.astype(np.float32)))
    influence.update(*(torch.from_numpy(each.astype(np.float32)) for each in (gradient, moves)))
    return influence.scores.numpy()


def test_influence_of_an_update_is_what_the_loss_falls_by() -> None:
    """-(g u + h u^2 / 2), weight by weight; an update after which the loss is higher is worth nothing."""
    model, rate = Quadratic(), 0.45
    gradient = (model.hessian @ model.w).detach()
    moves, worse = -rate * gradient, 0
    scores = of_updates(gradient.numpy(), moves.numpy(), torch.diag(model.hessian).numpy())
    with torch.no_grad():
        for i in range(24):
            before, kept = model().double(), model.w[i].clone()
            model.w[i] += moves[i]
            fell = float(before - model().double())
            assert scores[i] == pytest.approx(max(0.0, fell), abs=2e-5)
            worse += fell < 0
            model.w[i] = kept
    assert worse


@pytest.mark.parametrize(("rate", "least", "most"), [(0.01, 0.9, 1.0), (0.3, 0.0, 0.8), (0.45, 0.0, 0.7)])
def test_curvature_changes_the_choice_on_a_quadratic(rate: float, least: float, most: float) -> None:
    """Where steps are not small against 1 / h other weights are chosen, and the loss falls more; small steps do not care."""
    draw = np.random.default_rng(0)
    n, k = 2000, 200
    hessian, weights = draw.uniform(0.1, 6.0, n), draw.standard_normal(n)
    gradient = hessian * weights
    moves = -rate * gradient
    chosen = [set(np.argsort(-of_updates(gradient, moves, h), kind="stable")[:k].tolist()) for h in (hessian, None)]
    with_it, without = (
        sum(0.5 * hessian[i] * (weights[i] ** 2 - (weights[i] + moves[i]) ** 2) for i in each) for each in chosen
    )
    assert least <= len(chosen[0] & chosen[1]) / k <= most
    assert with_it >= without
    if rate > 0.1:
        assert with_it > 1.05 * without
    plain = [Influence(n, rate=1.0, epsilon=1e-3) for _ in range(2)]  # the perturbation of 1e-3, beside it
    plain[0].learn(torch.from_numpy(hessian.astype(np.float32)))
    for each in plain:
        each.update(torch.from_numpy(gradient.astype(np.float32)))
    alike = [set(np.argsort(-each.scores.numpy(), kind="stable")[:k].tolist()) for each in plain]
    assert len(alike[0] & alike[1]) >= 0.98 * k


def test_a_probe_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    x = torch.randn(5, 6)

    def traces() -> list[bytes]:
        tensors = [*model.state_dict().values(), torch.get_rng_state(), torch.from_numpy(np.random.get_state()[1].copy())]
        return [t.numpy().tobytes() for t in tensors]

    model(x).sum().backward()
    before, grads = traces(), [p.grad.clone() for p in model.parameters()]
    places = [p.data_ptr() for p in model.parameters()]
    probe = probe_of(model, lambda: model(x + float(np.random.rand())).square().mean())
    first, second = probe.run(4, 1), probe.run(4, 1)
    assert traces() == before
    assert [p.data_ptr() for p in model.parameters()] == places
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert first[0] == second[0]
    assert np.array_equal(first[1], second[1])
    assert not np.array_equal(first[1], probe.run(5, 1)[1])


def test_a_probe_must_give_a_loss() -> None:
    model = Quadratic()
    with pytest.raises(
        ConfigurationError, match=r"^probe\(\) must return a loss, a tensor of one element with a gradient; got 1\.5"
    ):
        probe_of(model, lambda: 1.5).run(0, 0)


# Granularity


def slots(*sizes: int) -> list[Any]:
    return Layout(nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])).slots


def filter_of(*sizes: int, largest: int | None = 10**9, threshold: float | None = None) -> Filter:
    return Filter(slots(*sizes), load_backend(), largest=largest, threshold=threshold, seed=0)


def test_fine_takes_the_most_influential_weights() -> None:
    scores = np.random.default_rng(0).permutation(1000).astype(np.float32) + 1
    passed = filter_of(300, 700).run(scores, 50, 1.0, 0)
    assert passed.index.tolist() == np.flatnonzero(scores > 950).tolist()
    assert passed.fine == (True, True)
    assert not passed.whole
    assert passed.threshold == 951


def test_fine_by_a_sample() -> None:
    """For a million weights the threshold comes from a sample of 1 %: about k pass, reproducibly."""
    scores = np.random.default_rng(0).exponential(size=1_000_000).astype(np.float32)
    passed = filter_of(400_000, 600_000).run(scores, 10_000, 1.0, 3)
    assert 7_000 < len(passed.index) <= 13_000
    assert np.array_equal(passed.index, np.flatnonzero(scores >= np.float32(passed.threshold)))
    assert np.array_equal(passed.index, filter_of(400_000, 600_000).run(scores, 10_000, 1.0, 3).index)


def test_coarse_takes_whole_layers_by_their_mean() -> None:
    scores = np.concatenate([np.full(10, 2.0), np.full(100, 3.0), np.full(5, 1.0), np.zeros(20)]).astype(np.float32)
    coarse = filter_of(10, 100, 5, 20)
    assert coarse.run(scores, 40, 0.0, 0).whole == ("1",)
    assert coarse.run(scores, 101, 0.0, 0).whole == ("1", "0")
    passed = coarse.run(scores, 134, 0.0, 0)
    assert passed.whole == ("1", "0", "2")  # what has no influence does not pass
    assert passed.index.tolist() == list(range(115))


def test_hybrid_is_fine_where_influence_is_uneven() -> None:
    rng = np.random.default_rng(0)
    uneven = np.where(rng.random(100) < 0.1, 10.0, 0.01)
    scores = np.concatenate([np.full(10, 1.0), uneven, np.full(10, 0.5)]).astype(np.float32)
    passed = filter_of(10, 100, 10).run(scores, 12, 1 / 3, 0)
    assert passed.fine == (False, True, False)
    assert passed.whole == ("0",)
    assert set(passed.index) <= set(range(10)) | set((np.flatnonzero(uneven > 1) + 10).tolist())


def test_large_layers_are_never_whole() -> None:
    scores = np.ones(1010, dtype=np.float32)
    scores[:1000] += np.arange(1000)
    passed = filter_of(1000, 10, largest=None).run(scores, 100, 0.0, 0)
    assert passed.fine == (True, False)
    assert passed.whole == ("1",)
    assert len(passed.index) == 10 + 100


def test_a_threshold_of_influence() -> None:
    scores = np.array([5, 1, 1, 1, 4, 4], dtype=np.float32)
    assert filter_of(4, 2, threshold=4.0).run(scores, 1, 1.0, 0).index.tolist() == [0, 4, 5]
    assert filter_of(4, 2, threshold=3.0).run(scores, 1, 0.0, 0).whole == ("1",)


# Policies


def seen(
    step: int, loss: float | None = None, confidence: float | None = None, nbytes: int = 1, seconds: float = 0.0
) -> Seen:
    return Seen(step, loss, confidence, nbytes, seconds)


def test_schedule_and_rule() -> None:
    assert [Schedule(10).share(step) for step in (0, 5, 10, 99)] == [0.0, 0.5, 1.0, 1.0]
    rule = Rule(10, budget=100)
    assert rule.share(0) == 0.0
    rule.learn(seen(0, confidence=0.6))
    assert rule.share(5) == pytest.approx((0.5 + 0.6) / 2)
    for step in range(20):
        rule.learn(seen(step, nbytes=101))
    assert rule.share(10) < 0.2  # a step that is too dear makes it coarser
    for step in range(60):
        rule.learn(seen(step, nbytes=99))
    assert rule.share(10) == pytest.approx((1.0 + 0.6) / 2)


def play(policy: Policy, steps: int, start: int = 0, loss: float = 100.0) -> tuple[list[float], float]:
    """Simulate losses that fall faster per byte with finer granularity, but ten times slower per second."""
    shares = []
    for step in range(start, start + steps):
        shares.append(policy.share(step))
        loss -= 0.01 + 0.05 * shares[-1]
        policy.learn(seen(step, loss=loss, nbytes=1000, seconds=1.0 + 50.0 * shares[-1]))
    return shares, loss


def test_the_learned_policy_finds_what_pays() -> None:
    shares, _ = play(Learned(seed=1, per_second=False, patience=100), 4000)
    assert np.mean(shares[:500]) < np.mean(shares[-1000:])
    assert np.mean(shares[-1000:]) > 0.7
    assert len(set(shares)) == 5  # it tried all


def test_the_learned_policy_counts_seconds_if_asked() -> None:
    shares, _ = play(Learned(seed=1, per_second=True, patience=100), 4000)
    assert np.mean(shares[-1000:]) < 0.3


def test_the_learned_policy_goes_on_where_it_was() -> None:
    whole, _ = play(Learned(seed=1, per_second=False, patience=100), 155)
    first = Learned(seed=1, per_second=False, patience=100)
    begun, loss = play(first, 87)
    second = Learned(seed=1, per_second=False, patience=100)
    second.check(first.state())
    second.load(first.state())
    assert begun + play(second, 68, 87, loss)[0] == whole


def play_by_confidence(policy: Policy, steps: int) -> tuple[list[float], list[float], float]:
    """Fine shares pay while confidence is high, coarse ones while it is low; it changes every 100 steps."""
    loss, shares = 1000.0, {0.0: list[float](), 1.0: list[float]()}
    for step in range(steps):
        confidence = float(step // 100 % 2)
        share = policy.share(step)
        shares[confidence].append(share)
        loss -= 0.01 + 0.1 * (share if confidence else 1.0 - share)
        policy.learn(seen(step, loss=loss, confidence=confidence, nbytes=1000))
    return shares[1.0], shares[0.0], loss


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_policy_that_sees_its_state_beats_the_bandit_where_that_counts(seed: int) -> None:
    falls = {}
    for name, policy in {
        "state": Informed(seed=seed, per_second=False, patience=100, horizon=1000),
        "bandit": Learned(seed=seed, per_second=False, patience=100),
    }.items():
        high, low, loss = play_by_confidence(policy, 12_000)
        falls[name] = 1000.0 - loss, np.mean(high[-3000:]) - np.mean(low[-3000:])
    assert falls["state"][1] > 0.2
    assert abs(falls["bandit"][1]) < 0.1
    assert falls["state"][0] > 1.1 * falls["bandit"][0]


def test_a_policy_that_sees_its_state_also_finds_what_always_pays() -> None:
    shares, _ = play(Informed(seed=1, per_second=False, patience=100, horizon=1000), 4000)
    assert np.mean(shares[-1000:]) > 0.7
    shares, _ = play(Informed(seed=1, per_second=True, patience=100, horizon=1000), 4000)
    assert np.mean(shares[-1000:]) < 0.3


def test_a_policy_that_sees_its_state_goes_on_where_it_was() -> None:
    def fresh() -> Informed:
        return Informed(seed=1, per_second=False, patience=100, horizon=50)

    whole, _ = play(fresh(), 255)
    first, second = fresh(), fresh()
    begun, loss = play(first, 187)
    second.check(first.state())
    second.load(first.state())
    assert begun + play(second, 68, 187, loss)[0] == whole
    for name, bad in {"weights": np.zeros(3), "view": np.full(5, np.nan), "most": math.inf}.items():
        with pytest.raises(ConfigurationError, match="the policy"):
            second.check({**first.state(), name: bad})


def test_the_learned_policy_needs_a_loss() -> None:
    policy = Learned(seed=0, per_second=False, patience=20)
    for step in range(19):
        policy.learn(seen(step))
    with pytest.raises(ConfigurationError, match=r"heard of no loss for 20 steps; call sync.note_loss"):
        policy.learn(seen(19))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_losses_that_are_not_finite_teach_nothing(bad: float) -> None:
    """They do not count in a window, and the policy's state remains loadable."""
    policy, twin = (Learned(seed=1, per_second=False, patience=100) for _ in range(2))
    for step in range(60):
        loss = 10.0 - 0.1 * step
        policy.learn(seen(step, loss=bad if step % 7 == 3 else loss))
        twin.learn(seen(step, loss=None if step % 7 == 3 else loss))
    policy.check(policy.state())
    assert policy.draws == 6
    assert repr(policy.state()) == repr(twin.state())


# Updates of single weights

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


def make_parameters() -> nn.ParameterList:
    torch.manual_seed(0)
    conv = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    return nn.ParameterList([nn.Parameter(torch.randn(7, 5)), nn.Parameter(conv), nn.Parameter(torch.randn(()))])


def flat_of(layout: Layout, tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().as_strided((t.numel(),), (1,)) for t in tensors]).clone()


def states_of(layout: Layout, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    names = {n for s in optimizer.state.values() for n, v in s.items() if n != "step" and isinstance(v, torch.Tensor)}
    return {name: flat_of(layout, [optimizer.state[p][name] for p in layout.params]) for name in names}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_only_the_filtered_weights_move(name: str) -> None:
    """They and their state change as with the whole optimizer; all others keep value and state, also with decay."""
    layout, twin = Layout(make_parameters()), Layout(make_parameters())
    optimizer, whole = OPTIMIZERS[name](layout.params), OPTIMIZERS[name](twin.params)
    local = LocalUpdate(layout, optimizer)
    index = np.array([0, 3, 8, 34, 35, 60, 82, 83])
    rest = np.setdiff1d(np.arange(layout.size), index)
    first = flat_of(layout, layout.params)
    for step in range(4):
        for group in (*optimizer.param_groups, *whole.param_groups):
            group["lr"] = 0.1 / (step + 1)  # as a schedule does
        gradient = torch.randn(layout.size, generator=torch.Generator().manual_seed(step))
        for slot, p in zip(twin.slots, twin.params, strict=True):
            p.grad = slot.view(gradient)
        whole.step()
        local.apply(index, gradient.numpy()[index])
    now, states = flat_of(layout, layout.params), states_of(layout, optimizer)
    assert torch.equal(now[rest], first[rest])
    assert torch.allclose(now[index], flat_of(twin, twin.params)[index], rtol=1e-6, atol=1e-7)
    for key, value in states_of(twin, whole).items():
        assert torch.allclose(states[key][index], value[index], rtol=1e-6, atol=1e-9), key
        assert not states[key][rest].any(), key


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_preview_is_the_coming_update(name: str) -> None:
    """It tells what the optimizer then does, and moves neither weights nor state, counters included."""
    layout = Layout(make_parameters())
    optimizer = OPTIMIZERS[name](layout.params)
    local = LocalUpdate(layout, optimizer)
    for step in range(3):
        gradient = torch.randn(layout.size, generator=torch.Generator().manual_seed(step))
        before, states = flat_of(layout, layout.params), copy.deepcopy(optimizer.state_dict()["state"])
        moves = local.preview(gradient)
        assert torch.equal(flat_of(layout, layout.params), before)
        assert repr(states) == repr(optimizer.state_dict()["state"])
        for slot, p in zip(layout.slots, layout.params, strict=True):
            p.grad = slot.view(gradient)
        optimizer.step()
        assert np.allclose(moves, flat_of(layout, layout.params) - before, rtol=1e-5, atol=1e-7)
        assert moves.abs().max() > 1e-3


def test_optimizers_that_are_not_elementwise_are_refused() -> None:
    parameters = make_parameters()
    with pytest.raises(ConfigurationError, match="LBFGS is not known to do element by element; use one of SGD, Adam"):
        check_elementwise(torch.optim.LBFGS(parameters))


@pytest.mark.parametrize("per", ["weight", "layer"])
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("value", [0.0, 0.02, math.inf])
def test_correction(per: str, relative: bool, value: float) -> None:
    """Exactly the own weights beyond the tolerance return to the global values and state; then none is beyond."""
    layout = Layout(make_parameters())
    optimizer = torch.optim.Adam(layout.params, lr=0.01)
    sets = TwoSets(layout, optimizer)
    gradient = torch.randn(layout.size, generator=torch.Generator().manual_seed(1))
    sets.swap()
    for slot, p in zip(layout.slots, layout.params, strict=True):
        p.grad = slot.view(gradient)
    optimizer.step()
    shared, shared_state = flat_of(layout, layout.params), states_of(layout, optimizer)
    sets.swap()
    noise = torch.randn(layout.size, generator=torch.Generator().manual_seed(2)) * 0.03
    LocalUpdate(layout, optimizer).apply(np.arange(layout.size), gradient.numpy())
    with torch.no_grad():
        for slot, p in zip(layout.slots, layout.params, strict=True):
            p += slot.view(noise)
    own, own_state = flat_of(layout, layout.params), states_of(layout, optimizer)
    drift = sets.correct(Tolerance(value, relative=relative, by_layer=per == "layer"))
    now, state = flat_of(layout, layout.params), states_of(layout, optimizer)
    bound = torch.full_like(own, value) if not relative else value * shared.abs()
    far = (own - shared).abs()
    back = far > bound
    if per == "layer":
        for slot in layout.slots:
            part = slice(slot.begin, slot.end)
            most = value * float(shared[part].abs().max()) if relative else value
            back[part] = float(far[part].max()) > most
    if value == 0.0:
        back[:] = True
    if math.isinf(value):
        back[:] = False
    else:
        assert back.any()
    assert torch.equal(now, torch.where(back, shared, own))
    for name in shared_state:
        assert torch.equal(state[name], torch.where(back, shared_state[name], own_state[name])), name
    assert drift.corrected == int(back.sum())
    assert drift.before == float(far.max())
    assert drift.after == float((now - shared).abs().max())


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("per", ["weight", "layer"])
@pytest.mark.parametrize(("mine", "shared"), [(math.nan, 0.5), (-math.inf, 0.5), (0.5, math.inf), (math.inf, math.inf)])
def test_what_is_not_finite_returns(mine: float, shared: float, per: str, relative: bool) -> None:
    """A non-finite weight exceeds every tolerance but infinity, with which nothing returns."""
    layout = Layout(make_parameters())
    sets = TwoSets(layout, torch.optim.SGD(layout.params, lr=0.1))
    sets.weights[1][0, 1, 0, 1] = shared
    with torch.no_grad():
        layout.params[1][0, 1, 0, 1] = mine
    kept = sets.correct(Tolerance(math.inf, relative=relative, by_layer=per == "layer"))
    assert (kept.before, kept.after, kept.corrected) == (math.inf, math.inf, 0)
    drift = sets.correct(Tolerance(0.02, relative=relative, by_layer=per == "layer"))
    assert (drift.before, drift.after) == (math.inf, 0.0)
    assert drift.corrected == (1 if per == "weight" else layout.params[1].numel())
    assert torch.equal(layout.params[1], sets.weights[1])


def test_the_own_set_whichever_the_model_holds() -> None:
    layout = Layout(make_parameters())
    optimizer = torch.optim.Adam(layout.params)
    sets = TwoSets(layout, optimizer)
    LocalUpdate(layout, optimizer).apply(np.arange(60), np.ones(60, dtype=np.float32))
    outside = sets.own()
    with sets.global_in_place():
        inside = sets.own()
        assert sets.held() == outside["digest"] == inside["digest"]
    assert sets.held() != outside["digest"]
    assert all(map(torch.equal, outside["weights"], inside["weights"]))
    assert repr(outside["state"]) == repr(inside["state"])
    assert outside["state"][0]["exp_avg"] is inside["state"][0]["exp_avg"]


def test_two_sets_are_two() -> None:
    """Swapping copies nothing, and there is no third copy of weights or state."""
    layout = Layout(make_parameters())
    optimizer = torch.optim.Adam(layout.params)
    sets = TwoSets(layout, optimizer)
    own, shared = [p.data_ptr() for p in layout.params], [w.data_ptr() for w in sets.weights]
    sets.swap()
    assert [p.data_ptr() for p in layout.params] == shared
    assert [w.data_ptr() for w in sets.weights] == own
    with sets.global_in_place():
        assert sets.swapped
    sets.swap()
    with sets.global_in_place():
        assert [p.data_ptr() for p in layout.params] == shared
    assert [p.data_ptr() for p in layout.params] == own


# Wire


@given(st.data())
def test_indices_survive_the_wire(data: st.DataObject) -> None:
    lo = data.draw(st.integers(0, 200_000))
    size = data.draw(st.integers(1, 200_000))
    stretches = data.draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(1, 400)), max_size=8))
    single = data.draw(st.lists(st.integers(0, size - 1), max_size=50))
    places = {i for start, length in stretches for i in range(start, min(start + length, size))} | set(single)
    index = np.array(sorted(places), dtype=np.int64) + lo
    backend = load_backend()
    payload = pack(backend, index, lo, lo + size)
    assert len(payload) % 4 == 0
    read, used = unpack(backend, payload, lo, lo + size, len(index))
    assert np.array_equal(read, index)
    assert used == len(payload)


def test_a_whole_layer_takes_few_bytes() -> None:
    index = np.arange(1000, 201_000)
    assert len(pack(load_backend(), index, 0, 300_000)) == 12


# Options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"staleness": -1}, "staleness must be a whole number >= 0, got -1"),
        ({"tolerance": -1.0}, "tolerance must be a number >= 0, got -1.0"),
        ({"granularity": "medium"}, "unknown granularity 'medium'"),
        ({"average": "received"}, "needs compensate=False"),
        ({"probe": 3}, "probe must be a function without arguments, got 3"),
        ({"nonfinite": "skip"}, "needs staleness=0"),
        ({"average_rate": 0.0}, "average_rate must be a number in"),
        ({"rate": 0.5}, "is called .average_rate. now"),
        ({"server": "rank1"}, "unknown server 'rank1'"),
    ],
)  # fmt: skip
def test_bad_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        configure("speculative", **options)
