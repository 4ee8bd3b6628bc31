"""What cannot be exchanged is refused on all ranks with a remedy; nothing hangs, nothing is silently damaged."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mpi4py import MPI
from ranks import PATHS, Ledger, alike, bits, everywhere, raised, seeded, total
from torch import nn

import mpisparse

pytestmark = pytest.mark.mpi

both_paths = pytest.mark.parametrize("path", PATHS)
refuse = mpisparse.ConfigurationError


def small() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(torch.randn(8, 20, generator=seeded(rank, step))).square().mean()


def spoil(model: nn.Module, name: str, at: int, value: float) -> None:
    """Replace one element of a parameter's next gradient."""
    p = dict(model.named_parameters())[name]

    def hook(grad: torch.Tensor) -> torch.Tensor:
        handle.remove()
        if grad.is_sparse:
            values = grad._values().clone()
            values.view(-1)[at] = value
            return torch.sparse_coo_tensor(grad._indices(), values, grad.shape, check_invariants=False)
        grad = grad.clone()
        grad.view(-1)[at] = value
        return grad

    handle = p.register_hook(hook)


# Non-finite gradients


@both_paths
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("scheme", ["exdyna", "dense"])
def test_a_nonfinite_gradient_on_one_rank(comm: MPI.Intracomm, path: str, value: float, scheme: str) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, scheme=scheme, density=0.1 if scheme == "exdyna" else None, accumulate=path)
    loss_of(model, comm.rank, 0).backward()
    sync.step()
    saved = sync.state_dict()
    model.zero_grad()
    bad = comm.size - 1
    if comm.rank == bad:
        spoil(model, "2.weight", 7, value)
    loss_of(model, comm.rank, 1).backward()
    text = raised(comm, mpisparse.NonFiniteGradientError, sync.step)
    assert f"rank {bad} has a non-finite gradient in 2.weight (flat index {20 * 30 + 30 + 7})" in text
    model.zero_grad()
    loss_of(model, comm.rank, 2).backward()
    if scheme == "exdyna" and path == "step" and comm.size > 1:  # seen before anything was added: the next step goes on
        sync.step()
        assert alike(comm, [p.grad for p in model.parameters()])
    else:
        assert "damaged since an earlier error" in raised(comm, mpisparse.GradientError, sync.step)
    sync.load_state_dict(saved)
    model.zero_grad()
    loss_of(model, comm.rank, 2).backward()
    sync.step()
    assert alike(comm, [p.grad for p in model.parameters()])
    assert everywhere(comm, sync.residual.isfinite().all())
    sync.close()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 6, sparse=True)
        self.linear = nn.Linear(6, 3)

    def loss(self, rank: int, step: int) -> torch.Tensor:
        return self.linear(self.words(torch.randint(0, 50, (9,), generator=seeded(rank, step)))).square().mean()


@both_paths
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_nonfinite_sparse_gradient(comm: MPI.Intracomm, path: str, nonfinite: str) -> None:
    if nonfinite == "skip" and path == "backward":
        return  # refused: see test_skip_needs_the_step_path
    model = Words()
    sync = mpisparse.GradientSync(model, density=0.1, accumulate=path, nonfinite=nonfinite)
    if comm.rank == 0:
        spoil(model, "words.weight", 11, float("nan"))
    model.loss(comm.rank, 0).backward()
    if nonfinite == "raise":
        assert "rank 0 has a non-finite gradient in words.weight" in raised(
            comm, mpisparse.NonFiniteGradientError, sync.step
        )
    else:
        sync.step()
        assert sync.stats.skipped
        assert not sync.residual.any()
        model.loss(comm.rank, 1).backward()
        sync.step()
        assert not sync.stats.skipped
    sync.close()


