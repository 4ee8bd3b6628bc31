"""Evaluation on all ranks together: with rank 0's buffers, each rank a share of the examples, sums in rank order."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mpisparse.errors import ConfigurationError
from mpisparse.runtime.settings import Settings
from mpisparse.runtime.workloads import Data, Examples, Task
from mpisparse.schemes import takes
from mpisparse.sync import GradientSync

EVAL_BATCH = 128


def evaluate(model: torch.nn.Module, examples: Examples, task: Task, sync: GradientSync, seed: int) -> tuple[float, float]:
    """Return loss and metric on these examples, the same on all ranks; leaves the model as it was. Collective."""
    own = [buffer.clone() for buffer in model.buffers()]
    sync.broadcast_(list(model.buffers()))
    training = model.training
    model.eval()
    sums = np.zeros(4)
    with torch.no_grad():
        for start in range(sync.rank * EVAL_BATCH, len(examples), EVAL_BATCH * sync.size):
            indices = np.arange(start, min(start + EVAL_BATCH, len(examples)))
            inputs, targets = examples.batch(indices, seed=seed, epoch=0, train=False)
            inputs, targets = inputs.to(sync.residual.device), targets.to(sync.residual.device)
            outputs = model(inputs)
            loss, (measured, count) = task.loss(outputs, targets), task.measure(outputs, targets)
            sums += (float(loss) * len(indices), len(indices), measured, count)
    model.train(training)
    for buffer, value in zip(model.buffers(), own, strict=True):
        buffer.copy_(value)
    total = sync.gather_floats(sums).sum(axis=0)
    return float(total[0] / max(1.0, total[1])), float(task.finish(total[2] / max(1.0, total[3])))


def steering(settings: Settings, data: Data) -> Examples | None:
    """The examples by which training is steered; None where there are none."""
    return data.test if settings.evaluate_on == "test" else data.validation


def check_steering(settings: Settings, data: Data) -> None:
    """Raise ConfigurationError if the settings need data to steer by, and there is none."""
    if steering(settings, data) is not None:
        return
    adapts = takes(settings.scheme, "adapt_k") and settings.options.get("adapt_k", True)
    needs = {
        "--target": settings.target is not None,
        "--eval-every": settings.eval_every is not None,
        f"the adaptive k of scheme {settings.scheme} (--option adapt_k=false turns it off)": adapts,
        "--option validation=true": settings.options.get("validation") is True,
    }
    for what, needed in needs.items():
        if needed:
            raise ConfigurationError(
                f"{what} needs validation data, and --validation 0 holds out none: hold some out, or pass "
                "--evaluate-on test to let the test data steer"
            )


def reached(metric: float, target: float | None, task: Any) -> bool:
    """Tell whether a metric is as good as the target."""
    if target is None:
        return False
    return metric >= target if task.higher_is_better else metric <= target
