"""Under mpirun or torchrun: prepare() and attach() with Accelerate's objects. Arguments as of with_lightning.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DataLoaderConfiguration
from shown import alike, apart, data, digest, net, refused
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import mpisparse
from mpisparse.integrations.accelerate import prepare
from mpisparse.integrations.launch import communicator

OUT, OTHER = Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None
EXDYNA: dict[str, Any] = {"scheme": "exdyna", "density": 0.1}
DRIFT: dict[str, Any] = {"scheme": "drift", "density": 0.2, "every": 2}


def accelerator(**settings: Any) -> Accelerator:
    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)
    return Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=order, **settings)


def train(
    options: dict[str, Any], epochs: int = 3, *, save: Path | None = None, load: Path | None = None, ready: Any = prepare
) -> tuple[Any, Any, list[float]]:
    """Train and return the exchange, the model and the losses; saves after two epochs, resumes there."""
    accelerate, model = accelerator(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.95)
    loader = DataLoader(data(), batch_size=4, shuffle=True)
    sync, model, optimizer, loader, schedule = ready(accelerate, model, optimizer, loader, schedule, **options)
    torch.manual_seed(100 + sync.rank)
    if load is not None:
        accelerate.load_state(str(load))
    losses = []
    for epoch in range(0 if load is None else 2, epochs):
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            with accelerate.accumulate(model):
                loss = mse_loss(model(inputs), targets)
                accelerate.backward(loss)
                if accelerate.sync_gradients:
                    accelerate.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        if save is not None and epoch == 1:
            accelerate.save_state(str(save))
    return sync, model, losses


def by_hand(accelerate: Accelerator, model: Any, optimizer: Any, *others: Any, **options: Any) -> tuple[Any, ...]:
    """What prepare() does, from parts: attach() takes Accelerate's optimizer."""
    sync = mpisparse.GradientSync(model, comm=communicator(), **options)
    optimizer, *rest = accelerate.prepare(optimizer, *others)
    assert isinstance(optimizer, AcceleratedOptimizer)
    mpisparse.attach(optimizer, sync)
    return sync, model, optimizer, *rest


def plain_loop(loader: Any) -> list[float]:
    """Train without Accelerate's optimizer: accumulate, clip and step by hand."""
    model = net()
    sync = mpisparse.GradientSync(model, comm=communicator(), **EXDYNA)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.95)
    mpisparse.attach(optimizer, sync)
    torch.manual_seed(100 + sync.rank)
    losses = []
    for number, (inputs, targets) in enumerate(loader):
        loss = mse_loss(model(inputs), targets)
        (loss / 2).backward()
        losses.append(loss.item())
        if number % 2 or number == len(loader) - 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            for _ in range(sync.size):  # as Accelerate does: a schedule counts the batches of all ranks
                schedule.step()
            optimizer.zero_grad()
    return losses


def show_losses() -> None:
    """The same losses as in a plain loop, prepared or attached by hand; sharded data, equal replicas."""
    sync, model, losses = train(EXDYNA, 1)
    assert not isinstance(model, torch.nn.parallel.DistributedDataParallel)
    loader = accelerator().prepare(DataLoader(data(), batch_size=4, shuffle=True))
    assert plain_loop(loader) == losses
    assert train(EXDYNA, 1, ready=by_hand)[2] == losses
    assert len(losses) == 48 // 4 // sync.size
    alike(digest(model.parameters()), "replicas")
    apart(losses, "losses, though data are sharded,")


def show_resuming(name: str, options: dict[str, Any]) -> None:
    """save_state() and load_state(): resumed is uninterrupted, to the last bit."""
    place = OUT / name
    sync, model, losses = train(options, save=place)
    again, same, later = train(options, load=place)
    assert later == losses[-len(later) :]
    assert len(later) * 3 == len(losses)
    assert digest(same.parameters()) == digest(model.parameters())
    assert torch.equal(again.residual, sync.residual)
    apart(digest([sync.residual]), "residuals")
    ranks = {p.name for p in place.glob("mpisparse/*/*/rank-*.h5")}
    assert ranks == {f"rank-{rank:04d}.h5" for rank in range(sync.size)}
    with again.global_weights():
        alike(digest(same.parameters()), "shared weights")
    if OTHER is not None:
        sync, model, _ = train(options, load=OTHER / name)
        with sync.global_weights():
            alike(digest(model.parameters()), "shared weights of other ranks' state")


def show_two_models() -> None:
    """Two models of one accelerator, each with its exchange: both are saved and loaded."""
    accelerate, pairs = accelerator(), []
    for number in range(2):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync, model, _ = prepare(accelerate, model, optimizer, **EXDYNA)
        sync.residual.fill_(number + sync.rank)
        pairs.append((sync, model))
    accelerate.save_state(str(OUT / "two"))
    accelerate.wait_for_everyone()  # rank 0 writes
    for sync, _ in pairs:
        sync.residual.zero_()
    accelerate.load_state(str(OUT / "two"))
    for number, (sync, _) in enumerate(pairs):
        assert bool((sync.residual == number + sync.rank).all()), number


def show_scaler() -> None:
    """A GradScaler inside Accelerate's optimizer: if one rank overflows, all skip the step."""
    accelerator()
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=8.0)
    sync = mpisparse.GradientSync(model, comm=communicator(), **EXDYNA)
    optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)
    attachment = mpisparse.attach(optimizer, sync)
    for bad in (False, True, False):
        inputs, targets = data()[4 * sync.rank : 4 * sync.rank + 4]
        before = digest(model.parameters())
        scaler.scale(mse_loss(model(inputs), targets)).backward()
        if bad and sync.rank == sync.size - 1:
            model[0].weight.grad.fill_(torch.inf)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped == bad
        assert (digest(model.parameters()) == before) == bad
        alike(digest(model.parameters()), "replicas")
    assert sync.stats.step == 1
    attachment.remove()


def show_refusals() -> None:
    """What is asked wrongly is refused on all ranks."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with refused("prepare expects the accelerator, a model, an optimizer"):
        prepare(accelerator(), optimizer, model)
    with refused("unknown scheme"):
        prepare(accelerator(), model, optimizer, scheme="none such")
    alone = accelerator()
    if alone.num_processes > 1:
        with refused("ranks that Accelerate sees: 1; ranks that exchange:"):
            alone.state._shared_state["num_processes"] = 1
            prepare(alone, model, optimizer)


def main() -> None:
    mpisparse.init_torch_distributed()
    show_losses()
    show_resuming("exdyna", EXDYNA)
    show_resuming("drift", DRIFT)
    show_two_models()
    show_scaler()
    show_refusals()
    print(f"rank {torch.distributed.get_rank()} of {torch.distributed.get_world_size()}: all shown", flush=True)


if __name__ == "__main__":
    main()