@both_paths
@pytest.mark.parametrize("make", [small, Words])
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_finite_gradient_that_overflows_the_residual(
    comm: MPI.Intracomm, path: str, make: Callable[[], nn.Module], nonfinite: str
) -> None:
    """The sum is not finite: found in the same pass, too late to skip the step, so it always raises."""
    if nonfinite == "skip" and path == "backward":
        return
    model = make()
    name = next(name for name, _ in model.named_parameters())
    sync = mpisparse.GradientSync(model, density=0.001, accumulate=path, nonfinite=nonfinite)
    bad = comm.size - 1
    if comm.rank == bad:
        sync.residual.fill_(3e38)
        spoil(model, name, 0, 3e38)
    (loss_of(model, comm.rank, 0) if make is small else model.loss(comm.rank, 0)).backward()
    text = raised(comm, mpisparse.NonFiniteGradientError, sync.step)
    assert f"rank {bad} has a non-finite gradient in {name}" in text
    sync.close()


@both_paths
@pytest.mark.parametrize(
    "options", [{"scheme": "dense", "codec": "bf16"}, {}, {"codec": "int8"}, {"reduce": "allreduce"}], ids=str
)
def test_ranks_whose_sum_overflows(comm: MPI.Intracomm, path: str, options: dict[str, str]) -> None:
    """Each rank is finite but the sum is not: all raise, and no rank continues with an infinity in p.grad."""
    model = nn.Linear(8, 4, bias=False)
    sync = mpisparse.GradientSync(model, density=1.0, accumulate=path, **options)
    (model.weight * 3e38).sum().backward()
    if comm.size == 1:
        sync.step()
        assert model.weight.grad.isfinite().all()
    else:
        text = raised(comm, mpisparse.NonFiniteGradientError, sync.step)
        assert "the sum over ranks is beyond what float32 holds in weight" in text
        assert everywhere(comm, model.weight.grad is None)
        assert "damaged" in raised(comm, mpisparse.GradientError, sync.step)
    sync.close()


def test_a_dense_mean_is_finite_though_the_sum_is_not(comm: MPI.Intracomm) -> None:
    """Summands are divided first."""
    model = nn.Linear(8, 4, bias=False)
    sync = mpisparse.GradientSync(model, scheme="dense")
    (model.weight * 3e38).sum().backward()
    sync.step()
    torch.testing.assert_close(model.weight.grad, torch.full((4, 8), 3e38))
    sync.close()


