"""attach: the exchange runs before each optimizer step, and all ranks agree with a GradScaler."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mpi4py import MPI
from ranks import PATHS, alike, bits, everywhere, raised, seeded
from torch import nn

import mpisparse
from mpisparse.model import digests

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


# Several optimizers on one exchange

JOINT: list[dict[str, Any]] = [
    {"density": 0.1}, {"density": 0.1, "accumulate": "backward"}, {"scheme": "dense", "codec": "int4"},
    {"density": 0.1, "overlap": True, "bucket_mb": 0.001}, {"density": 0.1, "nonfinite": "skip"},
]  # fmt: skip


def halves(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return an optimizer for each layer."""
    first, _, last = model  # type: ignore[misc]
    return [
        torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9),
        torch.optim.Adam(last.parameters(), lr=0.01),
    ]


@pytest.mark.parametrize("options", JOINT, ids=str)
def test_several_optimizers_use_one_mean(comm: MPI.Intracomm, options: dict[str, Any]) -> None:
    """After one backward the first of them exchanges, whichever it is; the others use what was published."""
    trained = []
    for attached in (True, False):
        model = small()
        sync = mpisparse.GradientSync(model, **options)
        optimizers = halves(model)
        for optimizer in optimizers if attached else []:
            mpisparse.attach(optimizer, sync)
        for step in range(6):
            model.zero_grad(set_to_none=step % 2 == 0)
            loss_of(model, comm.rank, step).backward()
            if not attached or (step == 3 and sync.overlaps):  # which also allows one by hand
                sync.step()
            for optimizer in optimizers if step < 4 else reversed(optimizers):
                optimizer.step()
            assert everywhere(comm, sync.stats.step == step)
        trained.append(state_of(model, sync))
        sync.close()
    assert everywhere(comm, trained[0] == trained[1])


def test_several_optimizers_may_have_a_backward_each(comm: MPI.Intracomm) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, density=0.1)
    optimizers = halves(model)
    for optimizer in optimizers:
        mpisparse.attach(optimizer, sync)
    for step in range(6):
        model.zero_grad()
        if step < 4:
            loss_of(model, comm.rank, step).backward()
        else:  # gradients need not come of a backward
            for p in model.parameters():
                p.grad = torch.full_like(p, float(comm.rank + step))
        optimizers[step % 2].step()
        assert everywhere(comm, sync.stats.step == step)
        assert alike(comm, model.parameters())
    text = raised(comm, mpisparse.GradientError, optimizers[1].step)
    assert "no new gradient" in text, "it has used this mean"
    sync.close()


def test_one_optimizer_may_replace_gradients_in_its_step(comm: MPI.Intracomm) -> None:
    """As Muon puts zeros in place of a gradient that it lacks; the other one still uses the mean."""

    class Replaces(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for p in (p for group in self.param_groups for p in group["params"]):
                p.grad = torch.zeros_like(p) if p.grad is None else 0.5 * p.grad
            return super().step(closure)

    model = small()
    sync = mpisparse.GradientSync(model, scheme="dense")
    first, _, last = model
    optimizers = [Replaces(first.parameters(), lr=0.1), torch.optim.SGD(last.parameters(), lr=0.1)]
    for optimizer in optimizers:
        mpisparse.attach(optimizer, sync)
    for step in range(4):
        model.zero_grad()
        loss_of(model, comm.rank, step).backward()
        before = last.weight.detach().clone()
        for optimizer in optimizers:
            optimizer.step()
        assert everywhere(comm, sync.stats.step == step)
        assert everywhere(comm, not torch.equal(before, last.weight))
    sync.close()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_step_different_optimizers_are_refused(comm: MPI.Intracomm) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, density=0.1)
    optimizers = halves(model)
    for optimizer in optimizers:
        mpisparse.attach(optimizer, sync)
    loss_of(model, comm.rank, 0).backward()
    text = raised(comm, mpisparse.GradientError, optimizers[comm.rank == 1].step)
    assert "rank 0 number 1 of those that were attached, rank 1 number 2" in text
    optimizers[0].step()
    optimizers[1].step()
    assert alike(comm, model.parameters())
    sync.close()


