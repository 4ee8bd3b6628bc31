"""What schemes must know of optimizers, by their names: optimizers of other packages too."""

from __future__ import annotations

import torch

# Names of optimizers that divide by what they have seen of an element's gradient, in torch and elsewhere, or parts of names.
ADAPTIVE = ("adam", "adagrad", "adadelta", "adafactor", "adabelief", "rmsprop", "rprop", "lamb")
# Optimizers whose state holds copies of weights, or parts of their names.
HOLDS_COPIES = ("schedulefree", "lookahead")


def is_adaptive(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer scales each element's step by the gradients it has seen, as far as its kind's name says."""
    return any(known in name for name in _names(optimizer) for known in ADAPTIVE)


def holds_copies(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer keeps copies of weights in its state, as far as its kind's name says."""
    return any(known in name for name in _names(optimizer) for known in HOLDS_COPIES)


def _names(optimizer: torch.optim.Optimizer) -> list[str]:
    return [kind.__name__.lower() for kind in type(optimizer).__mro__]