@pytest.mark.parametrize("scheme", ["exdyna", "dense"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_skip_is_as_if_the_step_had_not_been(comm: MPI.Intracomm, scheme: str, set_to_none: bool) -> None:
    def train(bad_steps: tuple[int, ...]) -> tuple[bytes, dict[str, Any]]:
        model = small()
        density = 0.1 if scheme == "exdyna" else None
        sync = mpisparse.GradientSync(model, scheme=scheme, density=density, nonfinite="skip")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(8):
            if step in (0, 3, 4) and step not in bad_steps:
                continue
            optimizer.zero_grad(set_to_none=set_to_none)
            if step in bad_steps and comm.rank == step % comm.size:
                spoil(model, "0.bias", 3, float("inf"))
            before = state_bits(sync)
            loss_of(model, comm.rank, step).backward()
            sync.step()
            assert everywhere(comm, sync.stats.skipped == (step in bad_steps))
            if step in bad_steps:
                assert everywhere(comm, all(p.grad is None for p in model.parameters()))
                assert everywhere(comm, state_bits(sync) == before)
                assert everywhere(comm, (sync.stats.selected, sync.stats.density) == (0, 0.0))
            optimizer.step()
            assert alike(comm, model.parameters())
        state = sync.state_dict()
        sync.close()
        return bits(model.parameters()), state

    with_skips, state = train((0, 3, 4))
    without, expected = train(())
    assert with_skips == without
    assert [*state] == [*expected]
    for key, value in expected.items():
        same = torch.equal(state[key], value) if isinstance(value, torch.Tensor) else state[key] == value
        assert same, key


def state_bits(sync: mpisparse.GradientSync) -> bytes:
    """Return the bits of everything that the next step depends on."""
    state = sync.state_dict()
    tensors = bits(value for value in state.values() if isinstance(value, torch.Tensor))
    return tensors + repr([value for value in state.values() if not isinstance(value, torch.Tensor)]).encode()


def test_skip_needs_the_step_path(comm: MPI.Intracomm) -> None:
    text = raised(comm, refuse, lambda: mpisparse.GradientSync(small(), nonfinite="skip", accumulate="backward"))
    assert 'nonfinite="skip" needs accumulate="step"' in text


# Options and models that differ


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"density": 3.0}, "density must be in (0, 1], got 3.0; for 3 % pass 0.03"),
        ({"density": 0.0}, "density must be in (0, 1], got 0.0"),
        ({"density": float("nan")}, "density must be in (0, 1], got nan"),
        ({"density": "0.1"}, "density must be a number in (0, 1], got '0.1'"),
        ({"scheme": "exdina"}, "unknown scheme 'exdina'; did you mean 'exdyna'?"),
        ({"codec": "int9"}, "unknown codec 'int9'; did you mean 'int8'?"),
        ({"acumulate": "step"}, "unknown option 'acumulate' for scheme \"exdyna\"; did you mean 'accumulate'?"),
        ({"accumulate": "backwards"}, "unknown accumulate 'backwards'; did you mean 'backward'?"),
        ({"segment_nbytes": 0}, "segment_nbytes must be a whole number >= 1, got 0"),
        ({"blocks": 1.5}, "blocks must be a whole number >= 1, got 1.5"),
        ({"reduce": "allreduce", "codec": "int8"}, 'reduce="allreduce" sums float32'),
        ({"scheme": "dense", "density": 0.5}, 'scheme "dense" sends everything'),
    ],
)
@pytest.mark.parametrize("alone", [False, True])
def test_bad_options(comm: MPI.Intracomm, options: dict[str, Any], words: str, alone: bool) -> None:
    """If one rank has them, all ranks raise its error."""
    bad = comm.size - 1
    mine = options if comm.rank == bad or not alone else {}
    text = raised(comm, refuse, lambda: mpisparse.GradientSync(small(), **mine))
    assert words in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"density": 0.002}, '"density": 0.002'),
        ({"codec": "int8"}, '"codec": "int8"'),
        ({"accumulate": "backward"}, '"accumulate": "backward"'),
        ({"scheme": "dense"}, "scheme dense"),
    ],
)
@pytest.mark.mpi(min_size=2)
def test_options_that_differ(comm: MPI.Intracomm, options: dict[str, Any], words: str) -> None:
    mine = options if comm.rank == comm.size - 1 else {}
    text = raised(comm, refuse, lambda: mpisparse.GradientSync(small(), **mine))
    assert f"rank {comm.size - 1} has" in text
    assert words in text


class Buffered(nn.Linear):
    def __init__(self, count: int) -> None:
        super().__init__(4, 3)
        self.register_buffer("seen", torch.zeros(count))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], str]] = {
    "shape": (lambda: nn.Linear(4, 3), lambda: nn.Linear(3, 4), "weight [4, 3] float32"),
    "number": (lambda: nn.Linear(4, 3), lambda: nn.Linear(4, 3, bias=False), "'tensor weight [3, 4] torch.float32'"),
    "type": (lambda: nn.Linear(4, 3), lambda: nn.Linear(4, 3).double(), "weight [3, 4] float64"),
    "frozen": (lambda: nn.Linear(4, 3), lambda: half_frozen(nn.Linear(4, 3)), "parameter bias"),
    "buffer": (lambda: Buffered(2), lambda: Buffered(5), "tensor seen [5]"),
    "order": (
        lambda: nn.Conv2d(2, 3, 3),
        lambda: nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last),
        "weight [3, 2, 3, 3] float32 [18, 1, 6, 2]",
    ),
}


def half_frozen(model: nn.Linear) -> nn.Linear:
    model.weight.requires_grad_(False)
    return model


@pytest.mark.parametrize("how", MODELS)
@pytest.mark.mpi(min_size=2)
def test_models_that_differ(comm: MPI.Intracomm, how: str) -> None:
    usual, other, words = MODELS[how]
    model = other() if comm.rank == comm.size - 1 else usual()
    text = raised(comm, refuse, lambda: mpisparse.GradientSync(model))
    assert f"rank {comm.size - 1} has" in text
    assert words in text, text
    assert "build the same model with the same options on every rank" in text


