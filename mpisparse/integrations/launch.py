"""What the integrations share: which ranks exchange, and an error that names a missing extra."""

from __future__ import annotations

from typing import Any

import torch

from mpisparse.comm.world import started_by

__all__: list[str] = []  # for the other integrations


def missing(library: str, extra: str) -> str:
    """Say that a library is not installed, and how to install it."""
    return f"{library} is not installed: pip install 'mpisparse[{extra}]'"


def communicator() -> Any:
    """Return what GradientSync takes as `comm`: torch's process group under torchrun, None (all of MPI) otherwise; local."""
    return torch.distributed.group.WORLD if started_by() == "torchrun" else None
