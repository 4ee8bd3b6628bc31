"""Computing something with a model on the side, so that the training around it does not notice."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from mpisparse.errors import ConfigurationError


@contextlib.contextmanager
def undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """In the block the model is in eval mode; afterwards modes, buffers and all global generators are as before."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    torchs, numpys, pythons = torch.get_rng_state(), np.random.get_state(), random.getstate()
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        torch.set_rng_state(torchs)
        np.random.set_state(numpys)
        random.setstate(pythons)


def gradient_aside(
    model: torch.nn.Module, params: list[torch.nn.Parameter], loss: Callable[[], Any], name: str
) -> list[torch.Tensor | None]:
    """The gradient of what loss() returns, None where a parameter plays no part; p.grad and hooks on it are left alone."""
    with undisturbed(model), torch.enable_grad():
        value = loss()
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            got = (
                f"shape {list(value.shape)}, requires_grad={value.requires_grad}"
                if isinstance(value, torch.Tensor)
                else value
            )
            raise ConfigurationError(f"{name}() must return a loss, a tensor of one element with a gradient; got {got!r}")
        return list(torch.autograd.grad(value.reshape(()), params, allow_unused=True))
