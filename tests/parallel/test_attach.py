"""attach: the exchange runs before each optimizer step, and all ranks agree with a GradScaler."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mpi4py import MPI
from ranks import PATHS, alike, bits, everywhere, raised, seeded
from torch import nn

import mpisparse

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:an adaptive optimizer")]
both_paths = pytest.mark.parametrize("path", PATHS)


def small() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(torch.randn(8, 20, generator=seeded(rank, step))).square().mean()


def state_of(model: nn.Module, sync: mpisparse.GradientSync) -> bytes:
    return bits([*model.parameters(), sync.residual])


@both_paths
def test_attached_is_as_calling_step(comm: MPI.Intracomm, path: str) -> None:
    trained = []
    for attached in (True, False):
        model = small()
        sync = mpisparse.GradientSync(model, density=0.1, accumulate=path)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        handle = mpisparse.attach(optimizer, sync) if attached else None
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, comm.rank, step).backward()
            if not attached:
                sync.step()
            optimizer.step()
        assert sync.stats.step == 4
        trained.append(state_of(model, sync))
        if handle is not None:
            handle.remove()
        sync.close()
    assert trained[0] == trained[1]


def test_a_removed_attachment_leaves_the_optimizer_as_it_was(comm: MPI.Intracomm) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, density=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = mpisparse.attach(optimizer, sync)
    handle.remove()
    loss_of(model, comm.rank, 0).backward()
    own = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), own, strict=True)), "nothing was exchanged"
    with pytest.raises(RuntimeError, match="no statistics before the first step"):
        _ = sync.stats
    assert not sync.residual.any()
    sync.close()


def test_attached_twice_says_so_at_the_first_step(comm: MPI.Intracomm) -> None:
    """The second exchange finds no new gradient, or attach itself refuses; either way there is an error."""
    model = small()
    sync = mpisparse.GradientSync(model, density=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def attach_twice_and_step() -> None:
        mpisparse.attach(optimizer, sync)
        mpisparse.attach(optimizer, sync)
        loss_of(model, comm.rank, 0).backward()
        optimizer.step()

    raised(comm, (mpisparse.GradientError, mpisparse.ConfigurationError), attach_twice_and_step)
    sync.close()


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"staleness": 1}, {"overlap": True, "bucket_mb": 0.001}, {"scheme": "drift"}, {"scheme": "auto"}],
    ids=str,
)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.singles
def test_attached_to_the_next_exchange(comm: MPI.Intracomm, options: dict[str, Any], closed: bool, scaled: bool) -> None:
    """An exchange that was closed, or whose model has another one now, lets its optimizer go: nobody kept the handle."""
    trained = []
    for forgets in (True, False):
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
        old = []
        for phase in range(3):
            sync = mpisparse.GradientSync(model, **{"density": 0.1, **options})
            handle = mpisparse.attach(optimizer, sync, scaler)
            for step in range(3):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, comm.rank, 3 * phase + step)).backward()
                scaler.step(optimizer)
                scaler.update()
            assert sync.stats.step == 2
            if not forgets:
                handle.remove()
            if closed:
                sync.close()
            old.append(sync)
        trained.append(state_of(model, sync))
        if not closed:
            for sync in old:
                sync.close()
    assert everywhere(comm, trained[0] == trained[1])


def test_attached_to_two_exchanges_is_refused(comm: MPI.Intracomm) -> None:
    model = small()
    first, second = mpisparse.GradientSync(model[0], density=0.1), mpisparse.GradientSync(model[2], density=0.1)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    mpisparse.attach(optimizer, first)
    optimizer.param_groups[0]["params"] = list(model[2].parameters())
    error = mpisparse.ConfigurationError
    assert "call remove() on what attach() returned first" in raised(
        comm, error, lambda: mpisparse.attach(optimizer, second)
    )
    first.close()
    second.close()


def test_removed_and_attached_again_works(comm: MPI.Intracomm) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, density=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        handle = mpisparse.attach(optimizer, sync)
        optimizer.zero_grad()
        loss_of(model, comm.rank, step).backward()
        optimizer.step()
        handle.remove()
        assert alike(comm, model.parameters())
    assert sync.stats.step == 2
    sync.close()


def test_what_cannot_be_attached_is_refused(comm: MPI.Intracomm) -> None:
    model, other = small(), nn.Linear(3, 7)
    sync = mpisparse.GradientSync(model, density=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    both = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    refuse = mpisparse.ConfigurationError
    assert "shape [7, 3] that GradientSync does not exchange" in raised(comm, refuse, lambda: mpisparse.attach(both, sync))
    assert "expects a torch optimizer first, got Sequential" in raised(
        comm,
        refuse,
        lambda: mpisparse.attach(model, sync),  # type: ignore[arg-type]
    )
    assert "expects a GradientSync second, got Sequential" in raised(
        comm,
        refuse,
        lambda: mpisparse.attach(optimizer, model),  # type: ignore[arg-type]
    )
    loss_of(model, comm.rank, 0).backward()
    optimizer.step()
    assert not sync.residual.any(), "a refused attach leaves nothing behind"
    sync.close()


def test_an_optimizer_is_attached_once_at_a_time(comm: MPI.Intracomm) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, density=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment = mpisparse.attach(optimizer, sync)
    text = raised(comm, mpisparse.ConfigurationError, lambda: mpisparse.attach(optimizer, sync))
    assert "is attached already" in text
    attachment.remove()
    mpisparse.attach(optimizer, sync)
    loss_of(model, comm.rank, 0).backward()
    optimizer.step()
    assert everywhere(comm, sync.stats.selected > 0)
    sync.close()


def test_frozen_parameters_and_a_part_of_the_model_may_be_optimized(comm: MPI.Intracomm) -> None:
    model = small()
    model[0].weight.requires_grad_(False)
    sync = mpisparse.GradientSync(model, density=1.0)
    optimizer = torch.optim.SGD([model[0].weight, model[2].weight], lr=0.1)
    mpisparse.attach(optimizer, sync)
    for step in range(2):
        model.zero_grad()
        loss_of(model, comm.rank, step).backward()
        optimizer.step()
        assert alike(comm, model.parameters())
    sync.close()


# With a GradScaler

SCALE = 256.0
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
    "fused sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "fused adam": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
}


def clip(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


class Scaled:
    """A training loop with a scaler; the last rank has an infinity at the steps `infinite`."""

    def __init__(self, comm: MPI.Intracomm, name: str, clips: bool, infinite: tuple[int, ...] = (), **scaling: Any) -> None:
        self.comm, self.clips, self.infinite = comm, clips, infinite
        self.model = small()
        self.sync = mpisparse.GradientSync(self.model, density=0.1)
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        settings = {"init_scale": SCALE, "growth_interval": 1000, **scaling}
        self.scaler = torch.amp.GradScaler("cpu", **settings)
        self.handle = mpisparse.attach(self.optimizer, self.sync, scaler=self.scaler)

    def step(self, step: int) -> None:
        self.optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = loss_of(self.model, self.comm.rank, step)
        bad = step in self.infinite and self.comm.rank == self.comm.size - 1
        self.scaler.scale(loss * float("inf") if bad else loss).backward()
        if self.clips:
            self.scaler.unscale_(self.optimizer)
            clip(self.model)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def close(self) -> bytes:
        self.handle.remove()
        self.sync.close()
        return state_of(self.model, self.sync)


def train_unscaled(comm: MPI.Intracomm, name: str, clips: bool, steps: list[int]) -> bytes:
    model = small()
    sync = mpisparse.GradientSync(model, density=0.1)
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, comm.rank, step).backward()
        if clips:
            clip(model)
        sync.step()
        optimizer.step()
    sync.close()
    return state_of(model, sync)


all_optimizers = pytest.mark.parametrize("name", OPTIMIZERS)
clipping = pytest.mark.parametrize("clips", [False, True])


@all_optimizers
@clipping
def test_residuals_are_unscaled(comm: MPI.Intracomm, name: str, clips: bool) -> None:
    """The scale is a power of two, so a scaled run has the bits of the unscaled one, also while the scale grows."""
    run = Scaled(comm, name, clips, growth_interval=2)
    for step in range(6):
        run.step(step)
    assert run.scaler.get_scale() == SCALE * 8
    assert run.close() == train_unscaled(comm, name, clips, list(range(6)))


@all_optimizers
@clipping
def test_an_infinity_on_one_rank_skips_the_step_on_all(comm: MPI.Intracomm, name: str, clips: bool) -> None:
    run = Scaled(comm, name, clips, infinite=(0, 3))
    for step in range(6):
        before = state_of(run.model, run.sync)
        steps = run.sync._aggregator.number
        run.step(step)
        skipped = step in run.infinite
        assert everywhere(comm, (state_of(run.model, run.sync) == before) == skipped)
        assert everywhere(comm, run.sync._aggregator.number == steps + (not skipped))
        assert alike(comm, run.model.parameters())
        assert everywhere(comm, run.scaler.get_scale() == SCALE / 2 ** sum(bad <= step for bad in run.infinite))
    assert run.close() == train_unscaled(comm, name, clips, [1, 2, 4, 5]), "as if the skipped steps had not been"


@all_optimizers
def test_unscaled_then_not_stepped(comm: MPI.Intracomm, name: str) -> None:
    """A user may unscale, inspect the gradients and skip the step; the next one is unscaled again."""
    run = Scaled(comm, name, clips=False)
    run.step(0)
    run.optimizer.zero_grad()
    run.scaler.scale(loss_of(run.model, comm.rank, 1)).backward()
    run.scaler.unscale_(run.optimizer)
    run.scaler.update()
    run.step(2)
    assert run.close() == train_unscaled(comm, name, False, [0, 2])


def test_a_disabled_scaler_changes_nothing(comm: MPI.Intracomm) -> None:
    run = Scaled(comm, "sgd", clips=True, enabled=False)
    for step in range(3):
        run.step(step)
    assert run.close() == train_unscaled(comm, "sgd", True, [0, 1, 2])


def test_another_optimizer_of_the_scaler_is_left_alone(comm: MPI.Intracomm) -> None:
    run = Scaled(comm, "sgd", clips=False)
    other = nn.Linear(4, 4)
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    for step in range(3):
        run.optimizer.zero_grad()
        others.zero_grad()
        own = other(torch.ones(1, 4)).square().sum() * (1 + comm.rank)
        run.scaler.scale(loss_of(run.model, comm.rank, step) + own).backward()
        run.scaler.step(others)
        run.scaler.step(run.optimizer)
        run.scaler.update()
        assert alike(comm, run.model.parameters())
    assert comm.size == 1 or not alike(comm, other.parameters())
    assert run.close() == train_unscaled(comm, "sgd", False, [0, 1, 2])


def test_a_removed_attachment_leaves_the_scaler_as_it_was(comm: MPI.Intracomm) -> None:
    run = Scaled(comm, "sgd", clips=False)
    run.step(0)
    run.handle.remove()
    assert run.scaler.step.__func__ is torch.amp.GradScaler.step
    assert run.scaler.unscale_.__func__ is torch.amp.GradScaler.unscale_
    run.optimizer.zero_grad()
    run.scaler.scale(loss_of(run.model, comm.rank, 1)).backward()
    run.scaler.step(run.optimizer)
    run.scaler.update()
    assert run.sync.stats.step == 0
    run.sync.close()


def test_the_backward_path_refuses_a_scaler(comm: MPI.Intracomm) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, density=0.1, accumulate="backward")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    text = raised(comm, mpisparse.ConfigurationError, lambda: mpisparse.attach(optimizer, sync, scaler=scaler))
    assert 'a GradScaler needs accumulate="step"' in text
    mpisparse.attach(optimizer, sync, scaler=torch.amp.GradScaler("cpu", enabled=False))
    sync.close()


def test_what_is_no_scaler_is_refused(comm: MPI.Intracomm) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, density=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    text = raised(comm, mpisparse.ConfigurationError, lambda: mpisparse.attach(optimizer, sync, scaler=2.0))
    assert "float" in text
    sync.close()


# With an adaptive optimizer

WARNING = "an adaptive optimizer"


def warned(optimizer: torch.optim.Optimizer, sync: mpisparse.GradientSync) -> list[str]:
    """Return attach's warnings; the optimizer stays unchanged."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mpisparse.attach(optimizer, sync).remove()
    return [str(warning.message) for warning in caught]


