"""Built-in models and data, and any model or data by import path. Importing this needs neither torch nor MPI."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpisparse.runtime.workloads.catalogue import DATA, MODELS
from mpisparse.runtime.workloads.records import Data, Examples, Task
from mpisparse.runtime.workloads.tasks import TASKS

if TYPE_CHECKING:
    import torch

__all__ = ["DATA", "MODELS", "TASKS", "Data", "Examples", "Task", "build", "hold_out"]


def hold_out(data: Data, share: float, *, seed: int) -> Data:
    """Move this share of the training data to the validation data, unless there is some; only the seed decides which."""
    from mpisparse.runtime.workloads import split

    return split.hold_out(data, share, seed)


def build(model: str, data: str | None, *, seed: int) -> tuple[torch.nn.Module, Data, Task]:
    """Build a model, its data and its task from names, paths or import paths.

    `model` is a name of MODELS or `package.module:factory`; `data` is a name of DATA, a path, `package.module:factory`,
    or None for the model's own. `seed` initialises the model; global generators are left as they were.
    """
    from mpisparse.runtime.workloads import resolve

    return resolve.build(model, data, seed)
