"""All ways to step a torch optimizer: equal to a plain run on the mean gradient, with a correct published buffer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mpi4py import MPI
from ranks import PATHS, Ledger, alike, bits, everywhere, lawful_steps, published, raised, seeded, total
from torch import nn

import mpisparse

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:an adaptive optimizer")]
both_paths = pytest.mark.parametrize("path", PATHS)
Make = Callable[..., torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adam": lambda params, **how: torch.optim.Adam(params, lr=0.01, **how),
    "adamw": lambda params, **how: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, **how),
    "nesterov": lambda params, **how: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, **how),
}
HOW: dict[str, dict[str, bool]] = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def convolutional() -> nn.Module:
    """Build parameters in two memory orders, each with a bias."""
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(54, 5))
    return model.to(memory_format=torch.channels_last)


def loss_of(model: nn.Module, generator: torch.Generator, batch: int = 4) -> torch.Tensor:
    images = torch.randn(batch, 3, 5, 5, generator=generator).to(memory_format=torch.channels_last)
    return model(images).square().mean()


def set_mean_gradient(model: nn.Module, size: int, step: int) -> None:
    """Set p.grad to the mean over the batches of all ranks, in this process alone."""
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for rank in range(size):
        model.zero_grad()
        loss_of(model, seeded(rank, step)).backward()
        for mean, p in zip(sums, model.parameters(), strict=True):
            mean += p.grad / size
    for mean, p in zip(sums, model.parameters(), strict=True):
        p.grad = mean


def assert_trained_alike(model: nn.Module, plain: nn.Module) -> None:
    for p, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, expected, rtol=1e-4, atol=2e-6)


@both_paths
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.pairs
def test_density_one_trains_as_one_process_on_the_mean(comm: MPI.Intracomm, name: str, how: str, path: str) -> None:
    model = convolutional()
    plain = copy.deepcopy(model)
    sync = mpisparse.GradientSync(model, density=1.0, accumulate=path)
    optimizer = OPTIMIZERS[name](model.parameters(), **HOW[how])
    expected = OPTIMIZERS[name](plain.parameters(), foreach=False)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model, seeded(comm.rank, step)).backward()
        sync.step()
        optimizer.step()
        set_mean_gradient(plain, comm.size, step)
        expected.step()
    sync.close()
    assert_trained_alike(model, plain)


@both_paths
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.pairs
def test_nothing_is_lost_at_a_low_density(comm: MPI.Intracomm, name: str, how: str, path: str) -> None:
    """Outside the union the published gradient is zero, whatever an optimizer wrote into it: otherwise sums would be off."""
    model = convolutional()
    sync = mpisparse.GradientSync(model, density=0.05, accumulate=path)
    optimizer = OPTIMIZERS[name](model.parameters(), **HOW[how])
    for _ in lawful_steps(comm, model, sync, optimizer, loss_of, 4):
        assert everywhere(comm, all(p.grad.stride() == p.stride() for p in model.parameters()))
        assert everywhere(comm, published(model).count_nonzero() <= sync.stats.selected)


@both_paths
@pytest.mark.parametrize("set_to_none", [True, False])
def test_foreach_nesterov_writes_into_the_gradient_and_the_next_step_clears_it(
    comm: MPI.Intracomm, path: str, set_to_none: bool
) -> None:
    model = convolutional()
    sync = mpisparse.GradientSync(model, density=0.02, accumulate=path)
    optimizer = OPTIMIZERS["nesterov"](model.parameters(), foreach=True)
    wrote = []
    for step in range(6):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, seeded(comm.rank, step)).backward()
        sync.step()
        mean = published(model)
        outside = torch.ones(len(mean), dtype=torch.bool)
        outside[sync._gradients.published.union] = False
        assert not mean[outside].any()
        optimizer.step()
        wrote.append(bool(published(model)[outside].any()))
    assert all(wrote[1:]), "without this the test shows nothing"
    sync.close()


@both_paths
@pytest.mark.parametrize("how", HOW)
@pytest.mark.singles
def test_zeroing_in_place_trains_bitwise_as_setting_to_none(comm: MPI.Intracomm, how: str, path: str) -> None:
    trained = []
    for set_to_none in (True, False):
        torch.manual_seed(3)
        model = convolutional()
        sync = mpisparse.GradientSync(model, density=0.05, accumulate=path)
        optimizer = OPTIMIZERS["nesterov"](model.parameters(), **HOW[how])
        for step in range(6):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(model, seeded(comm.rank, step)).backward()
            sync.step()
            optimizer.step()
        trained.append(bits([*model.parameters(), sync.residual]))
        sync.close()
    assert trained[0] == trained[1]


@both_paths
@pytest.mark.parametrize("schedule", ["steps", "one cycle", "plateau"])
def test_learning_rate_schedulers(comm: MPI.Intracomm, path: str, schedule: str) -> None:
    def make(params: Any) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        lr = torch.optim.lr_scheduler
        if schedule == "one cycle":
            return optimizer, lr.OneCycleLR(optimizer, 0.2, total_steps=8)
        if schedule == "plateau":
            return optimizer, lr.ReduceLROnPlateau(optimizer, patience=0)
        return optimizer, lr.StepLR(optimizer, 2, 0.3)

    model = convolutional()
    plain = copy.deepcopy(model)
    sync = mpisparse.GradientSync(model, density=1.0, accumulate=path)
    optimizer, scheduler = make(model.parameters())
    expected, expected_scheduler = make(plain.parameters())
    handle = mpisparse.attach(optimizer, sync)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, seeded(comm.rank, step)).backward()
        optimizer.step()
        set_mean_gradient(plain, comm.size, step)
        expected.step()
        metric = (1.0,) if schedule == "plateau" else ()
        scheduler.step(*metric)
        expected_scheduler.step(*metric)
        assert optimizer.param_groups[0]["lr"] == expected.param_groups[0]["lr"]
    assert expected.param_groups[0]["lr"] != 0.1
    handle.remove()
    sync.close()
    assert_trained_alike(model, plain)


def clipped(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def halved_in_place(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


def halved_in_a_copy(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad = p.grad * 0.5


CHANGES = {"clipped": clipped, "halved in place": halved_in_place, "halved in a copy": halved_in_a_copy}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_user_does_to_gradients_before_step_counts(comm: MPI.Intracomm, change: str) -> None:
    model = convolutional()
    twin = copy.deepcopy(model)
    sync = mpisparse.GradientSync(model, density=1.0)
    for step in range(4):
        model.zero_grad(set_to_none=step % 2 == 0)
        twin.zero_grad()
        for each in (model, twin):
            loss_of(each, seeded(comm.rank, step)).backward()
            CHANGES[change](each)
        sync.step()
        mean = total(comm, published(twin)) / comm.size
        torch.testing.assert_close(published(model), mean, rtol=1e-5, atol=1e-9)
    sync.close()


@pytest.mark.parametrize("change", CHANGES)
def test_in_the_backward_path_it_does_not(comm: MPI.Intracomm, change: str) -> None:
    """The gradient is already in the residual and p.grad is None, so there is nothing to clip or scale."""
    trained = []
    for changed in (True, False):
        torch.manual_seed(3)
        model = convolutional()
        sync = mpisparse.GradientSync(model, density=0.1, accumulate="backward")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, seeded(comm.rank, step)).backward()
            assert all(p.grad is None for p in model.parameters())
            if changed:
                CHANGES[change](model)
            sync.step()
            optimizer.step()
        trained.append(bits([*model.parameters(), sync.residual]))
        sync.close()
    assert trained[0] == trained[1]


@both_paths
@pytest.mark.parametrize("set_to_none", [True, False])
def test_two_micro_batches_equal_one_of_twice_the_size(comm: MPI.Intracomm, path: str, set_to_none: bool) -> None:
    def images(step: int) -> torch.Tensor:
        return torch.randn(8, 3, 5, 5, generator=seeded(comm.rank, step))

    trained = []
    for parts in (1, 2):
        torch.manual_seed(3)
        model = convolutional()
        sync = mpisparse.GradientSync(model, density=1.0, accumulate=path)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            *early, last = images(step).chunk(parts)
            with sync.no_sync():
                for batch in early:
                    (model(batch).square().mean() / parts).backward()
            (model(last).square().mean() / parts).backward()
            sync.step()
            optimizer.step()
        trained.append(model)
        sync.close()
    assert_trained_alike(*trained)


@both_paths
def test_accumulation_loses_nothing_at_a_low_density(comm: MPI.Intracomm, path: str) -> None:
    model = convolutional()
    sync = mpisparse.GradientSync(model, density=0.05, accumulate=path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ledger = Ledger(comm, model, sync)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        with sync.no_sync():
            for micro in range(1 + comm.rank):  # as many as each rank likes
                loss_of(model, seeded(comm.rank, 10 * step + micro)).backward()
        loss_of(model, seeded(comm.rank, 10 * step + 9)).backward()
        ledger.step()
        optimizer.step()
        assert alike(comm, model.parameters())
    sync.close()


class Single(nn.Module):
    """One parameter, so that no other shows whether gradients were zeroed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(75, 20) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.flatten(1) @ self.weight).tanh()


