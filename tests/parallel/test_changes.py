"""Models that change between steps: converted there and back they train on; otherwise all ranks raise the same error."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from ranks import PATHS, alike, bits, carried, everywhere, held, raised, seeded, total
from torch import nn

import mpisparse

pytestmark = pytest.mark.mpi

both_paths = pytest.mark.parametrize("path", PATHS)
SCHEMES = ["exdyna", "dense", "speculative"]


def images() -> nn.Module:
    """Build a net with a four-dimensional parameter, the same in every run."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 5))


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(4, 3, 5, 5, generator=seeded(rank, step))
    return model(x.to(model[0].weight.dtype)).square().mean()


def options_of(scheme: str, path: str) -> dict[str, Any]:
    return {"scheme": scheme, "accumulate": path, "density": None if scheme == "dense" else 0.2}


# Conversions


def there_and_back(model: nn.Module) -> None:
    model.double()
    model.float()
    model.to(memory_format=torch.channels_last)
    model.to(memory_format=torch.contiguous_format)


@both_paths
@pytest.mark.parametrize("scheme", SCHEMES)
def test_converted_there_and_back(comm: MPI.Intracomm, scheme: str, path: str) -> None:
    """Parameters and gradients get new memory; the run has the bits of an unconverted one."""
    trained = []
    for convert in (False, True):
        for set_to_none in (True, False):
            model = images()
            sync = mpisparse.GradientSync(model, **options_of(scheme, path))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            mpisparse.attach(optimizer, sync)
            for step in range(5):
                if convert and step in (2, 3):
                    there_and_back(model)
                optimizer.zero_grad(set_to_none=set_to_none)
                loss_of(model, comm.rank, step).backward()
                if convert and step == 4:
                    there_and_back(model)
                optimizer.step()
            sync.synchronize()
            assert alike(comm, model.parameters())
            trained.append(bits([*model.parameters(), sync.residual]))
            sync.close()
    assert len(set(trained)) == 1


@both_paths
def test_a_published_gradient_that_was_converted_must_be_zeroed_too(comm: MPI.Intracomm, path: str) -> None:
    model = images()
    sync = mpisparse.GradientSync(model, density=0.5, accumulate=path)
    loss_of(model, comm.rank, 0).backward()
    sync.step()
    there_and_back(model)
    loss_of(model, comm.rank, 1).backward()
    assert "call zero_grad() after each optimizer step" in raised(comm, mpisparse.GradientError, sync.step)
    sync.close()


CONVERSIONS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "half": (lambda model: model.bfloat16(), "is bfloat16 [4, 3, 3, 3]"),
    "double": (lambda model: model.double(), "is float64 [4, 3, 3, 3]"),
    "order": (lambda model: model.to(memory_format=torch.channels_last), "with strides [27, 1, 9, 3] on cpu now"),
    "shape": (lambda model: setattr(model[0].weight, "data", torch.zeros(4, 3, 2, 3)), "is float32 [4, 3, 2, 3]"),
}


@both_paths
@pytest.mark.parametrize(("scheme", "what"), [("dense", "half"), *(("exdyna", what) for what in CONVERSIONS)])
def test_converted_on_one_rank(comm: MPI.Intracomm, scheme: str, what: str, path: str) -> None:
    """All ranks name the parameter, its old and its new type; converted back, they continue and nothing is lost."""
    convert, words = CONVERSIONS[what]
    model = images()
    sync = mpisparse.GradientSync(model, **options_of(scheme, path))
    loss_of(model, comm.rank, 0).backward()
    sync.step()
    model.zero_grad()
    before, weight = sync.residual.clone(), model[0].weight.data
    if comm.rank == comm.size - 1:
        convert(model)
    if what != "shape" or comm.rank != comm.size - 1:
        loss_of(model, comm.rank, 1).backward()
    text = raised(comm, mpisparse.GradientError, sync.step)
    assert "parameter 0.weight was float32 [4, 3, 3, 3] with strides [27, 9, 3, 1] on cpu" in text
    assert words in text
    assert path == "backward" or torch.equal(sync.residual, before), "a refused step adds nothing"
    if what == "shape":
        model[0].weight.data = weight
        model.zero_grad()
    else:
        model.float()
        model.to(memory_format=torch.contiguous_format)
    if what == "shape":
        loss_of(model, comm.rank, 1).backward()
    sync.step()
    assert alike(comm, [p.grad for p in model.parameters()])
    sync.close()


