"""SGD with a cosine schedule and scheme momentum, on digits: `mpirun -n 2 python -m mpisparse.examples.momentum`."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import mpisparse

STEPS, BATCH, TRAINING = 300, 24, 1500  # BATCH per rank; images after the first TRAINING are for testing


def main() -> None:
    """Train on all ranks; print accuracy and what was sent."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(digits.target)[order]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    sync = mpisparse.GradientSync(model, scheme="momentum", density=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    mpisparse.attach(optimizer, sync)  # exchanges gradients before each optimizer.step()

    shard = torch.arange(sync.rank, TRAINING, sync.size)
    generator = torch.Generator().manual_seed(sync.rank)
    for step in range(1, STEPS + 1):
        batch = shard[torch.randint(len(shard), (BATCH,), generator=generator)]
        optimizer.zero_grad()
        cross_entropy(model(images[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if sync.rank == 0 and step % 50 == 0:
            with torch.no_grad():
                accuracy = (model(images[TRAINING:]).argmax(1) == labels[TRAINING:]).float().mean()
            stats = sync.stats
            print(
                f"r0 | step {step}  accuracy {accuracy:.3f}  selected {stats.density:.3f}  sent {stats.sent_density:.3f}  "
                f"bytes per selected element {stats.bytes_per_element:.2f}",
                flush=True,
            )
    sync.close()


if __name__ == "__main__":
    main()
