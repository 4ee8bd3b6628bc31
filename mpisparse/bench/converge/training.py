"""One training of bench converge: the same loop for every case, on virtual workers or on real ranks."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import statistics
import sys
import time
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import mpisparse
from mpisparse.bench.converge.cases import ONEBIT, Case
from mpisparse.bench.converge.plan import Record, Run
from mpisparse.errors import ConfigurationError, GradientError
from mpisparse.optim import OneBitAdamW
from mpisparse.runtime.evaluate import evaluate
from mpisparse.runtime.run_state import RunState
from mpisparse.runtime.schedule import Order, lr_factor
from mpisparse.runtime.scheme_losses import SchemeLosses
from mpisparse.runtime.settings import Settings
from mpisparse.runtime.setup import decay_groups, make_optimizer, seed_rank
from mpisparse.runtime.workloads import Data, Examples, Task, build, hold_out
from mpisparse.runtime.workloads.split import Subset
from mpisparse.schemes.falling import density_at

LOOKS = 6  # evaluations on validation data before the last one
GLANCE = 256  # examples of each of them at most
HOPELESS = 1.5  # a loss of so many times the validation loss of the beginning has diverged
PATIENCE = 60.0  # seconds between reports of a run


def train(run: Run, comm: Any) -> Record:
    """Train on the ranks of a communicator and return the result, the same on all of them; collective."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="an adaptive optimizer")  # that is what is measured here
        training = Training(run, comm)
    try:
        ended = training.run()
        return {**training.record(), **(training.results() if ended else {"diverged": True})}
    finally:
        training.close()


