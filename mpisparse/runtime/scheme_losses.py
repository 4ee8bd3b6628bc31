"""Losses that a scheme may evaluate while it trains, passed to it as options `probe` and `validation`."""

from __future__ import annotations

from typing import Any

import torch

from mpisparse.runtime.evaluate import steering
from mpisparse.runtime.run_state import RunState
from mpisparse.runtime.schedule import Order, Position
from mpisparse.runtime.settings import Settings
from mpisparse.runtime.workloads import Data, Task
from mpisparse.schemes import find_scheme, takes

SEED_OFFSET = 2**40  # added to the seed, so that validation batches have an order of their own


class SchemeLosses:
    """The loss of the last training batch, and of a batch of validation data. Local."""

    def __init__(self, settings: Settings, model: torch.nn.Module, data: Data, task: Task, state: RunState) -> None:
        self.settings, self.model, self.task, self.state = settings, model, task, state
        self.examples = steering(settings, data)
        self.batch: tuple[Any, Any] = (None, None)  # inputs and targets of the last training batch
        self.rank, self.size = 0, 1  # set as soon as there is a communicator

    def options(self) -> dict[str, Any]:
        """Return the scheme's options, with the losses it takes added unless the user turned them off."""
        options = dict(self.settings.options)
        for name, loss in (("probe", self.probe), ("validation", self.validation)):
            available = self._learns(name) and (name == "probe" or self.examples is not None)
            if takes(self.settings.scheme, name) and options.setdefault(name, available) in (True, False):
                options[name] = loss if options[name] else None
        return options

    def _learns(self, name: str) -> bool:
        """Tell whether the scheme's scorer learns from this loss; where it has no choice of scorers it does."""
        scheme, scorer = self.settings.scheme, {"probe": "influence", "validation": "predicted"}[name]
        if not takes(scheme, "scorer"):
            return True
        return bool(self.settings.options.get("scorer", find_scheme(scheme)().scorer) == scorer)  # type: ignore[attr-defined]

    def probe(self) -> torch.Tensor:
        """Return the loss of the last batch."""
        inputs, targets = self.batch
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.settings.bf16):
            return self.task.loss(self.model(inputs), targets)

    def validation(self) -> torch.Tensor:
        """Return the loss of a batch of validation data; each rank has its own batch if there are enough examples."""
        assert self.examples is not None
        examples, rank, size = self.examples, self.rank, self.size
        order = Order(len(examples), self.settings.seed + SEED_OFFSET)
        share = min(2 * self.settings.batch_size, len(examples) // size)
        if share == 0:  # fewer examples than ranks
            share, rank, size = 1, self.rank % len(examples), len(examples)
        epoch, batch = divmod(self.state.step, order.steps_per_epoch(share, size))
        indices, _ = order.take(Position(epoch, batch * share * size), share, rank, size)
        inputs, targets = examples.batch(indices, seed=order.seed, epoch=epoch, train=False)
        return self.task.loss(self.model(inputs), targets)