@pytest.mark.mpi(min_size=2)
def test_comparisons_at_different_steps(comm: MPI.Intracomm) -> None:
    """A rank that compares replicas where others do not would wait for them."""
    every = 0 if comm.rank == comm.size - 1 else 2
    text = raised(comm, refuse, lambda: mpisparse.GradientSync(small(), staleness=1, check_every=every))
    assert "check_every 0" in text
    assert f"rank {comm.size - 1} has" in text
    text = raised(comm, refuse, lambda: mpisparse.optim.OneBitAdamW(small().parameters(), check_every=every))
    assert '"check_every": 0' in text


def test_no_trainable_parameter_on_one_rank(comm: MPI.Intracomm) -> None:
    model = small()
    if comm.rank == comm.size - 1:
        model.requires_grad_(False)
    text = raised(comm, refuse, lambda: mpisparse.GradientSync(model))
    assert "Sequential has no parameter that requires a gradient" in text


@both_paths
def test_densities_set_differently(comm: MPI.Intracomm, path: str) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, density=0.1, accumulate=path)
    if comm.size > 1:
        if comm.rank == comm.size - 1:
            sync.density = 0.2
        loss_of(model, comm.rank, 0).backward()
        text = raised(comm, refuse, sync.step)
        ks = [sync.residual.numel() // 10] * (comm.size - 1) + [sync.residual.numel() // 5]
        assert f"density must be the same on all ranks; they select {ks} elements" in text
    for bad in (0.0, 1.5, "a lot"):
        with pytest.raises(refuse, match="density must be"):
            sync.density = bad
    assert sync.density in (0.1, 0.2)
    sync.close()


@both_paths
def test_a_refused_step_counts_no_gradient_twice(comm: MPI.Intracomm, path: str) -> None:
    """Once the densities agree again, the same step() exchanges the same gradient or asks for a new one."""
    model = small()
    sync = mpisparse.GradientSync(model, density=0.1, accumulate=path)
    if comm.size > 1:
        ledger = Ledger(comm, model, sync)
        sync.density = 0.2 if comm.rank == 0 else 0.1
        loss_of(model, comm.rank, 0).backward()
        raised(comm, refuse, sync.step)
        sync.density = 0.1
        try:
            ledger.step()
        except mpisparse.GradientError:
            ledger.given.zero_()
        model.zero_grad()
        ledger.restart()
        loss_of(model, comm.rank, 1).backward()
        ledger.step()
    sync.close()


@both_paths
@pytest.mark.parametrize("scheme", ["exdyna", "dense"])
def test_a_rank_without_backward_does_no_harm_to_the_others(comm: MPI.Intracomm, path: str, scheme: str) -> None:
    """All raise; the rank catches up, and the gradients of the others are in the mean once."""
    model = small()
    sync = mpisparse.GradientSync(model, scheme=scheme, density=1.0, accumulate=path)
    late = comm.size - 1
    own = [torch.zeros_like(p) for p in model.parameters()]
    twin = small()
    loss_of(twin, comm.rank, 0).backward()
    own = [p.grad for p in twin.parameters()]
    if comm.rank != late:
        loss_of(model, comm.rank, 0).backward()
    text = raised(comm, mpisparse.GradientError, sync.step)
    assert f"step() with no new gradient on rank {late}; call backward() first" in text
    if comm.rank == late:
        loss_of(model, comm.rank, 0).backward()
    outcome = "published"
    try:
        sync.step()
    except mpisparse.GradientError:
        outcome = "refused"
    assert len(set(comm.allgather(outcome))) == 1
    if outcome == "published":
        for p, grad in zip(model.parameters(), own, strict=True):
            mean = total(comm, grad) / comm.size
            assert everywhere(comm, torch.allclose(p.grad.double(), mean, rtol=1e-5, atol=1e-8)), "counted once"
    sync.close()


def test_in_flight_nobody_is_told_to_skip_steps(comm: MPI.Intracomm) -> None:
    """There steps cannot be skipped."""
    model = small()
    sync = mpisparse.GradientSync(model, density=1.0, staleness=1)
    if comm.rank == comm.size - 1:
        spoil(model, "2.weight", 7, float("nan"))
    loss_of(model, comm.rank, 0).backward()
    sync.step()
    model.zero_grad()
    loss_of(model, comm.rank, 1).backward()
    text = raised(comm, mpisparse.NonFiniteGradientError, sync.step)
    assert "has a non-finite gradient in 2.weight" in text
    assert text.endswith("; lower the learning rate or clip")
    sync.close()


@pytest.mark.parametrize(
    ("backward", "words"), [(False, "no new gradient on rank"), (True, "backward added to the gradient")]
)
def test_in_flight_a_refused_step_is_told_later(comm: MPI.Intracomm, backward: bool, words: str) -> None:
    """Other steps have followed it by then: what helps is a saved state, not another backward."""
    model, last = small(), comm.size - 1
    sync = mpisparse.GradientSync(model, density=1.0, staleness=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpisparse.attach(optimizer, sync)

    def step(number: int) -> None:
        if number != 3 or comm.rank != last or not backward:
            optimizer.zero_grad()
        if number != 3 or comm.rank != last or backward:
            loss_of(model, comm.rank, number).backward()
        optimizer.step()

    for number in range(3):
        step(number)
    saved, weights = sync.state_dict(), {name: p.clone() for name, p in model.state_dict().items()}
    step(3)
    text = raised(comm, mpisparse.GradientError, lambda: step(4))
    assert words in text
    assert "load a state saved before step 3, and call" in text
    model.load_state_dict(weights)
    sync.load_state_dict(saved)
    for number in range(4, 8):
        step(number)
    assert everywhere(comm, alike(comm, model.parameters()))
    sync.close()


# Steps that have nothing to exchange, or exchange too little


@both_paths
def test_step_without_backward(comm: MPI.Intracomm, path: str) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, density=0.1, accumulate=path)
    everyone = ", ".join(map(str, range(comm.size)))
    words = f"step() with no new gradient on rank {everyone}; call backward() first"
    assert words in raised(comm, mpisparse.GradientError, sync.step)
    loss_of(model, comm.rank, 0).backward()
    sync.step()
    assert words in raised(comm, mpisparse.GradientError, sync.step), "what is published is no new gradient"
    model.zero_grad()
    assert words in raised(comm, mpisparse.GradientError, sync.step)
    loss_of(model, comm.rank, 1).backward()
    sync.step()
    assert sync.stats.step == 1
    sync.close()


@both_paths
def test_step_inside_no_sync(comm: MPI.Intracomm, path: str) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, density=0.1, accumulate=path)
    with sync.no_sync():
        loss_of(model, comm.rank, 0).backward()
        assert "step() inside no_sync()" in raised(comm, RuntimeError, sync.step)
        with sync.no_sync():
            pass
        assert "step() inside no_sync()" in raised(comm, RuntimeError, sync.step)
    sync.step()
    with pytest.raises(KeyError), sync.no_sync():
        raise KeyError
    model.zero_grad()
    loss_of(model, comm.rank, 1).backward()
    sync.step()
    assert sync.stats.step == 1
    sync.close()


