"""Under mpirun or torchrun: MPISparseStrategy. Arguments: a directory, and one that other ranks wrote, or nothing."""

from __future__ import annotations

import logging
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from shown import alike, apart, data, digest, gathered, net, refused, told
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler

import mpisparse
from mpisparse.integrations.launch import communicator
from mpisparse.integrations.lightning import MPISparseStrategy

OUT, OTHER = Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None
EXDYNA: dict[str, Any] = {"scheme": "exdyna", "density": 0.1}
DRIFT: dict[str, Any] = {"scheme": "drift", "density": 0.2, "every": 2}


class Module(pl.LightningModule):
    """Notes losses, and the weights with which it is evaluated."""

    def __init__(self, *, manual: bool = False, optimizers: int = 1, plateau: bool = False, seed: int = 100) -> None:
        super().__init__()
        self.net = net()
        self.automatic_optimization = not manual
        self.count, self.plateau, self.seed = optimizers, plateau, seed
        self.losses: list[float] = []
        self.evaluated: list[str] = []
        self.metric = torchmetrics.MeanMetric()
        self.outputs: list[float] = []

    def on_train_start(self) -> None:
        if self.trainer.global_step == 0:  # from here on ranks draw different dropout
            torch.manual_seed(self.seed + self.global_rank)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_validation_start(self) -> None:
        self.evaluated.append("")
        self.outputs = []

    def validation_step(self, batch: Any, number: int) -> None:
        self.evaluated[-1] = digest(self.parameters())
        self.log("own", mse_loss(self.net(batch[0]), batch[1]))
        self.log("mean", mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)
        self.metric.update(self.net(batch[0]))
        self.log("metric", self.metric)
        self.outputs += self.net(batch[0]).flatten().tolist()
        self.log("worse", float(len(self.evaluated) + self.global_rank), sync_dist=True)  # rises in every epoch

    def configure_optimizers(self) -> Any:
        made = [torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9) for _ in range(self.count)]
        if not self.plateau:
            return made
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(made[0], patience=0)
        return {"optimizer": made[0], "lr_scheduler": {"scheduler": schedule, "monitor": "worse"}}


def fit(options: dict[str, Any], module: Module | None = None, resume: Path | None = None, **kwargs: Any) -> pl.Trainer:
    module = Module() if module is None else module
    settings: dict[str, Any] = {"logger": False, "enable_checkpointing": "callbacks" in kwargs, "max_epochs": 2}
    trainer = pl.Trainer(
        strategy=MPISparseStrategy(**options), accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, **settings | kwargs,
    )  # fmt: skip
    loaders = DataLoader(data(), batch_size=4, shuffle=True), DataLoader(data(24), batch_size=4)
    trainer.fit(module, *loaders, ckpt_path=resume)
    return trainer


def plain_loop(*, accumulate: int = 1, clip: float | None = None) -> tuple[list[float], str]:
    """Train for an epoch without Lightning: GradientSync, attach, DistributedSampler."""
    model = net()
    sync = mpisparse.GradientSync(model, comm=communicator(), **EXDYNA)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    mpisparse.attach(optimizer, sync)
    torch.manual_seed(100 + sync.rank)
    sampler = DistributedSampler(data(), num_replicas=sync.size, rank=sync.rank)
    loader = DataLoader(data(), batch_size=4, sampler=sampler, generator=torch.Generator())
    losses = []
    for number, (inputs, targets) in enumerate(loader):
        loss = mse_loss(model(inputs), targets)
        (loss / accumulate).backward()
        losses.append(loss.item())
        if (number + 1) % accumulate == 0 or number == len(loader) - 1:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    sync.close()
    return losses, digest(model.parameters())


def show_losses() -> None:
    """The same losses and weights as in a plain loop."""
    module = Module()
    trainer = fit(EXDYNA, module, max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=0.5)
    losses, weights = plain_loop(accumulate=2, clip=0.5)
    assert module.losses == losses, (module.losses, losses)
    assert digest(module.parameters()) == weights
    alike(digest(module.parameters()), "replicas")
    apart(module.losses, "losses, though data are sharded,")
    own = sum(gathered(float(trainer.callback_metrics["own"]))) / trainer.world_size
    torch.testing.assert_close(float(trainer.callback_metrics["mean"]), own)
    seen = torch.tensor(gathered(module.outputs))
    torch.testing.assert_close(trainer.callback_metrics["metric"], seen.mean())  # torchmetrics synchronise by themselves
    manual = Module(manual=True)
    fit(EXDYNA, manual, max_epochs=1)
    assert manual.losses == plain_loop()[0]
    fit(EXDYNA, half := Module(), max_epochs=1, precision="bf16-mixed", gradient_clip_val=5.0)
    assert len(half.losses) == len(losses)
    assert half.losses != losses
    alike(digest(half.parameters()), "replicas in bf16-mixed")


