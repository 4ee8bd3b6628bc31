"""attach: exchange before each optimizer step, by itself, with closures and with a GradScaler."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo

from mpisparse.errors import ConfigurationError
from mpisparse.scaling import LocalScaling, ScalerAgreement, ScalerAlarm
from mpisparse.schemes.optimizers import is_adaptive, is_inner_step, unwrapped
from mpisparse.sync import GradientSync

STILL_SCALED = (
    "another attached optimizer has new gradients that the GradScaler has not unscaled, and all gradients are exchanged "
    "together: call scaler.unscale_() for each optimizer before the first scaler.step(), and "
    "scaler.update() before the next backward"
)


class Attachment:
    """An optimizer tied to a GradientSync; remove() unties it."""

    def __init__(self, optimizer: torch.optim.Optimizer, sync: GradientSync, scaler: Any) -> None:
        self._optimizer = optimizer
        self._sync = sync
        scales = scaler is not None and scaler.is_enabled()
        sync._companion.adopt(optimizer, scales=scales)
        self._known, self._strangers = list[int](), list[torch.nn.Parameter]()
        self._expects_closure = False  # the optimizer was given a closure, and has not evaluated it yet
        self._add_group = optimizer.add_param_group
        optimizer.add_param_group = self._add_param_group  # type: ignore[method-assign]
        self._handles = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )
        self._scaler = scaler if scales else None
        self._local = LocalScaling(optimizer, sync, scaler) if scales else None
        self._agreement = ScalerAgreement(optimizer, sync, scaler) if scales else None
        self._alarm = ScalerAlarm(optimizer, sync, self._scaler)
        sync._attached.append(self)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that is tied."""
        return self._optimizer

    @property
    def scaler(self) -> Any:
        """The GradScaler that decides over steps, if there is one."""
        return self._scaler

    @property
    def still_scaled(self) -> bool:
        """Whether the optimizer has new gradients that its GradScaler has not unscaled; local."""
        return self._agreement is not None and self._agreement.still_scaled

    @property
    def is_over(self) -> bool:
        """Whether its GradientSync was closed, or another was made for the same model: steps would only raise that."""
        return bool(self._sync._hooks.removed)

    def remove(self) -> None:
        """Leave the optimizer, and the scaler, as they were."""
        for handle in self._handles:
            handle.remove()
        vars(self._optimizer).pop("add_param_group", None)
        for around in (self._alarm, self._agreement, self._local):
            if around is not None:
                around.remove()
        self._sync._companion.release(self._optimizer)
        if self in self._sync._attached:
            self._sync._attached.remove(self)

    def trust_scaler(self) -> None:
        """Look for no other GradScaler: a framework that brings its own asks the optimizer whether it unscales by itself."""
        self._alarm.remove()

    def _add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, if all in it are exchanged."""
        self._add_group(param_group)
        try:
            check_exchanged(self._optimizer.param_groups[-1:], self._sync)
        except ConfigurationError:
            self._optimizer.param_groups.pop()
            raise

    def _trouble(self) -> str | None:
        """What the optimizer would move that is not exchanged: groups may also be changed by hand, and what was frozen set
        free."""
        groups = self._optimizer.param_groups
        now = [id(p) for group in groups for p in group["params"]]
        if now != self._known:
            self._known, self._strangers = now, strangers(groups, self._sync)
        strange = next((not_exchanged(p, self._sync) for p in self._strangers if p.requires_grad), None)
        others = [one for one in self._sync._attached if one is not self]
        return strange or (STILL_SCALED if any(one.still_scaled for one in others) else None)

    @_disable_dynamo  # a compiled optimizer.step() must not compile the exchange
    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Exchange now, or after each evaluation of the closure if there is one; args begin with the optimizer."""
        if is_inner_step(optimizer):
            return None
        self._alarm.check()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._expects_closure = closure is not None and self._sync.averages_gradients
        self._sync._equality.release()
        if self._expects_closure:
            self._sync.hold_weights()
        if closure is None or not self._expects_closure:
            self._sync.begin(self._trouble(), optimizer)
            return None
        wrapped = functools.partial(self._evaluate, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    @_disable_dynamo
    def _after_step(self, *_: Any) -> None:
        """Tell the exchange that the optimizer is done."""
        if is_inner_step(self._optimizer):
            return
        self._sync._equality.release()
        if self._expects_closure:
            raise ConfigurationError(
                f"r{self._sync.rank} | {type(self._optimizer).__name__}.step() did not evaluate the closure it was given: "
                "nothing was exchanged, and weights may have moved by this rank's own gradient. Call backward() before "
                "step(), and step() without a closure"
            )
        self._sync.finish()

    @_disable_dynamo
    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Evaluate, exchange, and return the loss averaged over ranks: optimizers that search by it must agree.

        A closure that returns None has done its work elsewhere, as in Lightning's manual optimization.
        """
        self._expects_closure = False
        loss = closure()
        self._sync.begin(self._trouble(), self._optimizer)
        own = loss.item() if isinstance(loss, torch.Tensor) else loss
        mean = self._sync.average(math.nan if own is None else float(own))  # on all ranks, whatever theirs returned
        if loss is None:
            return None
        return torch.tensor(mean, dtype=loss.dtype) if isinstance(loss, torch.Tensor) else mean


def strangers(groups: list[dict[str, Any]], sync: GradientSync) -> list[torch.nn.Parameter]:
    """What is in an optimizer's groups and is not exchanged."""
    known = {id(p) for p in sync._layout.params}
    return [p for group in groups for p in group["params"] if id(p) not in known]


def not_exchanged(p: torch.Tensor, sync: GradientSync) -> str:
    """That a parameter is not exchanged, in words."""
    name = next((f" {name}" for name, other in sync._model.named_parameters() if other is p), "")
    return (
        f"the optimizer holds a parameter{name} of shape {list(p.shape)} that GradientSync does not exchange: the ranks "
        "would drift apart; construct both from the same model, after the last change to it"
    )


def check_exchanged(groups: list[dict[str, Any]], sync: GradientSync) -> None:
    """Raise unless all that would be moved is exchanged; what requires no gradient may be there too. Local."""
    for p in strangers(groups, sync):
        if p.requires_grad:
            raise ConfigurationError(f"r{sync.rank} | {not_exchanged(p, sync)}")


def attach(optimizer: torch.optim.Optimizer, sync: GradientSync, scaler: Any = None) -> Attachment:
    """Call sync.step() by itself before each optimizer.step(); with a closure, after each of its evaluations.

    Where a scheme exchanges weights (drift), call it after each optimizer.step(); closures and scalers are then local.

    With `scaler` (a torch.amp.GradScaler) gradients are unscaled before the exchange, and all ranks skip a step together
    or none does. Warns on rank 0 of an adaptive optimizer on sparse gradients. Returns a handle with remove().

    An optimizer that Accelerate or Lightning has wrapped is taken out of its wrapper, whose scaler is the default.
    """
    wrapper, optimizer = optimizer, unwrapped(optimizer)
    if wrapper is not optimizer and scaler is None:
        scaler = getattr(wrapper, "scaler", None)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"attach expects a torch optimizer first, got {type(optimizer).__name__}")
    if getattr(optimizer, "exchanges", False):
        raise ConfigurationError(f"{type(optimizer).__name__} exchanges by itself: use it without a GradientSync")
    if not isinstance(sync, GradientSync):
        raise ConfigurationError(f"attach expects a GradientSync second, got {type(sync).__name__}")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ConfigurationError(f"attach expects a torch.amp.GradScaler as scaler, got {type(scaler).__name__}")
    before = getattr(optimizer.add_param_group, "__self__", None)
    here = any(one.optimizer is optimizer for one in sync._attached)  # also if something else is around add_param_group
    if here or (isinstance(before, Attachment) and not before.is_over):
        raise ConfigurationError(
            f"r{sync.rank} | this optimizer is attached already, and one exchange belongs to each of its steps; call "
            "remove() on what attach() returned first"
        )
    check_exchanged(optimizer.param_groups, sync)
    if scaler is not None and scaler.is_enabled() and sync.options.accumulate == "backward":
        raise ConfigurationError(
            f'r{sync.rank} | a GradScaler needs accumulate="step": during backward gradients are still scaled when they are '
            "added to the residual"
        )
    if isinstance(before, Attachment):
        before.remove()
    attachment = Attachment(optimizer, sync, scaler)
    minds = sync.options.of_weights or sync.options.suits_optimizer or sync.scheme == "dense"
    sparse = not minds and min(sync.density, sync.options.density) < 1.0
    if sparse and is_adaptive(optimizer) and sync.rank == 0:
        warnings.warn(
            f"an adaptive optimizer ({type(optimizer).__name__}) on sparse gradients: with AdamW on a GPT, 2 ranks, 600 "
            "steps and one seed, the measured validation loss of exdyna was 2.325 at density 0.1 and 2.416 at 0.01, where "
            'one rank alone had 2.263 and dense 2.143. Use scheme="drift", or scheme="dense" with codec="int4" '
            "(docs/howto/choosing.md); or SGD",
            stacklevel=2,
        )
    return attachment