def add_parameter(model: nn.Module) -> None:
    model[0].extra = nn.Parameter(torch.zeros(3))


def add_layer(model: nn.Module) -> None:
    model.append(nn.Linear(5, 2))


def replace_parameter(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


@both_paths
@pytest.mark.parametrize("change", [add_parameter, add_layer, replace_parameter])
def test_parameters_added_later(comm: MPI.Intracomm, path: str, change: Callable[[nn.Module], None]) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, density=0.1, accumulate=path)
    loss_of(model, comm.rank, 0).backward()
    sync.step()
    nn.Linear(3, 3)  # another model's parameters are no concern
    model.zero_grad()
    loss_of(model, comm.rank, 1).backward()
    sync.step()
    model.zero_grad()
    change(model)
    loss_of(model, comm.rank, 2).backward()
    text = raised(comm, mpisparse.GradientError, sync.step)
    assert "the model has parameters that it did not have" in text
    assert "construct GradientSync (and the optimizer) after the change" in text
    raised(comm, mpisparse.GradientError, sync.step)
    sync.close()
    sync = mpisparse.GradientSync(model, density=0.1, accumulate=path)
    model.zero_grad()
    loss_of(model, comm.rank, 3).backward()
    sync.step()
    sync.close()


@both_paths
def test_a_frozen_parameter_unfrozen_later(comm: MPI.Intracomm, path: str) -> None:
    model = small()
    model[0].weight.requires_grad_(False)
    sync = mpisparse.GradientSync(model, density=0.1, accumulate=path)
    loss_of(model, comm.rank, 0).backward()
    sync.step()
    model.zero_grad()
    model[0].weight.requires_grad_(True)
    loss_of(model, comm.rank, 1).backward()
    assert "a frozen parameter requires a gradient now" in raised(comm, mpisparse.GradientError, sync.step)
    sync.close()


