"""The complete state of every rank, beside a framework's own checkpoint, which holds that of rank 0 alone."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mpisparse import checkpoint
from mpisparse.errors import ConfigurationError
from mpisparse.sync import GradientSync

__all__: list[str] = []  # for the other integrations


def save(directory: Path, step: int, *, model: Any, optimizer: Any, sync: GradientSync) -> None:
    """Write model, optimizer, random generators and the exchange's state of all ranks; collective.

    Each step has a directory of its own: a later step of another run is never taken for this one.
    """
    checkpoint.save(_of(directory, step), step=step, model=model, optimizer=optimizer, sync=sync)


def remove_others(directory: Path, step: int) -> None:
    """Remove the states of other steps, when the framework's checkpoint of this one is complete; local, for rank 0."""
    for path in directory.glob("[0-9]*"):
        if path != _of(directory, step):
            shutil.rmtree(path, ignore_errors=True)


def load(directory: Path, step: int, *, model: Any, optimizer: Any, sync: GradientSync) -> bool:
    """Restore what save() wrote, on any number of ranks; collective.

    Warns on rank 0, and returns False, if there is nothing: the framework's checkpoint was written without mpisparse, or
    copied alone.
    """
    place = _of(directory, step)
    if not sync.agree_any(place.is_dir()):
        if sync.rank == 0:
            warnings.warn(
                f"{directory} holds no state of step {step}: training goes on from the framework's checkpoint with empty "
                "residuals",
                stacklevel=3,
            )
        return False
    found = checkpoint.load(place, model=model, optimizer=optimizer, sync=sync)
    if found is None:
        raise ConfigurationError(
            f"r{sync.rank} | {place} holds no valid state; use another checkpoint, or remove {directory} to go on from the "
            "framework's checkpoint with empty residuals"
        )
    return True


def shared_weights(state_dict: Callable[[], dict[str, Any]], sync: GradientSync) -> dict[str, Any]:
    """Return a model's state with the weights that all ranks share: copies, if the model holds others; collective."""
    if sync._companion.idle:
        return state_dict()
    with sync.global_weights():
        return {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in state_dict().items()}


def _of(directory: Path, step: int) -> Path:
    return directory / f"{step:08d}"
