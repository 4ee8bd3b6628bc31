"""What a run computes with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mpisparse.runtime.settings import Settings
from mpisparse.runtime.workloads import Data, Task
from mpisparse.sync import GradientSync


@dataclass(frozen=True)
class RunParts:
    """The settings of a run and the objects made from them."""

    settings: Settings
    model: torch.nn.Module
    data: Data
    task: Task
    sync: GradientSync
    optimizer: torch.optim.Optimizer