@both_paths
def test_a_parameter_frozen_later_is_one_without_a_gradient(comm: MPI.Intracomm, path: str) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, density=1.0, accumulate=path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            model[0].requires_grad_(False)
            frozen = model[0].weight.clone()
        optimizer.zero_grad()
        loss_of(model, comm.rank, step).backward()
        sync.step()
        optimizer.step()
        assert alike(comm, model.parameters())
    assert torch.equal(model[0].weight, frozen)
    sync.close()


# A GradientSync that is no longer the model's


@both_paths
def test_closed(comm: MPI.Intracomm, path: str) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, density=0.1, accumulate=path)
    sync.close()
    sync.close()
    loss_of(model, comm.rank, 0).backward()
    assert all(p.grad is not None for p in model.parameters()), "the hooks are off"
    assert "was closed, or another was made" in raised(comm, RuntimeError, sync.step)


@both_paths
def test_superseded(comm: MPI.Intracomm, path: str) -> None:
    model = small()
    first = mpisparse.GradientSync(model, density=0.1, accumulate=path)
    second = mpisparse.GradientSync(model, density=0.1, accumulate=path)
    ledger = Ledger(comm, model, second)
    for step in range(2):
        model.zero_grad()
        loss_of(model, comm.rank, step).backward()
        assert "another was made for the same model" in raised(comm, RuntimeError, first.step)
        ledger.step()
    assert not first.residual.any(), "the first takes no gradients any more"
    first.close()
    second.close()


# States


def changed(state: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**state, **changes}


def without(state: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in state.items() if k != key}


STATES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "scheme": (lambda s: changed(s, scheme="dense"), "saved with scheme 'dense', this is scheme 'exdyna'"),
    "format": (lambda s: changed(s, format=99), "saved with format 99"),
    "size": (lambda s: changed(s, size=s["size"] + 1), "saved with size"),
    "rank": (lambda s: changed(s, rank=s["rank"] + 1), "saved with rank"),
    "options": (
        lambda s: changed(s, options=s["options"].replace('"codec": "fp32"', '"codec": "int8"')),
        "saved with codec='int8', this is codec='fp32'",
    ),
    "model": (lambda s: changed(s, residual=torch.zeros(17)), "a model with 17 trainable elements"),
    "no residual": (lambda s: without(s, "residual"), "has no 'residual'"),
    "no density": (lambda s: without(s, "density"), "has no 'density'"),
    "no threshold": (lambda s: without(s, "step.controller.threshold"), "controller.threshold'"),
    "no step": (lambda s: without(s, "step.step"), "step"),
    "density": (lambda s: changed(s, density=7.0), "density"),
    "options that are no options": (lambda s: changed(s, options="{"), "options"),
    "residual that is none": (lambda s: changed(s, residual=None), "residual"),
    "residual of another shape": (lambda s: changed(s, residual=s["residual"].reshape(-1, 1)), "residual"),
    "residual not finite": (lambda s: changed(s, residual=s["residual"] / 0.0), "residual"),
    "edges of another model": (lambda s: changed(s, **{"step.edges": s["step.edges"][:-1]}), "edges"),
    "borders that do not fit": (lambda s: changed(s, **{"step.borders": s["step.borders"] * 2}), "borders"),
    "no dictionary": (lambda s: [1, 2], "state"),
}