class Training:
    """A model, its data, its optimizer and its exchange on one rank."""

    def __init__(self, run: Run, comm: Any) -> None:
        self.what, self.case, self.settings = run, run.case, _settings(run.case, run.settings)
        self.model, self.data, self.task = _workload(self.settings)
        self.losses = SchemeLosses(self.settings, self.model, self.data, self.task, RunState())
        self.sync = mpisparse.GradientSync(
            self.model, scheme=self.settings.scheme, density=self.settings.density, codec=self.settings.codec, comm=comm,
            **self.losses.options(),
        )  # fmt: skip
        self.losses.rank, self.losses.size = self.sync.rank, self.sync.size
        self.density = self.sync.density
        self.optimizer: Any = make_case_optimizer(self.model, self.settings, run.case, comm)
        self.exchanges = getattr(self.optimizer, "exchanges", False)  # by itself: then the sync only evaluates
        if not self.exchanges:
            mpisparse.attach(self.optimizer, self.sync)
        self.order = Order(len(self.data.train), self.settings.seed)
        self.steps = self.settings.steps or 1
        self.sync.check_together(self._too_few())
        seed_rank(self.settings.seed, self.sync.rank)
        self.received, self.seconds = 0.0, 0.0
        self.counted: Any = None  # the statistics that were counted last
        self.train_losses: list[float] = []
        self.curve: list[tuple[int, float]] = []
        self.told = time.monotonic()

    def close(self) -> None:
        """Free the communicators; collective."""
        self.sync.close()
        if self.exchanges:
            self.optimizer.close()

    def _too_few(self) -> ConfigurationError | None:
        needed = self.settings.batch_size * self.sync.size
        if needed <= self.order.count:
            return None
        return ConfigurationError(f"a step needs {needed} examples, the data has {self.order.count}; lower --batch-size")

    def run(self) -> bool:
        """Train to the end; return False if the training diverged. Collective."""
        self.model.train()
        every = -(-self.steps // LOOKS)
        try:
            for step in range(self.steps):
                if step % every == 0 and self._hopeless(step):
                    return False
                began = time.perf_counter()
                self._step(step)
                self.seconds += time.perf_counter() - began
                self._tell(step)
        except GradientError:  # a gradient or a weight is not finite, on all ranks together
            return False
        return True

    def _step(self, step: int) -> None:
        settings, sync = self.settings, self.sync
        rate = settings.lr * lr_factor(step, self.steps, settings.schedule, settings.warmup, settings.drop_at)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if settings.density_warmup:
            sync.density = density_at(step, self.density, settings.density_from, settings.density_warmup)
        self.optimizer.zero_grad()
        state = self.losses.state
        indices, epoch = self.order.take(state.position, settings.batch_size, sync.rank, sync.size)
        self.losses.batch = inputs, targets = self.data.train.batch(indices, seed=settings.seed, epoch=epoch, train=True)
        loss = self.task.loss(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if settings.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        sync.note_loss(loss.item())
        self.optimizer.step()
        state.step += 1
        self.train_losses.append(loss.item())
        self._count()

    def _count(self) -> None:
        """Add up what was received; in a step without an exchange the statistics are those of the last one, if any."""
        with contextlib.suppress(RuntimeError):
            stats = self.optimizer.stats if self.exchanges else self.sync.stats
            if stats is not self.counted:
                self.counted, self.received = stats, self.received + stats.bytes_received

    def _hopeless(self, step: int) -> bool:
        """Look at a part of the validation data; tell whether the training has diverged since the last look. Collective.

        The training loss decides: with batch normalization a validation loss may be large for a while and fall again.
        """
        assert self.data.validation is not None
        loss, _ = self._evaluate(some(self.data.validation, min(GLANCE, self.what.eval_examples)))
        recent = self.train_losses[self.curve[-1][0] :] if self.curve else []
        self.curve.append((step, loss))
        return not math.isfinite(loss) or (bool(recent) and self._diverged(self.sync.average(statistics.fmean(recent))))

    def _diverged(self, loss: float) -> bool:
        return not loss <= HOPELESS * self.curve[0][1]

    def _evaluate(self, examples: Examples) -> tuple[float, float]:
        with self.sync.global_weights():
            return evaluate(self.model, examples, self.task, self.sync, self.settings.seed)

    def _tell(self, step: int) -> None:
        if self.sync.rank == 0 and time.monotonic() - self.told > PATIENCE:
            self.told = time.monotonic()
            print(
                f"  {self.what}: step {step + 1}/{self.steps}, loss {self.train_losses[-1]:.4f}", file=sys.stderr, flush=True
            )

    def record(self) -> Record:
        """Return what is known of every run, diverged or not; collective."""
        done = max(1, len(self.train_losses))
        parameters = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        received = self.sync.average(self.received + self.sync.nbytes_in_flight)  # the last delivery, if it is late
        return {
            "case": self.case.name, "lr": self.settings.lr, "seed": self.settings.seed, "workers": self.sync.size,
            "definition": self.case.definition(), "steps": len(self.train_losses), "parameters": parameters,
            "bytes": received / done / parameters, "seconds": self.seconds,
            "examples_per_second": self.sync.size * self.settings.batch_size * done / max(self.seconds, 1e-9),
            "evaluated_by_step": [step for step, _ in self.curve],
            "validation_by_step": [loss if math.isfinite(loss) else None for _, loss in self.curve],
        }  # fmt: skip

    def results(self) -> Record:
        """Evaluate at the end of a run; collective."""
        assert self.data.validation is not None
        count = self.what.eval_examples
        validation, _ = self._evaluate(some(self.data.validation, count))
        test, metric = self._evaluate(some(self.data.test, count))
        tail = self.train_losses[-max(1, len(self.train_losses) // 10) :]
        train_loss = self.sync.average(statistics.fmean(tail))
        if self._diverged(validation) or not math.isfinite(test + train_loss):
            return {"diverged": True}
        found = {"validation": validation, "test": test, "train": train_loss, self.task.metric: metric}
        return {"diverged": False, **found}


def some(examples: Examples, count: int) -> Examples:
    """Return evenly spaced examples, the same in every run; all if there are no more than that."""
    return (
        examples if len(examples) <= count else Subset(examples, np.linspace(0, len(examples) - 1, count).astype(np.int64))
    )


def _settings(case: Case, settings: Settings) -> Settings:
    """Return the settings of a case: its scheme and options, its optimizer, and what the training loop does for it."""
    own: dict[str, Any] = {name: case.options[name] for name in ("density", "codec") if name in case.options}
    own |= case.loop
    options = {name: value for name, value in case.options.items() if name not in {"scheme", *own}}
    optimizer = settings.optimizer if case.optimizer in (None, ONEBIT) else case.optimizer
    return replace(settings, scheme=case.scheme, options=options, optimizer=optimizer, **own)


def make_case_optimizer(model: torch.nn.Module, settings: Settings, case: Case, comm: Any = None) -> torch.optim.Optimizer:
    """Create the optimizer of a case; `comm`: for one that exchanges by itself."""
    own = case.optimizer_options
    if case.optimizer == ONEBIT:
        options: dict[str, Any] = {
            "lr": settings.lr,
            "betas": (0.9, settings.beta2),
            "weight_decay": settings.weight_decay,
            **own,
        }
        onebit: torch.optim.Optimizer = OneBitAdamW(decay_groups(model, settings.weight_decay), comm=comm, **options)
        return onebit
    optimizer = make_optimizer(model, settings)
    for name, value in own.items():
        if name not in optimizer.defaults:
            known = ", ".join(sorted(optimizer.defaults))
            raise ConfigurationError(
                f"case {case.name!r}: {type(optimizer).__name__} has no option {name!r}; choose from: {known}"
            )
        for group in optimizer.param_groups:
            group[name] = tuple(value) if isinstance(value, list) else value
    return optimizer


def _workload(settings: Settings) -> tuple[torch.nn.Module, Data, Task]:
    """Return a model of one's own, and the data, which all workers of a process share."""
    model, data, task = _loaded(settings.model, settings.data, settings.seed, settings.validation)
    return copy.deepcopy(model), data, task


@functools.lru_cache(maxsize=4)
def _loaded(model: str, data: str | None, seed: int, validation: float) -> tuple[torch.nn.Module, Data, Task]:
    built, loaded, task = build(model, data, seed=seed)
    loaded = hold_out(loaded, validation, seed=seed)
    if loaded.validation is None:
        raise ConfigurationError("learning rates are picked by validation data, but --validation 0 holds out none")
    return built, loaded, task