@pytest.mark.parametrize("what", CONVERSIONS)
def test_converted_on_one_rank_while_results_are_in_flight(comm: MPI.Intracomm, what: str) -> None:
    """In scheme speculative no rank waits for another, so all learn of it later, in the same step."""
    convert, words = CONVERSIONS[what]
    model = images()
    sync = mpisparse.GradientSync(model, scheme="speculative", density=0.2, staleness=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpisparse.attach(optimizer, sync)

    def train() -> None:
        for step in range(10):
            if step == 3 and comm.rank == comm.size - 1:
                convert(model)
            optimizer.zero_grad()
            if step < 3 or what != "shape" or comm.rank != comm.size - 1:
                loss_of(model, comm.rank, step).backward()
            optimizer.step()

    text = raised(comm, mpisparse.GradientError, train)
    assert f"step 3 failed on rank {comm.size - 1}: parameter 0.weight was float32 [4, 3, 3, 3]" in text
    assert words in text
    sync.close()


def test_a_gradient_of_another_type_than_its_parameter(comm: MPI.Intracomm) -> None:
    """The pass that adds gradients would read beyond its end."""
    model = nn.Linear(64, 64).bfloat16()
    sync = mpisparse.GradientSync(model, density=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
        p.data = p.data.float()
    text = raised(comm, mpisparse.GradientError, sync.step)
    assert "parameter weight was bfloat16 [64, 64]" in text
    for p in model.parameters():
        p.grad = None
        p.grad = torch.ones_like(p)
        p.data = p.data.bfloat16()
    assert "the gradient of parameter weight is float32 [64, 64] on cpu" in raised(comm, mpisparse.GradientError, sync.step)
    sync.close()


# What the optimizer is given


def test_parameter_groups_added_later(comm: MPI.Intracomm) -> None:
    """Groups of exchanged parameters are accepted, as in gradual unfreezing; others are refused without side effects."""
    model, other = images(), nn.Linear(3, 7)
    sync = mpisparse.GradientSync(model, density=0.2)
    optimizer = torch.optim.SGD(model[3].parameters(), lr=0.1)
    handle = mpisparse.attach(optimizer, sync)
    refuse = mpisparse.ConfigurationError
    text = raised(comm, refuse, lambda: optimizer.add_param_group({"params": other.parameters()}))
    assert "holds a parameter of shape [7, 3] that GradientSync does not exchange: the ranks would drift apart" in text
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
    before = model[0].weight.clone()
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, comm.rank, step).backward()
        optimizer.step()
        assert alike(comm, model.parameters())
    assert not torch.equal(model[0].weight, before)
    handle.remove()
    optimizer.add_param_group({"params": other.parameters()})
    sync.close()


def test_groups_changed_by_hand(comm: MPI.Intracomm) -> None:
    """A change on one rank makes all ranks raise at the next step; they continue when it is undone."""
    model, other = images(), nn.Linear(3, 7)
    other.weight.requires_grad_(False)
    sync = mpisparse.GradientSync(model, density=0.2)
    optimizer = torch.optim.SGD([*model.parameters(), other.weight], lr=0.1)
    mpisparse.attach(optimizer, sync)
    last = comm.rank == comm.size - 1

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_of(model, comm.rank, number).backward()
        optimizer.step()

    step(0)
    if last:
        optimizer.param_groups[0]["params"].append(other.bias)
    assert "holds a parameter of shape [7] that" in raised(comm, mpisparse.GradientError, lambda: step(1))
    if last:
        optimizer.param_groups[0]["params"].pop()
        other.weight.requires_grad_(True)
    assert "holds a parameter of shape [7, 3] that" in raised(comm, mpisparse.GradientError, lambda: step(2))
    other.weight.requires_grad_(False)
    step(3)
    if last:
        optimizer.param_groups[0]["params"][0] = other.bias  # as many as before
    assert "holds a parameter of shape [7] that" in raised(comm, mpisparse.GradientError, lambda: step(4))
    assert alike(comm, model.parameters())
    sync.close()


def test_parameters_the_model_got_on_one_rank(comm: MPI.Intracomm) -> None:
    model = images()
    sync = mpisparse.GradientSync(model, density=0.2)
    if comm.rank == comm.size - 1:
        model.append(nn.Linear(5, 2))
    loss_of(model, comm.rank, 0).backward()
    text = raised(comm, mpisparse.GradientError, sync.step)
    assert "the model has parameters that it did not have when GradientSync was constructed" in text
    sync.close()


# Freezing

FREEZING: list[dict[str, Any]] = [
    {},
    {"accumulate": "backward"},
    {"codec": "momentum-fp32", "density": 0.1},
    {"scheme": "momentum"},
    {"scheme": "momentum", "accumulate": "backward"},
    {"scheme": "dense", "density": None},
    {"scheme": "dgc"},
    {"scheme": "dgc", "accumulate": "backward"},
    {"scheme": "randomk"},
    {"scheme": "sidco"},
    {"scheme": "threshold"},
    {"scheme": "topk"},
]


@pytest.mark.parametrize("options", FREEZING, ids=lambda o: "-".join(map(str, o.values())) or "exdyna")
def test_frozen_midway_and_set_free_again(comm: MPI.Intracomm, options: dict[str, Any]) -> None:
    """A frozen parameter does not move, whatever momentum and decay; its residuals are kept until it is unfrozen."""
    model = images()
    sync = mpisparse.GradientSync(model, **{"density": 0.05, **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    mpisparse.attach(optimizer, sync)
    weight, begin = model[3].weight, sum(p.numel() for p in model[0].parameters())
    part = slice(begin, begin + weight.numel())
    before, kept = weight.clone(), torch.empty(0)
    for step in range(9):
        optimizer.zero_grad()
        if step == 6:
            weight.requires_grad_(True)
        loss_of(model, comm.rank, step).backward()
        if step == 3:  # its gradient of this step is there already, and waits too
            own = torch.zeros(weight.numel()) if weight.grad is None else weight.grad.flatten().clone()
            kept, before = total(comm, held(sync)[part] + own), weight.clone()
            weight.requires_grad_(False)
        optimizer.step()
        assert alike(comm, model.parameters())
        if 3 <= step < 6:
            assert weight.grad is None
            assert everywhere(comm, torch.equal(weight, before))
            assert torch.allclose(total(comm, held(sync)[part]), kept, rtol=1e-5, atol=1e-7)
            assert sync.k == max(1, int((sync.density * (sync.residual.numel() - weight.numel())) + 1e-6))
            assert options or abs(sync.stats.density - 0.05) < 0.02
    assert not torch.equal(weight, before), "it moves on"
    sync.close()


@pytest.mark.parametrize(("staleness", "codec"), [(0, "fp32"), (2, "fp32"), (1, "momentum-fp32"), (2, "momentum-fp32")])
@pytest.mark.filterwarnings("ignore:an adaptive optimizer")
def test_frozen_while_results_are_in_flight(comm: MPI.Intracomm, staleness: int, codec: str) -> None:
    """Values in flight of a frozen parameter return to the residuals; a probe does not need its gradient."""
    model = images()
    x = torch.randn(4, 3, 5, 5, generator=seeded(9, 9))
    probe = {"probe": lambda: model(x).square().mean(), "probe_every": 2}
    options = {"density": 0.2, "staleness": staleness, "codec": codec, **probe}
    sync = mpisparse.GradientSync(model, scheme="speculative", **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    mpisparse.attach(optimizer, sync)
    weight, begin = model[3].weight, sum(p.numel() for p in model[0].parameters())
    part = slice(begin, begin + weight.numel())

    def shared() -> torch.Tensor:
        with sync.global_weights():
            return weight.detach().clone()

    def in_flight() -> torch.Tensor:
        state = sync.state_dict()
        mean = carried(state, sync.residual.numel())
        for result in state.get("step.flight", ()):
            mean[torch.as_tensor(result["index"])] += torch.as_tensor(result["mean"]).double()
        return mean[part]

    before = kept = torch.empty(0)
    for step in range(10):
        optimizer.zero_grad()
        if step == 7:
            weight.requires_grad_(True)
        loss_of(model, comm.rank, step).backward()
        if step == 4:
            kept = total(comm, sync.residual[part].double() + weight.grad.flatten().double() + in_flight())
            before = shared()
            weight.requires_grad_(False)
        optimizer.step()
        if 4 <= step < 7:
            assert everywhere(comm, torch.equal(shared(), before) and torch.equal(weight, before))
            now = total(comm, sync.residual[part].double() + in_flight())
            assert torch.allclose(now, kept, rtol=1e-4, atol=1e-7)
            blending = carried(sync.state_dict(), sync.residual.numel())[part]
            assert everywhere(comm, step < 3 + staleness or not blending.any()), "it goes on being sent"
    sync.synchronize()
    assert alike(comm, model.parameters())
    assert not torch.equal(weight, before)
    sync.close()


@pytest.mark.parametrize("scheme", ["exdyna", "speculative"])
@pytest.mark.mpi(min_size=2)
def test_frozen_on_one_rank(comm: MPI.Intracomm, scheme: str) -> None:
    model = images()
    sync = mpisparse.GradientSync(model, scheme=scheme, density=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpisparse.attach(optimizer, sync)

    def train() -> None:
        for step in range(6):
            if step == 2 and comm.rank == comm.size - 1:
                model[3].weight.requires_grad_(False)
            optimizer.zero_grad()
            loss_of(model, comm.rank, step).backward()
            optimizer.step()

    text = raised(comm, mpisparse.GradientError, train)
    assert f"the ranks have frozen different parameters: rank 0 none, rank {comm.size - 1} 3.weight" in text
    sync.close()


@both_paths
def test_resumed_while_frozen(comm: MPI.Intracomm, path: str) -> None:
    """The state includes the waiting values, so a resumed run has the same bits, frozen or not."""
    trained = []
    for stop in (False, True):
        model = images()
        sync = mpisparse.GradientSync(model, density=0.05, accumulate=path, codec="momentum-fp32")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            model[0].requires_grad_(step not in (2, 3))
            if stop and step == 3:
                state = sync.state_dict()
                assert everywhere(comm, state["residual"][: model[0].weight.numel()].any())
                sync.close()
                model[0].requires_grad_(True)
                sync = mpisparse.GradientSync(model, density=0.05, accumulate=path, codec="momentum-fp32")
                sync.load_state_dict(state)
                model[0].requires_grad_(False)
            optimizer.zero_grad()
            loss_of(model, comm.rank, step).backward()
            sync.step()
            optimizer.step()
        trained.append(bits([*model.parameters(), sync.residual]))
        sync.close()
    assert trained[0] == trained[1]


FREEZING: list[dict[str, Any]] = [
    {"density": 0.1, "codec": "int8"}, {"density": 0.1, "accumulate": "backward", "codec": "momentum-int8"},
    {"density": 0.1, "staleness": 1}, {"density": 0.1, "overlap": True, "bucket_mb": 0.0005},
    {"scheme": "dense", "codec": "int4"}, {"scheme": "speculative", "density": 0.1}, {"scheme": "drift", "density": 0.1},
]  # fmt: skip


@pytest.mark.parametrize("options", FREEZING, ids=lambda options: "-".join(map(str, options.values())))
def test_frozen_and_set_free_at_random_around_saving_and_loading(
    comm: MPI.Intracomm, directory: Path, options: dict[str, Any]
) -> None:
    """Parameters are frozen, and others set free, before saving, between saving and loading, and after it."""
    for seed in range(3):
        trained = []
        for stops in (False, True):
            draws = random.Random(seed)
            run = beginning(options)
            for step in range(10):
                model = run["model"]
                saves, frozen = draws.random() < 0.3, [draws.random() < 0.4 for _ in model.parameters()]
                frozen[draws.randrange(len(frozen))] = False
                if saves and stops:
                    mpisparse.checkpoint.save(directory / str(seed), step=step, **run)
                for p, stays in zip(model.parameters(), frozen, strict=True):
                    p.requires_grad_(not stays)
                if saves and stops:
                    run["sync"].close()
                    run = beginning(options)
                    assert mpisparse.checkpoint.load(directory / str(seed), **run) == step
                    for p, stays in zip(run["model"].parameters(), frozen, strict=True):
                        p.requires_grad_(not stays)
                run["optimizer"].zero_grad()
                loss_of(run["model"], comm.rank, step).backward()
                run["optimizer"].step()
            run["sync"].synchronize()
            trained.append(bits([*run["model"].parameters(), run["sync"].residual]))
            run["sync"].close()
        assert everywhere(comm, trained[0] == trained[1]), seed


def beginning(options: dict[str, Any]) -> dict[str, Any]:
    model = images()
    sync = mpisparse.GradientSync(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    mpisparse.attach(optimizer, sync)
    return {"model": model, "sync": sync, "optimizer": optimizer}


def test_what_came_before_the_freezing_waits_once(comm: MPI.Intracomm) -> None:
    """A refused step consumes nothing, and neither does synchronize() after it."""
    model = images()
    sync = mpisparse.GradientSync(model, density=0.2)
    loss_of(model, comm.rank, 0).backward()
    given = model[3].bias.grad.clone()
    model[3].bias.requires_grad_(False)
    if comm.rank == comm.size - 1:
        kept = [p.grad for p in model.parameters()]
        model.zero_grad()
    raised(comm, mpisparse.GradientError, sync.step)
    sync.synchronize()
    if comm.rank == comm.size - 1:
        for p, grad in zip(model.parameters(), kept, strict=True):
            p.grad = grad
        torch.autograd.backward(model[0].bias, torch.zeros(4))
    sync.step()
    waiting = sync.residual[-5:].clone()
    sync.close()
    assert everywhere(comm, torch.equal(waiting, given))


def test_a_skipped_step_leaves_nothing_of_a_frozen_parameter(comm: MPI.Intracomm) -> None:
    model = images()
    sync = mpisparse.GradientSync(model, density=0.2, nonfinite="skip")
    (loss_of(model, comm.rank, 0) * float("inf")).backward()
    model[3].bias.requires_grad_(False)
    sync.step()
    sync.synchronize()
    sound, skipped = bool(torch.isfinite(sync.residual).all()), sync.stats.skipped
    sync.close()
    assert everywhere(comm, skipped and sound)


@pytest.mark.parametrize("one", [False, True])
def test_all_frozen_while_results_are_in_flight(comm: MPI.Intracomm, one: bool) -> None:
    """Everything is frozen on all ranks, or on the last one only."""
    model = images()
    sync = mpisparse.GradientSync(model, scheme="speculative", density=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpisparse.attach(optimizer, sync)

    def steps() -> None:
        for number in range(1, 6):
            optimizer.zero_grad()
            if model[0].weight.requires_grad:
                loss_of(model, comm.rank, number).backward()
            optimizer.step()

    loss_of(model, comm.rank, 0).backward()
    optimizer.step()
    if not one or comm.rank == comm.size - 1:
        model.requires_grad_(False)
    assert "all parameters are frozen" in raised(comm, mpisparse.GradientError, steps)
    sync.close()


def test_all_frozen(comm: MPI.Intracomm) -> None:
    model = images()
    sync = mpisparse.GradientSync(model, density=0.2)
    loss_of(model, comm.rank, 0).backward()
    model.requires_grad_(False)
    assert "all parameters are frozen" in raised(comm, mpisparse.GradientError, sync.step)
    sync.close()
