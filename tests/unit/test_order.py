"""The way of a step through the modules: few rooms, few doors."""

from __future__ import annotations

import itertools
import sys
from types import FrameType
from typing import Any

import torch

import mpisparse


def modules_of_a_step(sync: mpisparse.GradientSync) -> list[str]:
    """Return the package's modules in the order in which one step enters and leaves their functions."""
    seen: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        inside = frame.f_back if event == "return" else frame
        name = inside.f_globals.get("__name__", "") if inside is not None and event in ("call", "return") else ""
        if name.startswith("mpisparse."):
            seen.append(name)

    sys.setprofile(note)
    try:
        sync.step()
    finally:
        sys.setprofile(None)
    return seen


def test_a_step_changes_modules_rarely() -> None:
    """A step of exdyna on one rank: at most 45 changes between modules, returns counted, in at most 10 of them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))
    sync = mpisparse.GradientSync(model, density=0.01)
    for _ in range(6):
        model.zero_grad()
        model(torch.randn(8, 300)).square().sum().backward()
        seen = modules_of_a_step(sync)
    changes = sum(before != after for before, after in itertools.pairwise(seen))
    assert 10 < changes <= 45, f"{changes} changes: {seen}"
    assert len(set(seen)) <= 10, sorted(set(seen))
    assert "mpisparse.core.step" in seen
    sync.close()
