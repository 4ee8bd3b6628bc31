"""What schemes need to know about optimizers, by their names, so that those of other packages are covered, too."""

from __future__ import annotations

import sys
from typing import Any

import torch

# Names of optimizers that divide by what they have seen of an element's gradient, in torch and elsewhere, or parts of names.
ADAPTIVE = ("adam", "adagrad", "adadelta", "adafactor", "adabelief", "rmsprop", "rprop", "lamb")
# Optimizers whose state holds copies of weights, or parts of their names.
HOLDS_COPIES = ("schedulefree", "lookahead", "ranger", "madgrad", "dadaptsgd", "dadaptadagrad")
# Wrappers that only pass step() on, or leave it out, and where they have the optimizer.
WRAPPERS = {"AcceleratedOptimizer": "optimizer", "LightningOptimizer": "_optimizer"}


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside Accelerate's or Lightning's wrapper: hooks and states belong to it."""
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    name = next((name for kind, name in WRAPPERS.items() if kind in kinds), None)
    return optimizer if name is None else unwrapped(getattr(optimizer, name))


def is_inner_step(optimizer: torch.optim.Optimizer) -> bool:
    """Tell, in a hook, whether a subclass's step() has called that of its base class, for which torch calls hooks again.

    It does so if an optimizer of the base class was made earlier. To be called in a hook of the optimizer.
    """
    steps = [vars(kind).get("step") for kind in type(optimizer).__mro__]
    hooked: list[Any] = [step for step in steps if getattr(step, "hooked", False)]
    if len(hooked) < 2:
        return False
    within, frame = 0, sys._getframe(1)
    while (before := frame.f_back) is not None:  # torch's wrapper of step() is the same code for all classes
        frame = before
        within += frame.f_code is hooked[0].__code__ and frame.f_locals.get("self") is optimizer
    return within > 1


def is_adaptive(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer scales each element's step by the gradients it has seen, as far as its kind's name says."""
    return any(known in name for name in _names(optimizer) for known in ADAPTIVE)


def holds_copies(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer keeps copies of weights in its state, as far as its kind's name says."""
    return any(known in name for name in _names(optimizer) for known in HOLDS_COPIES)


def moments(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Momentum and mean square of a parameter's gradients, each None unless the optimizer keeps one per element."""
    entry = optimizer.state.get(p, {})
    first, second = (
        next((entry[name] for name in names if getattr(entry.get(name), "shape", None) == p.shape), None)
        for names in (("exp_avg", "momentum_buffer"), ("exp_avg_sq", "square_avg"))
    )
    return first, second


def _names(optimizer: torch.optim.Optimizer) -> list[str]:
    return [kind.__name__.lower() for kind in type(optimizer).__mro__]
