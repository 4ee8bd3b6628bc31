"""attach: exchange before each optimizer step, by itself, with closures and with a GradScaler."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from mpisparse.errors import ConfigurationError
from mpisparse.schemes.optimizers import is_adaptive, unwrapped
from mpisparse.sync import GradientSync


class Attachment:
    """An optimizer tied to a GradientSync; remove() unties it."""

    def __init__(self, optimizer: torch.optim.Optimizer, sync: GradientSync, scaler: Any) -> None:
        self._optimizer = optimizer
        self._sync = sync
        scales = scaler is not None and scaler.is_enabled()
        sync._companion.adopt(optimizer, scales=scales)
        self._known, self._strangers = list[int](), list[torch.nn.Parameter]()
        self._add_group = optimizer.add_param_group
        optimizer.add_param_group = self._add_param_group  # type: ignore[method-assign]
        self._handles = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(lambda *_: sync.finish()),
        )
        kinds = (LocalScaling, ScalerAgreement) if scales else ()
        self._scaling = [kind(optimizer, sync, scaler) for kind in kinds]
        self._alarm = ScalerAlarm(optimizer, sync, scaler if scales else None)
        sync._attached.append(self)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that is tied."""
        return self._optimizer

    @property
    def scales(self) -> bool:
        """Whether a GradScaler decides over steps."""
        return bool(self._scaling)

    @property
    def is_over(self) -> bool:
        """Whether its GradientSync was closed, or another was made for the same model: steps would only raise that."""
        return bool(self._sync._hooks.removed)

    def remove(self) -> None:
        """Leave the optimizer, and the scaler, as they were."""
        for handle in self._handles:
            handle.remove()
        vars(self._optimizer).pop("add_param_group", None)
        self._alarm.remove()
        for scaling in reversed(self._scaling):
            scaling.remove()
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
        return next((not_exchanged(p, self._sync) for p in self._strangers if p.requires_grad), None)

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Exchange now, or after each evaluation of the closure if there is one; args begin with the optimizer."""
        self._alarm.check()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None or not self._sync.averages_gradients:
            self._sync.begin(self._trouble())
            return None
        wrapped = functools.partial(self._evaluate, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Evaluate, exchange, and return the loss averaged over ranks: optimizers that search by it must agree.

        A closure that returns None has done its work elsewhere, as in Lightning's manual optimization.
        """
        loss = closure()
        self._sync.begin(self._trouble())
        own = loss.item() if isinstance(loss, torch.Tensor) else loss
        mean = self._sync.average(math.nan if own is None else float(own))  # on all ranks, whatever theirs returned
        if loss is None:
            return None
        return torch.tensor(mean, dtype=loss.dtype) if isinstance(loss, torch.Tensor) else mean


class ScalerAgreement:
    """Makes one GradScaler unscale before the exchange of gradients and agree on infinities over ranks.

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
        if sync._early is not None:
            sync._early.scaler = scaler

    def remove(self) -> None:
        """Give the scaler the methods back that it had."""
        self._scaler.unscale_, self._scaler.step = self._unscale, self._step
        if self._sync._early is not None:
            self._sync._early.scaler = None

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale as torch does, then make every rank's found_inf the largest of all; collective."""
        self._unscale(optimizer)
        if optimizer is not self._optimizer or not self._sync.averages_gradients:
            return
        if self._sync._early is not None:
            self._sync._early.unscaled()
        flags = self._flags()
        agreed = self._sync.agree_any(any(bool(flag) for flag in flags))
        for flag in flags:
            flag.fill_(float(agreed))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale first if the user has not; then step as torch does, or leave it out if the verdict is so."""
        if optimizer is self._optimizer and self._sync.averages_gradients:
            state = self._scaler._per_optimizer_states[id(optimizer)]
            if state["stage"] is OptState.READY:
                self._scaler.unscale_(optimizer)
            if any(bool(flag) for flag in self._flags()):
                state["stage"] = OptState.STEPPED
                self._sync._aggregator.recall()  # what has set out during backward
                return None
        return self._step(optimizer, *args, **kwargs)

    def _flags(self) -> list[torch.Tensor]:
        return list(self._scaler._found_inf_per_device(self._optimizer).values())


class LocalScaling:
    """Lets one GradScaler skip steps of this rank alone, where weights are exchanged; the exchange goes on all the same."""

    def __init__(self, optimizer: torch.optim.Optimizer, sync: GradientSync, scaler: Any) -> None:
        self._optimizer = optimizer
        self._sync = sync
        self._scaler = scaler
        self._stepped = False
        self._handle = optimizer.register_step_post_hook(self._note)
        self._step = scaler.step
        scaler.step = self.step

    def remove(self) -> None:
        """Give the scaler the method back that it had."""
        self._handle.remove()
        self._scaler.step = self._step

    def _note(self, *_: Any) -> None:
        self._stepped = True

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step as torch does; if that was skipped, exchange nevertheless."""
        self._stepped = False
        result = self._step(optimizer, *args, **kwargs)
        if optimizer is self._optimizer and not self._stepped and self._sync.exchanges_weights:
            self._sync.finish()
        return result


class ScalerAlarm:
    """Refuses a GradScaler that attach() was not given: a rank that skips a step alone would leave the others waiting.

    torch then calls no hook on that rank. So the optimizer claims to unscale by itself: the scaler calls its step() in any
    case, and all ranks raise in their first one. Where weights are exchanged, an optimizer that does unscale may go on.
    known: the scaler that attach() was given, if any; while it steps, there is no such claim.
    """

    def __init__(self, optimizer: Any, sync: GradientSync, known: Any = None) -> None:
        self._optimizer = optimizer
        self._sync = sync
        self._known = known
        self._claims = not getattr(optimizer, "_step_supports_amp_scaling", False)
        self._armed = False
        self._arm()
        if known is not None:
            self._step, known.step = known.step, self.step

    def remove(self) -> None:
        """Leave the optimizer and the scaler as they were."""
        self._disarm()
        if self._known is not None:
            self._known.step = self._step

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Let the known scaler step."""
        if optimizer is not self._optimizer:
            return self._step(optimizer, *args, **kwargs)
        self._disarm()
        try:
            return self._step(optimizer, *args, **kwargs)
        finally:
            self._arm()

    def _arm(self) -> None:
        self._armed = True
        if self._claims:
            self._optimizer._step_supports_amp_scaling = True

    def _disarm(self) -> None:
        self._armed = False
        if self._claims:
            vars(self._optimizer).pop("_step_supports_amp_scaling", None)

    def check(self) -> None:
        """Raise if an unknown scaler has called step(); local, but all ranks come here in the same step."""
        unscales = not self._claims and not self._sync.averages_gradients
        if not self._armed or unscales or not hasattr(self._optimizer, "found_inf"):
            return
        del self._optimizer.grad_scale, self._optimizer.found_inf  # the scaler would do that after step()
        raise ConfigurationError(
            f"r{self._sync.rank} | a GradScaler is used that attach() does not know: a rank that skips a step alone would "
            "leave the others waiting; pass it, as in attach(optimizer, sync, scaler)"
        )


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