def test_a_mean_that_arrives_late_is_for_one_optimizer(comm: MPI.Intracomm) -> None:
    """At the end synchronize() steps with what is in flight: with all optimizers, or some mean would be lost."""
    model = small()
    sync = mpisparse.GradientSync(model, density=0.1, staleness=1)
    first, second = halves(model)
    handle = mpisparse.attach(first, sync)
    text = raised(comm, mpisparse.ConfigurationError, lambda: mpisparse.attach(second, sync))
    assert "several parameter groups" in text
    handle.remove()
    mpisparse.attach(second, sync)
    sync.close()


class Evaluating(torch.optim.SGD):
    """A user's optimizer that does more than its base class, whose step() it calls."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        super().step()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.clamp_(-0.1, 0.1)
        return loss


@pytest.mark.parametrize("closure", [True, False])
@pytest.mark.parametrize("options", [{"density": 0.1}, {"scheme": "drift"}, {"density": 0.1, "staleness": 1}], ids=str)
def test_a_step_that_calls_that_of_its_base_class_is_one(
    comm: MPI.Intracomm, options: dict[str, Any], closure: bool
) -> None:
    """torch calls the hooks twice then, if an optimizer of the base class was made before."""
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    model = small()
    sync = mpisparse.GradientSync(model, **options)
    optimizer = Evaluating(model.parameters(), lr=0.1)
    mpisparse.attach(optimizer, sync)
    for step in range(4):

        def evaluate(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, comm.rank, step)
            loss.backward()
            return loss

        if closure:
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()
        assert everywhere(comm, sync.stats.step == step)
    sync.synchronize()
    with sync.global_weights():
        assert alike(comm, model.parameters())
    sync.close()


class Sharp(torch.optim.SGD):
    """Sharpness-aware: the gradient that counts is that of weights where this rank's own gradient leads."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        with torch.no_grad():
            before = [p.clone() for p in params]
            for p in params:
                p.add_(p.grad, alpha=0.05)
                p.grad = None
        loss = closure()
        with torch.no_grad():
            for p, was in zip(params, before, strict=True):
                p.copy_(was)
        super().step()
        return loss


def test_replicas_are_compared_before_a_closure_moves_them(comm: MPI.Intracomm) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, density=0.2, check_every=2)
    optimizer = Sharp(model.parameters(), lr=0.1)
    mpisparse.attach(optimizer, sync)

    def train(step: int) -> None:
        def closure() -> torch.Tensor:
            loss = loss_of(model, comm.rank, step)
            loss.backward()
            return loss

        optimizer.zero_grad()
        closure()
        optimizer.step(closure)

    for step in range(6):
        train(step)
        assert alike(comm, model.parameters())
    if comm.size > 1:
        with torch.no_grad():
            model[0].weight[0, 0] += 0.5 * comm.rank
        text = raised(comm, mpisparse.GradientError, lambda: [train(step) for step in (6, 7)])
        assert "the replicas differ" in text
    sync.close()


