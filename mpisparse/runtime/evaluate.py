"""Evaluation: all ranks share the examples, use the same buffers, and add up in rank order, so all get the same bits."""

from __future__ import annotations

import numpy as np
import torch

from mpisparse.arrays import Doubles
from mpisparse.errors import ConfigurationError
from mpisparse.runtime.journal import Journal
from mpisparse.runtime.parts import RunParts
from mpisparse.runtime.run_state import RunState
from mpisparse.runtime.settings import Settings
from mpisparse.runtime.workloads import Data, Examples, Task
from mpisparse.schemes import takes
from mpisparse.sync import GradientSync

EVAL_BATCH = 128


def evaluate(model: torch.nn.Module, examples: Examples, task: Task, sync: GradientSync, seed: int) -> tuple[float, float]:
    """Return loss and metric on these examples, the same on all ranks; leave the model as it was. Collective.

    Call it inside sync.global_weights(), which has the weights and buffers to evaluate with in the model.
    """
    while True:
        size = sync.size
        by_rank = sync.gather_floats(_measured(model, examples, task, sync, seed))
        if sync.size == size:  # else a rank has died, and nobody has measured its examples
            break
    total = by_rank.sum(axis=0)
    return float(total[0] / max(1.0, total[1])), float(task.finish(total[2] / max(1.0, total[3])))


def _measured(model: torch.nn.Module, examples: Examples, task: Task, sync: GradientSync, seed: int) -> Doubles:
    """Return the loss and the measure of this rank's examples as sums, each with their number. Local."""
    training, device = model.training, sync._layout.device
    model.eval()
    sums = np.zeros(4)
    with torch.no_grad():
        for start in range(sync.rank * EVAL_BATCH, len(examples), EVAL_BATCH * sync.size):
            indices = np.arange(start, min(start + EVAL_BATCH, len(examples)))
            inputs, targets = examples.batch(indices, seed=seed, epoch=0, train=False)
            inputs, targets = inputs.to(device), targets.to(device)
            outputs = model(inputs)
            loss, (measured, count) = task.loss(outputs, targets), task.measure(outputs, targets)
            sums += (float(loss) * len(indices), len(indices), measured, count)
    model.train(training)
    return sums


def steering(settings: Settings, data: Data) -> Examples | None:
    """Return the examples that steer training (target, adaptive k, learned importance), or None."""
    return data.test if settings.evaluate_on == "test" else data.validation


def check_steering(settings: Settings, data: Data) -> None:
    """Raise ConfigurationError if a setting needs validation data and there is none."""
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
                f"{what} needs validation data, but --validation 0 holds out none; hold some out, or pass "
                "--evaluate-on test to use the test data instead"
            )


def reached(metric: float | None, target: float | None, task: Task) -> bool:
    """Return whether a metric is as good as the target; False if either is missing."""
    if metric is None or target is None:
        return False
    return metric >= target if task.higher_is_better else metric <= target


class Evaluations:
    """Measures, reports, and passes the metric to the scheme."""

    def __init__(self, parts: RunParts, journal: Journal, state: RunState) -> None:
        self.parts, self.journal, self.state = parts, journal, state

    def steer(self) -> bool:
        """Evaluate on the data that steers training, if any; return whether the target is reached. Collective."""
        settings, task = self.parts.settings, self.parts.task
        examples = steering(settings, self.parts.data)
        if examples is None:
            return False
        self.state.metric = self._measure(settings.evaluate_on, examples)
        self._observe(self.state.metric)
        return reached(self.state.metric, settings.target, task)

    def judge(self) -> None:
        """Evaluate on the data that did not steer training, at the end. Collective."""
        data = self.parts.data
        for name, examples in (("validation", data.validation), ("test", data.test)):
            if name != self.parts.settings.evaluate_on and examples is not None:
                self._measure(name, examples)

    def _measure(self, name: str, examples: Examples) -> float:
        """Evaluate and report loss and metric on these examples; return the metric. Collective."""
        parts = self.parts
        with parts.sync.global_weights():
            loss, metric = evaluate(parts.model, examples, parts.task, parts.sync, parts.settings.seed)
        self.journal.evaluation(name, loss, metric)
        return metric

    def _observe(self, metric: float) -> None:
        """Pass the metric to a scheme that adapts k to it, and report the change. Collective."""
        sync = self.parts.sync
        if not sync.observes:
            return
        before = sync.k
        sync.observe(metric, higher_is_better=self.parts.task.higher_is_better)
        if sync.k != before:
            self.journal.event("k", f"{'raised' if sync.k > before else 'lowered'} from {before:,} to {sync.k:,}")