@pytest.mark.parametrize("what", STATES)
def test_states_that_cannot_be_loaded(comm: MPI.Intracomm, what: str) -> None:
    """If one rank has such a state, all raise, none loads, and the run continues as if nothing had happened."""
    damage, words = STATES[what]
    model = small()
    sync = mpisparse.GradientSync(model, density=0.1, accumulate="backward")
    for step in range(2):
        model.zero_grad()
        loss_of(model, comm.rank, step).backward()
        sync.step()
    state = sync.state_dict()
    model.zero_grad()
    loss_of(model, comm.rank, 2).backward()
    sync.step()
    before = state_bits(sync)
    given = damage(state) if comm.rank == comm.size - 1 else state
    text = raised(comm, refuse, lambda: sync.load_state_dict(given))
    assert words in text, text
    assert everywhere(comm, state_bits(sync) == before), "all or none"
    sync.load_state_dict(state)
    assert everywhere(comm, torch.equal(sync.residual, state["residual"]))
    sync.close()


@both_paths
def test_a_state_is_a_copy_and_another_path_is_refused(comm: MPI.Intracomm, path: str) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, density=0.1, accumulate=path)
    loss_of(model, comm.rank, 0).backward()
    sync.step()
    state = sync.state_dict()
    saved = bits(v for v in state.values() if isinstance(v, torch.Tensor))
    model.zero_grad()
    loss_of(model, comm.rank, 1).backward()
    sync.step()
    assert bits(v for v in state.values() if isinstance(v, torch.Tensor)) == saved
    sync.close()
    other = mpisparse.GradientSync(model, density=0.1, accumulate="step" if path == "backward" else "backward")
    assert f"saved with accumulate='{path}'" in raised(comm, refuse, lambda: other.load_state_dict(state))
    other.close()


# Options and calls that change nothing


def test_an_option_without_effect_is_refused_on_all_ranks(comm: MPI.Intracomm) -> None:
    """Also if only one rank has it."""
    said = raised(comm, refuse, lambda: mpisparse.GradientSync(small(), beta=0.5, comm=comm))
    assert 'beta has no effect: codec "fp32" does not blend' in said
    one = {"alpha": 0.5} if comm.rank == comm.size - 1 else {}
    assert "alpha has no effect" in raised(comm, refuse, lambda: mpisparse.GradientSync(small(), comm=comm, **one))


@pytest.mark.parametrize(("scheme", "options"), [("exdyna", {}), ("dense", {}), ("predictive", {"adapt_k": False})])
def test_observing_without_effect_is_said_once(comm: MPI.Intracomm, scheme: str, options: dict[str, Any]) -> None:
    model = small()
    if scheme == "predictive":
        options = {**options, "validation": lambda: loss_of(model, 0, 0)}
    sync = mpisparse.GradientSync(model, scheme=scheme, comm=comm, **options)
    assert everywhere(comm, not sync.observes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        means = [sync.observe(float(comm.rank)) for _ in range(3)]
    said = [str(warning.message) for warning in caught]
    assert everywhere(comm, len(said) == (comm.rank == 0) and means == [(comm.size - 1) / 2] * 3)
    assert everywhere(comm, all(f'observe() has no effect with scheme "{scheme}"' in words for words in said))
    sync.close()


def test_a_state_may_differ_in_options_without_effect(comm: MPI.Intracomm) -> None:
    """Earlier versions accepted them: such a run resumes without them."""
    sync = mpisparse.GradientSync(small(), comm=comm)
    state = sync.state_dict()
    options = json.loads(state["options"])
    sync.load_state_dict({**state, "options": json.dumps({**options, "beta": 0.5, "alpha": 0.3})})
    said = raised(comm, refuse, lambda: sync.load_state_dict({**state, "options": json.dumps({**options, "blocks": 3})}))
    assert "saved with blocks=3" in said
    sync.close()
