"""Scheme predictive in a training loop: validation data trains the predictor and adapts k; test data judges the result.

mpirun -n 2 python -m mpisparse.examples.predictive
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits

import mpisparse


def main() -> None:
    """Train a small perceptron on digits; print accuracy, k, and how well importance ranks the gradients."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    train, held_out, test = (slice(0, 1200), slice(1200, 1400), slice(1400, None))
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    cross_entropy = torch.nn.functional.cross_entropy

    def validation() -> torch.Tensor:
        return cross_entropy(model(images[held_out]), labels[held_out])

    def accuracy_on(part: slice) -> float:
        with torch.no_grad():
            return float((model(images[part]).argmax(1) == labels[part]).float().mean())

    sync = mpisparse.GradientSync(model, scheme="predictive", density=0.01, validation=validation)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mpisparse.attach(optimizer, sync)
    batches = torch.Generator().manual_seed(sync.rank)
    for step in range(1, 401):
        batch = torch.randint(train.start, train.stop, (32,), generator=batches)
        optimizer.zero_grad()
        cross_entropy(model(images[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 50 == 0:
            accuracy = accuracy_on(held_out)
            sync.observe(accuracy)
            if sync.rank == 0:
                ranking, plain = (sync.stats.details[key] for key in ("ranking", "ranking_by_magnitude"))
                summary = f"k {sync.k}  ranking {ranking:.2f}, by magnitude alone {plain:.2f}"
                print(f"step {step}  validation accuracy {accuracy:.3f}  {summary}")
    if sync.rank == 0:
        print(f"test accuracy {accuracy_on(test):.3f}")
    sync.close()


if __name__ == "__main__":
    main()
