"""Adam's two moments of each parameter, and the parameters' moves by them. Local: the same on all ranks.

The denominator of the momentum is the root of the variance plus eps. While the variance rests it is at least a share of
its tensor's mean, for parts that had no gradient in the warm-up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from mpisparse.backends.flat import Slot, memory_order
from mpisparse.errors import ConfigurationError
from mpisparse.optim.arguments import check_parameter

FLOOR = 0.05  # the least denominator, as a share of the mean of its tensor


class Member(NamedTuple):
    """A parameter with its group, its place in the flat vectors, and its moments.

    moments: "exp_avg" and "exp_avg_sq", and in how many steps each has moved: "step" and "variance_step".
    """

    group: dict[str, Any]
    slot: Slot
    p: torch.Tensor
    moments: dict[str, Any]

    def move_moments_(self, gradient: torch.Tensor, steps: float) -> None:
        """Move both by a mean gradient; the variance as far as in so many steps."""
        beta1, beta2 = self.group["betas"]
        kept = beta2**steps
        self.moments["step"] += 1
        self.moments["variance_step"] += steps
        self.moments["exp_avg"].lerp_(gradient, 1 - beta1)
        self.moments["exp_avg_sq"].mul_(kept).addcmul_(gradient, gradient, value=1 - kept)

    def own_update_(self, gradient: torch.Tensor, floor: float) -> None:
        """Make of this rank's gradient the update that follows from it."""
        beta1 = self.group["betas"][0]
        gradient.mul_(1 - beta1).add_(self.moments["exp_avg"], alpha=beta1).div_(self.denominator(floor))

    def take_update_(self, update: torch.Tensor, floor: float) -> None:
        """Let the momentum be the one that a mean update is of."""
        self.moments["step"] += 1
        torch.mul(update, self.denominator(floor), out=self.moments["exp_avg"])

    def move_(self, update: torch.Tensor) -> None:
        """Decay, and move by an update; the momentum began with zeros."""
        lr, correction = float(self.group["lr"]), 1 - self.group["betas"][0] ** float(self.moments["step"])
        self.p.mul_(1 - lr * self.group["weight_decay"])
        self.p.add_(update, alpha=-lr / correction)

    def denominator(self, floor: float = 0.0) -> torch.Tensor:
        """What the momentum is divided by; the variance began with zeros."""
        correction = 1 - self.group["betas"][1] ** float(self.moments["variance_step"]) or 1.0
        root: torch.Tensor = self.moments["exp_avg_sq"].sqrt().div_(correction**0.5)
        if floor:
            root.clamp_(min=floor)
        return root.add_(self.group["eps"])

    def floor(self) -> float:
        """The least denominator. NumPy adds up in the same order for any number of threads."""
        return FLOOR * float(np.mean(self.denominator().cpu().numpy(), dtype=np.float64)) if self.p.numel() else 0.0


class Places:
    """Places of all parameters that require gradients in one flat vector, in the order of the groups."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.groups = groups
        self.slots: list[Slot] = []
        self.params: list[torch.Tensor] = []
        self.numbers: list[int] = []  # as torch counts parameters in a state
        number = -1
        for name, p in _named(groups):
            number += 1
            if not p.requires_grad:
                continue
            check_parameter(name, p)
            if self.params and p.device != self.params[0].device:
                raise ConfigurationError(
                    f"parameter {name} is on {p.device}, others are on {self.params[0].device}: move all to one device"
                )
            self.slots.append(Slot(name, self.size, self.size + p.numel(), tuple(p.shape), memory_order(p), p.dtype))
            self.params.append(p)
            self.numbers.append(number)
        if not self.size:
            raise ConfigurationError("no parameter requires a gradient; nothing would be exchanged")
        self.device = self.params[0].device

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.slots[-1].end if self.slots else 0

    def describe(self) -> list[str]:
        """One line for each parameter."""
        return [f"{s.name} {list(s.shape)} {s.dtype} {list(s.stride)}" for s in self.slots]

    def members(self, state: Any) -> list[Member]:
        """Each parameter with what belongs to it, from an optimizer's state."""
        of = {id(p): group for group in self.groups for p in group["params"]}
        return [Member(of[id(p)], slot, p, state[p]) for slot, p in zip(self.slots, self.params, strict=True)]

    def trouble(self) -> str:
        """Why no step can be done with these parameters and gradients, or an empty text."""
        known = {id(p) for p in self.params}
        for group in self.groups:
            if any(p.grad is not None and id(p) not in known for p in group["params"]):
                return "a parameter has a gradient that required none when OneBitAdamW was constructed; construct it anew"
        for slot, p in zip(self.slots, self.params, strict=True):
            if not slot.fits(p) or p.device != self.device:
                return f"parameter {slot.name} has another type, shape or place than when OneBitAdamW was constructed"
            if p.grad is not None and p.grad.layout is not torch.strided:
                return f"OneBitAdamW does not support sparse gradients, and parameter {slot.name} has one"
        return ""

    def name_at(self, index: int) -> str:
        """The name of the parameter that holds a flat index."""
        return next(slot.name for slot in self.slots if index < slot.end)


def _named(groups: list[dict[str, Any]]) -> Iterable[tuple[str, torch.Tensor]]:
    for number, group in enumerate(groups):
        names = group.get("param_names") or [f"{i} of group {number}" for i in range(len(group["params"]))]
        yield from zip(names, group["params"], strict=True)
