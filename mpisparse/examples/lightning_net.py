"""Lightning: `mpirun -n 2 python -m mpisparse.examples.lightning_net`; `--resume runs/lightning/last.ckpt` goes on."""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from mpisparse.integrations.lightning import MPISparseStrategy


class Net(pl.LightningModule):
    """A classifier; nothing in it knows of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 4))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        """Return the loss of this rank's batch."""
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        """Log the accuracy, averaged over ranks."""
        right = self.net(batch[0]).argmax(1) == batch[1]
        self.log("accuracy", right.float().mean(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use SGD, which sparse gradients suit."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    """Train on all ranks; rank 0 prints and writes."""
    parser = argparse.ArgumentParser(description="Train a Lightning module with sparse exchange.")
    parser.add_argument("--out", default="runs/lightning", help="directory of checkpoints (default %(default)s)")
    parser.add_argument("--resume", help="checkpoint to go on from")
    parser.add_argument("--epochs", type=int, default=4, help="default %(default)s")
    args = parser.parse_args()

    pl.seed_everything(0)
    inputs = torch.randn(2048, 32)
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    training, held_out = random_split(data, [1536, 512])
    trainer = pl.Trainer(
        strategy=MPISparseStrategy(scheme="exdyna", density=0.05),  # the only line that is not plain Lightning
        accelerator="cpu", max_epochs=args.epochs, gradient_clip_val=1.0, logger=False,
        callbacks=[pl.callbacks.ModelCheckpoint(args.out, save_last=True)],
    )  # fmt: skip
    loaders = DataLoader(training, batch_size=32, shuffle=True), DataLoader(held_out, batch_size=32)
    trainer.fit(Net(), *loaders, ckpt_path=args.resume)
    if trainer.is_global_zero:
        metrics = "  ".join(f"{name} {value:.3f}" for name, value in trainer.callback_metrics.items())
        print(f"r0 | {trainer.world_size} ranks  {metrics}", flush=True)


if __name__ == "__main__":
    main()
