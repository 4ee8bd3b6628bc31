"""Accelerate: `mpirun -n 2 python -m mpisparse.examples.accelerate_net`; `--resume` goes on from the last epoch."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import mpisparse
from mpisparse.integrations.accelerate import prepare


def main() -> None:
    """Train on all ranks; rank 0 prints and writes."""
    parser = argparse.ArgumentParser(description="Train under Accelerate with sparse exchange.")
    parser.add_argument("--out", type=Path, default=Path("runs/accelerate"), help="directory (default %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--epochs", type=int, default=4, help="default %(default)s")
    args = parser.parse_args()

    mpisparse.init_torch_distributed()  # before Accelerator: under mpirun, ranks find each other through MPI
    order = DataLoaderConfiguration(use_seedable_sampler=True)  # the order of the data depends on the epoch alone
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=order)
    torch.manual_seed(0)
    inputs = torch.randn(1536, 32)
    data = DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size=32, shuffle=True)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 4))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sync, model, optimizer, data = prepare(accelerator, model, optimizer, data, scheme="exdyna", density=0.05)

    done = args.out / "epochs.txt"
    if args.resume:
        accelerator.load_state(str(args.out))
    for epoch in range(int(done.read_text()) if args.resume else 0, args.epochs):
        data.set_epoch(epoch)
        for inputs, targets in data:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()  # exchanges when gradients are not only accumulated
                optimizer.zero_grad()
        accelerator.save_state(str(args.out))  # on all ranks, with every rank's residual
        if accelerator.is_main_process:
            done.write_text(str(epoch + 1))
        accelerator.print(f"r0 | epoch {epoch + 1}  loss {accelerator.reduce(loss.detach(), 'mean').item():.4f}")
    sync.close()


if __name__ == "__main__":
    main()
