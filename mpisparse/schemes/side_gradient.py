"""Compute an extra gradient without any effect on training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mpisparse.backends.flat import fill
from mpisparse.errors import ConfigurationError
from mpisparse.randomness import random_state, set_random_state


@contextlib.contextmanager
def untouched(model: torch.nn.Module) -> Iterator[None]:
    """Restore buffers and the global random generators at the end of the block."""
    places = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    random = random_state()
    try:
        yield
    finally:
        set_random_state(random)
        with torch.no_grad():
            for module, name, buffer, value in places:
                fill(buffer, value)
                module._buffers[name] = buffer


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put all modules into eval mode inside the block, and restore each one's mode at its end."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def gradient_of(
    loss: Callable[[], Any], params: list[torch.nn.Parameter], name: str
) -> tuple[float, list[torch.Tensor | None]]:
    """What loss() returns and its gradient, None where a parameter plays no part.

    p.grad stays as it is, and so hooks that follow its accumulation do not run; those of modules and of tensors do.
    """
    with torch.enable_grad():
        value = loss()
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            got = (
                f"shape {list(value.shape)}, requires_grad={value.requires_grad}"
                if isinstance(value, torch.Tensor)
                else value
            )
            raise ConfigurationError(f"{name}() must return a loss, a tensor of one element with a gradient; got {got!r}")
        moving = [p for p in params if p.requires_grad]
        grads = iter(torch.autograd.grad(value.reshape(()), moving, allow_unused=True))
        return value.item(), [next(grads) if p.requires_grad else None for p in params]


def gradient_aside(
    model: torch.nn.Module, params: list[torch.nn.Parameter], loss: Callable[[], Any], name: str
) -> list[torch.Tensor | None]:
    """The gradient of what loss() returns in eval mode."""
    with untouched(model), evaluating(model):
        return gradient_of(loss, params, name)[1]
