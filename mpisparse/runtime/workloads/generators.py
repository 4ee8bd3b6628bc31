"""The global random generators of torch, NumPy and Python, which users' code may draw from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the global CPU generators afterwards. No other thread may draw from them meanwhile."""
    of_torch, of_numpy, of_python = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_python)


def seed_generators(seed: int) -> None:
    """Seed the global CPU generators."""
    seed &= 2**64 - 1
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