class Own(torch.optim.AdamW):
    """A user's variant."""


def test_adaptive_optimizers_are_warned_of_where_gradients_are_sparse(comm: MPI.Intracomm) -> None:
    """It warns once, on rank 0, with the measured figures."""
    model = small()
    params = list(model.parameters())
    kinds = ["Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Adafactor"]
    adaptive = [Own(params), torch.optim.Adam(params, fused=True), *(getattr(torch.optim, kind)(params) for kind in kinds)]
    sync = mpisparse.GradientSync(model, density=0.1)
    for optimizer in adaptive:
        texts = warned(optimizer, sync)
        assert len(texts) == (comm.rank == 0)
        assert all(text.startswith(f"{WARNING} ({type(optimizer).__name__})") for text in texts)
        assert all("one rank alone had 2.263 and dense 2.143" in text for text in texts)
    assert warned(torch.optim.SGD(params, lr=0.1, momentum=0.9), sync) == []
    sync.close()
    for options in ({"scheme": "dense"}, {"density": 1.0}):
        sync = mpisparse.GradientSync(model, **options)
        assert warned(torch.optim.Adam(params), sync) == []
        sync.close()


def test_a_refused_step_may_be_done_again_after_another_backward(comm: MPI.Intracomm) -> None:
    """accumulate="backward" with a scheme that needs the whole gradient: a refusal starts the step anew."""
    model = nn.Linear(20, 10)
    sync = mpisparse.GradientSync(model, scheme="momentum", accumulate="backward", density=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpisparse.attach(optimizer, sync)
    stranger = nn.Parameter(torch.zeros(3))
    optimizer.param_groups[0]["params"].append(stranger)
    model(torch.ones(2, 20)).sum().backward()
    assert "does not exchange" in raised(comm, mpisparse.GradientError, optimizer.step)
    optimizer.param_groups[0]["params"].pop()
    model(torch.ones(2, 20)).sum().backward()
    optimizer.step()
    assert everywhere(comm, sync.stats.selected > 0)
    sync.close()