FORGETFUL: dict[str, Make] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, foreach=False),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, foreach=True),
    "foreach nesterov": lambda params: OPTIMIZERS["nesterov"](params, foreach=True),
}


@both_paths
@pytest.mark.parametrize(
    ("make", "name"),
    # a single parameter whose gradient the optimizer rewrote cannot be told: docs/howto/sharp-bits.md
    [
        (make, name)
        for make in (convolutional, Single)
        for name in FORGETFUL
        if make is convolutional or "foreach" not in name
    ],
)
@pytest.mark.singles
def test_a_backward_without_zero_grad_is_refused(
    comm: MPI.Intracomm, path: str, name: str, make: Callable[[], nn.Module]
) -> None:
    """If one rank does so, all raise; the others zero in place or set to None."""
    model = make()
    sync = mpisparse.GradientSync(model, density=0.1, accumulate=path)
    optimizer = FORGETFUL[name](model.parameters())
    for step in range(3):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model, seeded(comm.rank, step)).backward()
        sync.step()
        optimizer.step()
    forgetful = comm.size - 1
    saved, held = sync.state_dict(), sync.residual.clone()
    if comm.rank != forgetful:
        optimizer.zero_grad(set_to_none=comm.rank % 2 == 0)
    loss_of(model, seeded(comm.rank, 3)).backward()
    text = raised(comm, mpisparse.GradientError, sync.step)
    assert f"on rank {forgetful} backward added to the gradient that the last step published" in text
    assert "zero_grad()" in text
    optimizer.zero_grad()
    loss_of(model, seeded(comm.rank, 4)).backward()
    if path == "step":
        assert everywhere(comm, comm.rank != forgetful or torch.equal(sync.residual, held)), "the mean is in the residual"
    else:
        raised(comm, mpisparse.GradientError, sync.step)
        sync.load_state_dict(saved)
        loss_of(model, seeded(comm.rank, 4)).backward()
    sync.step()
    assert alike(comm, [p.grad for p in model.parameters()])
    sync.close()


