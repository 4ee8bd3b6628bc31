"""Saving and restoring the global random generators of torch, NumPy and Python."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Return the states of the global generators."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "numpy": [name, np.asarray(keys), int(position), int(has_gauss), float(gauss)],
        "python": random.getstate(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the states of the global generators."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(tuple(state["numpy"]))
    random.setstate(state["python"])
