"""A model that changes between steps: converted there and back it trains on; what cannot go on, all ranks say alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mpi4py import MPI
from ranks import PATHS, alike, bits, raised, seeded
from torch import nn

import mpisparse

both_paths = pytest.mark.parametrize("path", PATHS)
SCHEMES = ["exdyna", "dense", "speculative"]


def images() -> nn.Module:
    """A net with a parameter of four dimensions, the same in every run."""
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
    """Parameters and gradients have other memory then; the run is bitwise the one without."""
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
@pytest.mark.parametrize("what", CONVERSIONS)
@pytest.mark.parametrize("scheme", ["exdyna", "dense"])
def test_converted_on_one_rank(comm: MPI.Intracomm, scheme: str, what: str, path: str) -> None:
    """All ranks say which parameter, what it was and what it is; converted back, they go on and nothing is lost."""
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
    """No rank waits for another in scheme speculative, so that all hear of it later, in the same step."""
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
    """Of parameters that are exchanged, as in unfreezing by and by; others are refused and leave no trace."""
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
    """On one rank: all say so at the next step, and go on when it is undone."""
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