def show_resuming(name: str, options: dict[str, Any]) -> None:
    """A resumed run is the run that was never interrupted, to the last bit; only rank 0 writes Lightning's files."""
    place = Path(OUT, name)
    keep_all = ModelCheckpoint(place, save_top_k=-1, filename="{epoch}")
    whole, late = Module(), Module(seed=0)
    first = fit(options, whole, callbacks=[keep_all], max_epochs=3, gradient_clip_val=1.0)
    second = fit(options, late, place / "epoch=1.ckpt", max_epochs=3, gradient_clip_val=1.0)
    assert late.losses == whole.losses[-len(late.losses) :]
    assert len(late.losses) * 3 == len(whole.losses)
    assert digest(late.parameters()) == digest(whole.parameters())
    alike(digest(whole.parameters()), "replicas")
    alike(whole.evaluated, "weights in evaluation")
    assert torch.equal(first.strategy.sync.residual, second.strategy.sync.residual)
    if name == "exdyna":
        assert first.strategy.sync.residual.abs().sum() > 0
        apart(digest([first.strategy.sync.residual]), "residuals")
    first.strategy.barrier()
    assert sorted(p.name for p in place.glob("*.ckpt")) == [f"epoch={n}.ckpt" for n in range(3)]
    files = {p.name for p in place.glob("epoch=1.ckpt.mpisparse/*/*/*")}
    assert {f"rank-{r:04d}.h5" for r in range(first.world_size)} <= files
    saved = torch.load(place / "epoch=2.ckpt", weights_only=True)["state_dict"]
    assert digest(saved.values()) == whole.evaluated[-1], "a checkpoint holds what was evaluated: the shared weights"


def show_other_ranks(place: Path) -> None:
    """A checkpoint of another number of ranks."""
    for name, options in (("exdyna", EXDYNA), ("drift", DRIFT)):
        module = Module()
        trainer = fit(options, module, place / name / "epoch=1.ckpt", max_epochs=3)
        alike(digest(module.parameters()), "replicas")
        assert trainer.current_epoch == 3


def show_stopping() -> None:
    """Early stopping and plateaus: all ranks decide alike. Only the last checkpoint is kept, with its ranks' states."""
    module, place = Module(plateau=True), OUT / "stopping"
    stop, last = EarlyStopping("worse", patience=1), ModelCheckpoint(place, save_last=True)
    log = CSVLogger(str(OUT / "logs"))
    trainer = fit(EXDYNA, module, callbacks=[stop, last], max_epochs=9, logger=log, log_every_n_steps=1)
    alike((trainer.current_epoch, [g["lr"] for g in trainer.optimizers[0].param_groups]), "epochs or learning rates")
    assert trainer.current_epoch == 2
    assert trainer.optimizers[0].param_groups[0]["lr"] < 0.05
    trainer.strategy.barrier()
    assert [p.name for p in (OUT / "logs").rglob("*.csv")] == ["metrics.csv"], "only rank 0 logs"
    assert len(list(place.glob("*.mpisparse"))) == len(list(place.glob("*.ckpt"))) == 2
    assert len(list(place.glob("last.ckpt.mpisparse/*"))) == 1
    trainer.save_checkpoint(place / "final.ckpt")
    before = digest(module.parameters())
    trainer.validate(module, DataLoader(data(24), batch_size=4), ckpt_path=place / "final.ckpt", verbose=False)
    assert module.evaluated[-1] == before


def show_messages() -> None:
    """Barrier, broadcast, gathering and reductions."""
    strategy = fit(EXDYNA, limit_train_batches=1, limit_val_batches=0, max_epochs=1).strategy
    rank, size = strategy.global_rank, strategy.world_size
    assert strategy.broadcast({"rank": rank}) == {"rank": 0}
    assert strategy.all_gather(torch.tensor([rank])).flatten().tolist() == list(range(size))
    assert float(strategy.reduce(torch.tensor(float(rank)))) == (size - 1) / 2
    assert int(strategy.reduce(torch.tensor(rank), reduce_op="sum")) == size * (size - 1) // 2
    assert strategy.reduce_boolean_decision(rank == 0, all=False)
    assert strategy.reduce_boolean_decision(rank == 0) == (size == 1)
    strategy.barrier()


def show_refusals() -> None:
    """What is asked wrongly is refused on all ranks."""
    with refused("returned 2 optimizers"):
        fit(EXDYNA, Module(optimizers=2, manual=True))
    with refused("unknown scheme 'exdina'; did you mean 'exdyna'?"):
        fit({"scheme": "exdina"})
    with refused("density must be in (0, 1], got 3"):
        fit({"density": 3})
    with refused("'dencity'"):
        fit({"dencity": 0.1})
    with refused("devices=7"):
        fit(EXDYNA, devices=7)
    with refused('gradient_clip_val needs accumulate="step"'):
        fit({**EXDYNA, "accumulate": "backward"}, gradient_clip_val=1.0)
    with refused("on a file system that all ranks see, got s3://bucket/x.ckpt"):
        fit(EXDYNA, limit_train_batches=1, limit_val_batches=0).save_checkpoint("s3://bucket/x.ckpt")
    with refused("was saved with scheme"):
        fit({"scheme": "topk", "density": 0.1}, None, OUT / "exdyna" / "epoch=1.ckpt", max_epochs=3)


def show_no_state() -> None:
    """A checkpoint that was copied without the ranks' states goes on with empty residuals, and says so."""
    copy = OUT / "copy.ckpt"
    strategy = fit(EXDYNA, limit_train_batches=1, limit_val_batches=0, max_epochs=1).strategy
    if strategy.is_global_zero:
        shutil.copy(OUT / "exdyna" / "epoch=1.ckpt", copy)
    strategy.barrier()
    words = told(lambda: fit(EXDYNA, None, copy, max_epochs=3))
    assert ("holds no state of step" in words) == strategy.is_global_zero


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for message in (".*LeafSpec.*", ".*does not have many workers.*"):
        warnings.filterwarnings("ignore", message=message)
    show_losses()
    show_resuming("exdyna", EXDYNA)
    show_resuming("drift", DRIFT)
    if OTHER is not None:
        show_other_ranks(OTHER)
    show_stopping()
    show_messages()
    show_refusals()
    show_no_state()
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    print(f"rank {rank} of {size}: all shown", flush=True)


if __name__ == "__main__":
    main()