def test_replicas_are_not_compared_between_two_evaluations(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison that becomes due there waits for the next step, and weights are looked at only where one is due."""

    class Twice(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            params = self.param_groups[0]["params"]
            before = [p.clone() for p in params]
            for moved in (0.0, 0.01 * (comm.rank + 1)):
                for p in params:
                    p.add_(moved)
                with torch.enable_grad():
                    loss = closure()
            for p, was in zip(params, before, strict=True):
                p.copy_(was)
            super().step()
            return loss

    looks: list[int] = []
    digest = digests.digest
    monkeypatch.setattr(digests, "digest", lambda tensors: (looks.append(1), digest(tensors))[1])
    model = small()
    sync = mpisparse.GradientSync(model, density=0.2, check_every=5)
    optimizer = Twice(model.parameters(), lr=0.1)
    mpisparse.attach(optimizer, sync)

    def closure(step: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, comm.rank, step)
        loss.backward()
        return loss

    for step in range(6):
        optimizer.step(functools.partial(closure, step))
        assert alike(comm, model.parameters())
    sync.close()
    assert everywhere(comm, len(looks) == (2 if comm.size > 1 else 0)), "before the steps of evaluations 6 and 10"


class Ignoring(torch.optim.SGD):
    """A user's optimizer that takes a closure and does not call it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


def test_an_optimizer_that_ignores_its_closure_is_refused(comm: MPI.Intracomm) -> None:
    """The exchange is made when the closure is evaluated."""
    model = small()
    sync = mpisparse.GradientSync(model, density=0.1)
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # so that torch calls hooks in its step(), too
    optimizer = Ignoring(model.parameters(), lr=0.1)
    mpisparse.attach(optimizer, sync)
    loss_of(model, comm.rank, 0).backward()
    text = raised(comm, mpisparse.ConfigurationError, lambda: optimizer.step(lambda: 0.0))
    assert "Ignoring.step() did not evaluate the closure" in text
    optimizer.step()
    assert everywhere(comm, sync.stats.step == 0)
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


@pytest.mark.parametrize("first_again", [True, False])
def test_attachments_that_share_a_scaler_go_in_any_order(comm: MPI.Intracomm, first_again: bool) -> None:
    """A new exchange for one of two models leaves the other's agreement on infinities in place."""
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1000)
    models = [small(), small()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    syncs = [mpisparse.GradientSync(model, density=0.1) for model in models]
    handles = [mpisparse.attach(optimizer, sync, scaler) for optimizer, sync in zip(optimizers, syncs, strict=True)]
    again = 0 if first_again else 1
    old, syncs[again] = syncs[again], mpisparse.GradientSync(models[again], density=0.1)
    handles[again] = mpisparse.attach(optimizers[again], syncs[again], scaler)
    for step in range(4):
        before = [bits(model.parameters()) for model in models]
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            bad = step == i + 1 and comm.rank == comm.size - 1
            scaler.scale(loss_of(model, comm.rank, step) * (float("inf") if bad else 1.0)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        moved = [bits(model.parameters()) != was for model, was in zip(models, before, strict=True)]
        assert everywhere(comm, moved == [step != 1, step != 2])
        assert alike(comm, [p for model in models for p in model.parameters()])
    for handle in handles:
        handle.remove()
    assert scaler.step.__func__ is torch.amp.GradScaler.step
    assert scaler.unscale_.__func__ is torch.amp.GradScaler.unscale_
    for sync in (*syncs, old):
        sync.close()


def test_a_scaler_of_several_optimizers_decides_for_all(comm: MPI.Intracomm) -> None:
    """One exchange is of all gradients: all are unscaled before it, and an infinity of one optimizer skips them all."""
    trained = []
    for steps in (range(6), (0, 1, 3, 5)):
        model = small()
        sync = mpisparse.GradientSync(model, density=0.1)
        optimizers = halves(model)
        enabled = len(steps) == 6
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1000, enabled=enabled)
        handles = [mpisparse.attach(optimizer, sync, scaler) for optimizer in optimizers]
        for step in steps:
            model.zero_grad()
            scaler.scale(loss_of(model, comm.rank, step)).backward()
            if step in (2, 4) and comm.rank == comm.size - 1:
                next(model[step - 2].parameters() if step == 2 else model[2].parameters()).grad[0] = float("inf")
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        trained.append(state_of(model, sync))
        if enabled:
            model.zero_grad()
            scaler.scale(loss_of(model, comm.rank, 7)).backward()
            text = raised(comm, mpisparse.GradientError, lambda: scaler.step(optimizers[0]))  # noqa: B023
            assert "call scaler.unscale_() for each optimizer before the first scaler.step()" in text
            scaler.update()
            model.zero_grad()
            scaler.scale(loss_of(model, comm.rank, 8)).backward()
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            scaler.step(optimizers[0])
            scaler.scale(loss_of(model, comm.rank, 9)).backward()  # new gradients of what has stepped, scaled again
            text = raised(comm, mpisparse.GradientError, lambda: scaler.step(optimizers[1]))  # noqa: B023
            assert "scaler.update() before the next backward" in text
        for handle in handles:
            handle.remove()
        sync.close()
    assert everywhere(comm, trained[0] == trained[1])


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
