"""What a run needs before its first step: output, lock, model, data, optimizer. An error on one rank is raised on all."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpisparse.backends.device import local_device
from mpisparse.comm.agreement import on_all
from mpisparse.comm.exchange import Exchange
from mpisparse.comm.transport import local_rank
from mpisparse.errors import ConfigurationError
from mpisparse.runtime.evaluate import check_steering
from mpisparse.runtime.lock import RunLock, take
from mpisparse.runtime.output import RankOutput
from mpisparse.runtime.settings import Settings
from mpisparse.runtime.workloads import Data, Task, build, hold_out
from mpisparse.stopping import StopRequest


def open_output(settings: Settings) -> RankOutput:
    """Check that the ranks see each other, and prepare where their output goes. Collective."""
    exchange = Exchange()
    error: ConfigurationError | None = None
    try:
        output = RankOutput(exchange.rank, Path(settings.out) / "logs" if settings.log_ranks else None)
    except OSError as caught:
        error = ConfigurationError(f"cannot write to {settings.out}: {caught.strerror}")
    exchange.raise_together(error)
    exchange.close()
    return output


def lock_together(settings: Settings, stop: StopRequest) -> RunLock | None:
    """Take the lock of the run's directory, which rank 0 holds for all. Collective."""
    exchange = Exchange()
    try:
        return take(Path(settings.out), exchange, stop, wait=settings.wait_for_lock)
    finally:
        exchange.close()


def build_together(settings: Settings) -> tuple[torch.nn.Module, Data, Task]:
    """Build model, data and task on every rank, and check that all ranks see the same data. Collective."""
    exchange, here = Exchange(), local_rank()

    def build_here() -> tuple[torch.nn.Module, Data, Task]:
        model, data, task = build(settings.model, settings.data, seed=settings.seed)
        data = hold_out(data, settings.validation, seed=settings.seed)
        check_steering(settings, data)
        return model.to(local_device(here)) if settings.device == "cuda" else model, data, task

    built = on_all(exchange, build_here)
    parts = (built[1].train, built[1].validation, built[1].test)
    counts = exchange.gather_texts(", ".join(str(len(part)) for part in parts if part is not None))
    error: ConfigurationError | None = None
    if counts[exchange.rank] != counts[0]:
        error = ConfigurationError(
            f"every rank must see the same data, which the runtime distributes: rank 0 has {counts[0]} examples, "
            f"this rank {counts[exchange.rank]}; return all of the data on every rank"
        )
    exchange.raise_together(error)
    exchange.close()
    return built


def make_optimizer(model: torch.nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Create the optimizer that the settings name."""
    parameters = decay_groups(model, settings.weight_decay)
    if settings.optimizer == "sgd":
        nesterov = settings.momentum > 0
        return torch.optim.SGD(
            parameters, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay, nesterov=nesterov,
            foreach=False,
        )  # fmt: skip
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, lr=settings.lr, betas=(0.9, settings.beta2), weight_decay=settings.weight_decay)


def decay_groups(model: torch.nn.Module, weight_decay: float) -> Any:
    """Return what an optimizer takes: the model's own groups, if it says which parameters decay, else one group."""
    groups = getattr(model, "parameter_groups", None)
    return groups(weight_decay) if groups is not None else [p for p in model.parameters() if p.requires_grad]


def seed_rank(seed: int, rank: int) -> None:
    """Seed the global generators, which dropout and users' code draw from, differently on every rank. Local."""
    seed = seed * 1_000_003 + rank + 1
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
