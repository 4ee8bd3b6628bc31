"""Evaluation on all ranks together: with rank 0's buffers, each rank a share of the test data, sums in rank order."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mpisparse.runtime.workloads import Data, Task
from mpisparse.sync import GradientSync

EVAL_BATCH = 128


def evaluate(model: torch.nn.Module, data: Data, task: Task, sync: GradientSync, seed: int) -> tuple[float, float]:
    """Return loss and metric on the test data, the same on all ranks; leaves the model as it was. Collective."""
    own = [buffer.clone() for buffer in model.buffers()]
    sync.broadcast_(list(model.buffers()))
    training = model.training
    model.eval()
    sums = np.zeros(4)
    with torch.no_grad():
        for start in range(sync.rank * EVAL_BATCH, len(data.test), EVAL_BATCH * sync.size):
            indices = np.arange(start, min(start + EVAL_BATCH, len(data.test)))
            inputs, targets = data.test.batch(indices, seed=seed, epoch=0, train=False)
            inputs, targets = inputs.to(sync.residual.device), targets.to(sync.residual.device)
            outputs = model(inputs)
            loss, (measured, count) = task.loss(outputs, targets), task.measure(outputs, targets)
            sums += (float(loss) * len(indices), len(indices), measured, count)
    model.train(training)
    for buffer, value in zip(model.buffers(), own, strict=True):
        buffer.copy_(value)
    total = sync.gather_floats(sums).sum(axis=0)
    return float(total[0] / max(1.0, total[1])), float(task.finish(total[2] / max(1.0, total[3])))


def reached(metric: float, target: float | None, task: Any) -> bool:
    """Tell whether a metric is as good as the target."""
    if target is None:
        return False
    return metric >= target if task.higher_is_better else metric <= target