@pytest.mark.parametrize("scheme", ["exdyna", "dense"])
def test_clipping_the_mean_does_not_pass_for_zeroing_it(comm: MPI.Intracomm, scheme: str) -> None:
    model = convolutional()
    sync = mpisparse.GradientSync(model, scheme=scheme, density={"exdyna": 0.1, "dense": 1.0}[scheme])
    loss_of(model, seeded(comm.rank, 0)).backward()
    sync.step()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    loss_of(model, seeded(comm.rank, 1)).backward()
    assert "call zero_grad() after each optimizer step" in raised(comm, mpisparse.GradientError, sync.step)
    sync.close()


class Generator(nn.Module):
    """A trunk and a head; another network's loss may reach both, its own only the trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(10, 20)
        self.head = nn.Linear(20, 5)

    def loss(self, generator: torch.Generator, *, whole: bool) -> torch.Tensor:
        features = self.trunk(torch.randn(4, 10, generator=generator)).tanh()
        return (self.head(features) if whole else features).square().mean()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("how", ["plain", "foreach"])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.pairs
def test_another_backward_before_zero_grad_does_no_harm(
    comm: MPI.Intracomm, set_to_none: bool, how: str, whole: bool
) -> None:
    """For example a discriminator's loss reaches the generator; those gradients are zeroed before the generator's own."""
    model = Generator()
    sync = mpisparse.GradientSync(model, density=0.1)
    optimizer = OPTIMIZERS["nesterov"](model.parameters(), **HOW[how])
    ledger = Ledger(comm, model, sync)
    for step in range(5):
        for _ in range(1 + step % 2):
            model.loss(seeded(comm.rank, 100 + step), whole=True).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        ledger.restart()
        model.loss(seeded(comm.rank, step), whole=whole or step == 0).backward()
        ledger.step()
        optimizer.step()
        assert alike(comm, model.parameters())
    sync.close()


def test_in_the_backward_path_such_a_backward_is_refused(comm: MPI.Intracomm) -> None:
    """By then the published mean is in the residual, and zero_grad cannot remove it."""
    model = Generator()
    sync = mpisparse.GradientSync(model, density=0.1, accumulate="backward")
    model.loss(seeded(comm.rank, 0), whole=True).backward()
    sync.step()
    model.loss(seeded(comm.rank, 1), whole=True).backward()
    model.zero_grad()
    model.loss(seeded(comm.rank, 2), whole=True).backward()
    assert "call zero_grad()" in raised(comm, mpisparse.GradientError, sync.step)
    sync.close()


@both_paths
@pytest.mark.parametrize("as_keyword", [False, True])
def test_a_closure_is_evaluated_exchanged_and_its_loss_averaged(comm: MPI.Intracomm, path: str, as_keyword: bool) -> None:
    trained = []
    for with_closure in (True, False):
        torch.manual_seed(3)
        model = convolutional()
        sync = mpisparse.GradientSync(model, density=0.1, accumulate=path)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        handle = mpisparse.attach(optimizer, sync)
        for step in range(4):
            own = []

            def closure(model: nn.Module = model, step: int = step, own: list[float] = own) -> torch.Tensor:
                model.zero_grad()
                loss = loss_of(model, seeded(comm.rank, step))
                loss.backward()
                own.append(float(loss.detach()))
                return loss

            if not with_closure:
                closure()
                optimizer.step()
                continue
            returned = optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)
            assert everywhere(comm, len(own) == 1)
            assert everywhere(comm, abs(float(returned) - comm.allreduce(own[0]) / comm.size) < 1e-6)
            assert alike(comm, [returned])
        trained.append(bits([*model.parameters(), sync.residual]))
        handle.remove()
        sync.close()
    assert trained[0] == trained[1]


@both_paths
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("density", [1.0, 0.3])
@pytest.mark.pairs
def test_lbfgs_on_different_data(comm: MPI.Intracomm, path: str, search: str | None, density: float) -> None:
    """L-BFGS evaluates the closure several times; ranks must see the same losses or they diverge."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    plain = copy.deepcopy(model)
    data = [torch.randn(16, 6, generator=seeded(rank, 0)) for rank in range(comm.size)]
    targets = [x[:, :1] * x[:, 1:2] + rank for rank, x in enumerate(data)]

    def fit(model: nn.Module, rank: int) -> torch.Tensor:
        return (model(data[rank]) - targets[rank]).square().mean()

    sync = mpisparse.GradientSync(model, density=density, accumulate=path)
    settings: dict[str, Any] = {"lr": 0.1 if search is None else 1.0, "max_iter": 5, "line_search_fn": search}
    optimizer = torch.optim.LBFGS(model.parameters(), **settings)
    mpisparse.attach(optimizer, sync)
    expected = torch.optim.LBFGS(plain.parameters(), **settings)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = fit(model, comm.rank)
        loss.backward()
        return loss

    def plain_closure() -> torch.Tensor:
        expected.zero_grad()
        loss = torch.stack([fit(plain, rank) for rank in range(comm.size)]).mean()
        loss.backward()
        return loss

    for _ in range(3):
        mean = comm.allreduce(fit(model, comm.rank).item()) / comm.size
        returned = optimizer.step(closure)
        assert everywhere(comm, abs(float(returned) - mean) <= 1e-5 * mean), "LBFGS returns the loss it began with"
        assert alike(comm, [*model.parameters(), returned])
        expected.step(plain_closure)
    sync.close()
    if density == 1.0:
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-3)
