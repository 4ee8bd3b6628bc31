"""The user's optimizer on a few elements: it changes their weights and state, and no others."""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import Any

import numpy as np
import torch

from mpisparse.arrays import Floats, Ints
from mpisparse.backends.flat import Slot, on_device
from mpisparse.errors import ConfigurationError
from mpisparse.schemes.companion import Places

ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad)


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless the optimizer moves every element by that element's gradient and state alone."""
    if type(optimizer) not in ELEMENTWISE:
        known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise ConfigurationError(
            f'scheme "speculative" updates single weights, which {type(optimizer).__name__} is not known to do element by '
            f"element; use one of {known}, or staleness=0"
        )


def is_elementwise(name: str, value: Any, shape: torch.Size) -> bool:
    """Tell whether an entry of a parameter's optimizer state has a value for each element."""
    return isinstance(value, torch.Tensor) and name != "step" and value.shape == shape


def flat(slot: Slot, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a parameter's shape and order as its elements in flat order, on the same memory."""
    return tensor.as_strided((slot.end - slot.begin,), (1,))


class LocalUpdate:
    """Runs an optimizer of the same class, with the current groups, on gathered elements."""

    def __init__(self, places: Places, optimizer: torch.optim.Optimizer) -> None:
        self.places = places
        self.optimizer = optimizer
        known = inspect.signature(type(optimizer)).parameters
        settings = {name: value for name, value in optimizer.defaults.items() if name in known}
        self.shadow = type(optimizer)([torch.zeros(1)], **settings)

    @torch.no_grad()
    def apply(self, index: Ints, gradient: Floats) -> None:
        """Move the elements of an ascending index by their gradients; both are on the host."""
        cuts = np.searchsorted(index, [0, *self.places.ends]).tolist()
        moved, gradients = (on_device(each, self.places.device) for each in (index, gradient))
        ranges = {id(p): (i, cuts[i], cuts[i + 1]) for i, p in enumerate(self.places.params) if cuts[i] < cuts[i + 1]}
        touched: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.shadow.param_groups, self.shadow.state = [], defaultdict(dict)
        for group in self.optimizer.param_groups:
            gathered = []
            for p in group["params"]:
                if id(p) in ranges:
                    i, a, b = ranges[id(p)]
                    at = moved[a:b] - self.places.slots[i].begin
                    gathered.append(self._gather(i, p, at, gradients[a:b]))
                    touched.append((i, at, gathered[-1]))
            if gathered:
                self.shadow.param_groups.append({**group, "params": gathered})
        self.shadow.step()
        for i, at, values in touched:
            self._scatter(i, at, values)
        self.shadow.param_groups, self.shadow.state = [], defaultdict(dict)

    @torch.no_grad()
    def preview(self, gradient: torch.Tensor) -> torch.Tensor:
        """How far each element would move by its gradient; the weights and their state stay as they are."""
        moves = torch.zeros_like(gradient)
        places = {id(p): i for i, p in enumerate(self.places.params) if p.numel()}
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if id(p) not in places:
                    continue
                slot = self.places.slots[places[id(p)]]
                every = torch.arange(slot.end - slot.begin, device=gradient.device)
                self.shadow.state = defaultdict(dict)
                values = self._gather(places[id(p)], p, every, gradient[slot.begin : slot.end])
                for name, value in self.shadow.state[values].items():
                    if isinstance(value, torch.Tensor) and not is_elementwise(name, value, values.shape):
                        self.shadow.state[values][name] = value.clone()
                self.shadow.param_groups = [{**group, "params": [values]}]
                before = values.clone()
                self.shadow.step()
                moves[slot.begin : slot.end] = values.sub_(before).float()
        self.shadow.param_groups, self.shadow.state = [], defaultdict(dict)
        return moves

    def _gather(self, i: int, p: torch.Tensor, at: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The elements as a separate parameter, with their part of the state."""
        slot = self.places.slots[i]
        values = flat(slot, p.data)[at]
        values.grad = gradient.to(p.dtype)
        state = self.optimizer.state.get(p, {})
        if state:
            self.shadow.state[values] = {
                name: flat(slot, value)[at] if is_elementwise(name, value, p.shape) else value
                for name, value in state.items()
            }
        return values

    def _scatter(self, i: int, at: torch.Tensor, values: torch.Tensor) -> None:
        """Write the elements and their state back; a state created now is zero elsewhere."""
        slot, p = self.places.slots[i], self.places.params[i]
        flat(slot, p.data)[at] = values
        state = self.optimizer.state[p]
        for name, value in self.shadow.state[values].items():
            if not is_elementwise(name, value, values.shape):
                state[name] = value
                continue
            if name not in state:
                state[name] = torch.empty_strided(slot.shape, slot.stride, dtype=value.dtype, device=p.device).zero_()
            flat(slot, state[name])[at] = value
