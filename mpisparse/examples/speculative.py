"""Scheme speculative with a probe, on digits: `mpirun -n 2 python -m mpisparse.examples.speculative`."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import mpisparse

STEPS, BATCH, TRAINING = 300, 24, 1500  # BATCH per rank; images after the first TRAINING are for testing


def main() -> None:
    """Train on all ranks; print accuracy and how far rank 0 ran ahead of the shared model."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(digits.target)[order]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def probe() -> torch.Tensor:
        """Return a loss from which the scheme estimates curvature; any batch will do."""
        return cross_entropy(model(images[:64]), labels[:64])

    sync = mpisparse.GradientSync(model, scheme="speculative", density=0.05, probe=probe, granularity="learned")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mpisparse.attach(optimizer, sync)  # required: the optimizer moves two sets of weights

    shard = torch.arange(sync.rank, TRAINING, sync.size)
    generator = torch.Generator().manual_seed(sync.rank)
    for step in range(1, STEPS + 1):
        batch = shard[torch.randint(len(shard), (BATCH,), generator=generator)]
        optimizer.zero_grad()
        loss = cross_entropy(model(images[batch]), labels[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        sync.note_loss(loss.item())  # the reward of the learned granularity
        optimizer.step()  # sends, receives the result of the previous step, corrects, updates
        if sync.rank == 0 and step % 50 == 0:
            with torch.no_grad(), sync.global_weights():  # the model that all ranks share
                accuracy = (model(images[TRAINING:]).argmax(1) == labels[TRAINING:]).float().mean()
            ahead = sync.stats.speculation  # type: ignore[attr-defined]  # of this scheme alone
            print(
                f"r0 | step {step}  accuracy {accuracy:.3f}  moved ahead {ahead.updated}  corrected {ahead.corrected}  "
                f"drift {ahead.drift:.4f}  fine layers {ahead.fine:.2f}",
                flush=True,
            )
    sync.synchronize()  # applies what is still in flight; now all ranks have the same model
    sync.close()


if __name__ == "__main__":
    main()
