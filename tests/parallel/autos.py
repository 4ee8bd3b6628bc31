"""Trainings with scheme auto, over links that are given, for its parallel tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from ranks import loss_of, seeded, small
from torch import nn

import mpisparse
from mpisparse.plan import choosing, measure
from mpisparse.plan.predict import Links, Window

FAST, SLOW = Links(1e-9, 1e15, 1e15), Links(1e-9, 1e3, 1e3)


def script(monkeypatch: pytest.MonkeyPatch) -> list[Links]:
    """Checks come after few steps; links come from a list, whose last one repeats; passes take no time.

    A step computes for 1 ms and exchanges for 1 ms, whatever the clock says: far from any prediction for these links.
    """
    told = [FAST]

    def window(computing: Sequence[float], waiting: Sequence[float], moving: Sequence[float]) -> Window:
        return Window([1e-3] * len(computing), [0.0] * len(waiting), [1e-3] * len(moving))

    monkeypatch.setattr(choosing, "Window", window)
    monkeypatch.setattr(choosing, "WARM", 2)
    monkeypatch.setattr(choosing, "WINDOW", 2)
    monkeypatch.setattr(measure, "links", lambda exchange: told.pop(0) if len(told) > 1 else told[0])
    monkeypatch.setattr(measure, "passes", lambda candidate, elements: 0.0)
    return told


def log_of(comm: MPI.Intracomm, directory: Path, entries: list[tuple[int, str]], model: nn.Module) -> str:
    """Write a log of choices on rank 0; collective."""
    path = directory / "choices.jsonl"
    if comm.rank == 0:
        lines = [{"choices": 1, "model": choosing.choices.digest_of(mpisparse.model.layout.Layout(model).slots)}]
        lines += [{"step": step, "candidate": name} for step, name in entries]  # type: ignore[dict-item]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    comm.Barrier()
    return str(path)


def trained(
    model: nn.Module, sync: mpisparse.GradientSync, optimizer: torch.optim.Optimizer, first: int, last: int
) -> list[int]:
    """Train from one step to another with an attached optimizer; returns the choices in use. Collective."""
    used = []
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, seeded(sync.rank, step)).backward()
        optimizer.step()
        used.append(int(sync.stats.details["choice"]))
    return used


def wide() -> nn.Module:
    """A net of 46,000 parameters, of which a few cost less than all in two bits."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(30, 900), nn.Tanh(), nn.Linear(900, 20))


def a_run(comm: MPI.Intracomm, kind: str = "SGD", make: Any = small, **options: Any) -> tuple[Any, ...]:
    model = make()
    sync = mpisparse.GradientSync(model, scheme="auto", comm=comm, **options)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    mpisparse.attach(optimizer, sync)
    return model, sync, optimizer
