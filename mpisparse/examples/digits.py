"""Train a small convolutional network on scikit-learn's digits: `mpirun -n 2 python -m mpisparse.examples.digits`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import mpisparse
from mpisparse.runtime.progress import compared_with_dense

TRAINING = 1500  # images of 1,797; the others are for testing


def network() -> nn.Module:
    """Return a convolutional network with about 300,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 10),
    )  # fmt: skip


def train(density: float, epochs: int, batch: int, out: Path | None) -> None:
    """Train on all ranks; rank 0 prints progress and a summary, and writes the summary to `out`."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    training, testing = order[:TRAINING], order[TRAINING:]

    torch.manual_seed(0)
    model = network()
    sync = mpisparse.GradientSync(model, density=density)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    mpisparse.attach(optimizer, sync)

    steps = selected = received = 0
    accuracy = 0.0
    for epoch in range(epochs):
        shuffled = training[torch.randperm(TRAINING, generator=torch.Generator().manual_seed(epoch))]
        for start in range(0, TRAINING - batch * sync.size + 1, batch * sync.size):
            mine = shuffled[start + sync.rank * batch : start + (sync.rank + 1) * batch]
            optimizer.zero_grad()
            loss = cross_entropy(model(images[mine]), labels[mine])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            steps += 1
            selected += sync.stats.selected
            received += sync.stats.bytes_received
        with torch.no_grad():
            accuracy = float((model(images[testing]).argmax(1) == labels[testing]).float().mean())
        mean_loss = sync.average(loss.item())
        if sync.rank == 0:
            print(f"r0 | epoch {epoch + 1:2d}/{epochs}  loss {mean_loss:.4f}  accuracy {accuracy:.3f}", flush=True)

    elements = sync.residual.numel()
    dense = steps * 2 * 4 * elements * (sync.size - 1) // sync.size
    summary = [
        f"ranks           {sync.size}",
        f"parameters      {elements:,}",
        f"steps           {steps}",
        f"accuracy        {accuracy:.3f} on {len(testing)} test images",
        f"density         {selected / steps / elements:.5f} (set: {density:g})",
    ]
    if sync.size > 1:
        summary.append(f"bytes received  {received:,} per rank, {compared_with_dense(received, dense)} ({dense:,})")
    if sync.rank == 0:
        print("\n".join(summary))
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text("\n".join(["# mpisparse: digits", "", *(f"    {line}" for line in summary), ""]))
            print(f"report: {out}")
    sync.close()


def main() -> None:
    """Parse the options and train."""
    parser = argparse.ArgumentParser(description="Train a small convolutional network on scikit-learn's digits.")
    parser.add_argument(
        "--density", type=float, default=0.01, help="share of the gradient that is sent (default %(default)s)"
    )
    parser.add_argument("--epochs", type=int, default=12, help="default %(default)s")
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step (default %(default)s)")
    parser.add_argument("--out", type=Path, help="write the summary to this file")
    args = parser.parse_args()
    train(args.density, args.epochs, args.batch, args.out)


if __name__ == "__main__":
    main()
