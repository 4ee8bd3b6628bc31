"""attach: exchange before each optimizer step, by itself, with closures and with a GradScaler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from mpisparse.errors import ConfigurationError
from mpisparse.sync import GradientSync


class Attachment:
    """An optimizer tied to a GradientSync; remove() unties it."""

    def __init__(self, optimizer: torch.optim.Optimizer, sync: GradientSync, scaler: Any) -> None:
        self._optimizer = optimizer
        self._sync = sync
        sync._step.adopt(optimizer)
        self._handles = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(lambda *_: sync.finish()),
        )
        self._scaler = ScalerAgreement(optimizer, sync, scaler) if scaler is not None and scaler.is_enabled() else None

    def remove(self) -> None:
        """Leave the optimizer, and the scaler, as they were."""
        for handle in self._handles:
            handle.remove()
        if self._scaler is not None:
            self._scaler.remove()

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Exchange now, or after each evaluation of the closure if there is one; args begin with the optimizer."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._sync.begin()
            return None
        wrapped = functools.partial(self._evaluate, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Evaluate, exchange, and return the loss averaged over ranks: optimizers that search by it must agree."""
        loss = closure()
        self._sync.begin()
        if isinstance(loss, torch.Tensor):
            return torch.tensor(self._sync.average(loss.item()), dtype=loss.dtype)
        return self._sync.average(float(loss))


class ScalerAgreement:
    """Makes one GradScaler unscale before the exchange and agree on infinities over ranks.

    torch does not call optimizer.step() on a rank that saw an infinity, and lets fused optimizers unscale by
    themselves; so unscale_ and step of this scaler object are wrapped: gradients are always unscaled first, and
    whether one of them was infinite on any rank is known to all before the decision to step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, sync: GradientSync, scaler: Any) -> None:
        self._optimizer = optimizer
        self._sync = sync
        self._scaler = scaler
        self._unscale, self._step = scaler.unscale_, scaler.step
        scaler.unscale_, scaler.step = self.unscale_, self.step

    def remove(self) -> None:
        """Give the scaler its own methods back."""
        del self._scaler.unscale_, self._scaler.step

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale as torch does, then make every rank's found_inf the largest of all; collective."""
        self._unscale(optimizer)
        if optimizer is not self._optimizer:
            return
        flags = self._flags()
        agreed = self._sync.agree_any(any(bool(flag) for flag in flags))
        for flag in flags:
            flag.fill_(float(agreed))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale first if the user has not; then step as torch does, or leave it out if the verdict is so."""
        if optimizer is self._optimizer:
            state = self._scaler._per_optimizer_states[id(optimizer)]
            if state["stage"] is OptState.READY:
                self._scaler.unscale_(optimizer)
            if any(bool(flag) for flag in self._flags()):
                state["stage"] = OptState.STEPPED
                return None
        return self._step(optimizer, *args, **kwargs)

    def _flags(self) -> list[torch.Tensor]:
        return list(self._scaler._found_inf_per_device(self._optimizer).values())


def attach(optimizer: torch.optim.Optimizer, sync: GradientSync, scaler: Any = None) -> Attachment:
    """Call sync.step() by itself before each optimizer.step(); with a closure, after each of its evaluations.

    With `scaler` (a torch.amp.GradScaler) gradients are unscaled before the exchange, and all ranks skip a step together
    or none does. Returns a handle with remove().
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"attach expects a torch optimizer first, got {type(optimizer).__name__}")
    if not isinstance(sync, GradientSync):
        raise ConfigurationError(f"attach expects a GradientSync second, got {type(sync).__name__}")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ConfigurationError(f"attach expects a torch.amp.GradScaler as scaler, got {type(scaler).__name__}")
    known = {id(p) for p in sync._layout.params}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in known and p.requires_grad:
                raise ConfigurationError(
                    f"r{sync.rank} | the optimizer holds a parameter of shape {list(p.shape)} that GradientSync does not "
                    "exchange; construct both from the same model"
                )
    if scaler is not None and scaler.is_enabled() and sync.options.accumulate == "backward":
        raise ConfigurationError(
            f'r{sync.rank} | a GradScaler needs accumulate="step": during backward gradients are still scaled when they are '
            "added to the residual"
        )
    return Attachment(optimizer, sync, scaler)
