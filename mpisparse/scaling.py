"""GradScalers of attached optimizers: all ranks skip a step together or none does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import OptState

from mpisparse.errors import ConfigurationError
from mpisparse.sync import GradientSync

Go = Callable[[], Any]  # steps as what is further inside does


class Layer(Protocol):
    """What an attachment does around the methods of its GradScaler, for its own optimizer."""

    def unscaled(self) -> None: ...
    def step(self, go: Go) -> Any: ...


class Takeover:
    """Goes around unscale_ and step of one GradScaler, for each optimizer that is attached with it.

    Optimizers come and go in any order: the scaler has its own methods back when the last has gone.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._unscale, self._step = scaler.unscale_, scaler.step
        self._layers: dict[int, list[Layer]] = {}  # by optimizer, the innermost first
        scaler.unscale_, scaler.step = self.unscale_, self.step

    @classmethod
    def of(cls, scaler: Any) -> Takeover:
        """The takeover of a scaler, if there is one, or a new one."""
        owner = getattr(scaler.step, "__self__", None)
        return owner if isinstance(owner, cls) else cls(scaler)

    def add(self, optimizer: torch.optim.Optimizer, layer: Layer) -> None:
        """Go around what is there for an optimizer."""
        self._layers.setdefault(id(optimizer), []).append(layer)

    def remove(self, optimizer: torch.optim.Optimizer, layer: Layer) -> None:
        """Leave a layer out again; with the last one, give the scaler its methods back."""
        layers = self._layers.get(id(optimizer), [])
        layers[:] = [each for each in layers if each is not layer]
        if not layers:
            self._layers.pop(id(optimizer), None)
        if not self._layers and getattr(self._scaler.step, "__self__", None) is self:
            self._scaler.unscale_, self._scaler.step = self._unscale, self._step

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale as torch does."""
        self._unscale(optimizer)
        for layer in self._layers.get(id(optimizer), ()):
            layer.unscaled()

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step as torch does, within the optimizer's layers."""
        go = functools.partial(self._step, optimizer, *args, **kwargs)
        for layer in self._layers.get(id(optimizer), ()):
            go = functools.partial(layer.step, go)
        return go()


class ScalerAgreement:
    """Makes a GradScaler unscale before the exchange of gradients and agree on infinities over ranks.

    torch does not call optimizer.step() on a rank that saw an infinity, and lets fused optimizers unscale by themselves. So
    gradients are always unscaled first, and whether one of them was infinite on any rank is known to all before the
    decision to step. An infinity of one attached optimizer counts for all: an exchange is of all gradients.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, sync: GradientSync, scaler: Any) -> None:
        self._optimizer = optimizer
        self._sync = sync
        self._scaler = scaler
        self._around = Takeover.of(scaler)
        self._around.add(optimizer, self)

    def remove(self) -> None:
        """Leave the scaler as it was."""
        self._around.remove(self._optimizer, self)

    @property
    def still_scaled(self) -> bool:
        """Whether the optimizer has new gradients that the scaler has not unscaled; local."""
        held = (p for group in self._optimizer.param_groups for p in group["params"])
        return self._state["stage"] is not OptState.UNSCALED and self._sync._gradients.any_new(held)

    def unscaled(self) -> None:
        """Make every rank's found_inf the largest of all; collective."""
        if not self._sync.averages_gradients:
            return
        if self._sync._early is not None:
            self._sync._early.unscaled()
        flags = list(self._flags(self._optimizer))
        agreed = self._sync.agree_any(any(map(bool, flags)))
        for flag in flags:
            flag.fill_(float(agreed))

    def step(self, go: Go) -> Any:
        """Unscale first if the user has not; then step as torch does, or leave it out if the verdict is so."""
        if self._sync.averages_gradients:
            if self._state["stage"] is OptState.READY:
                self._scaler.unscale_(self._optimizer)
            if any(bool(flag) for one in self._sync._attached for flag in self._flags(one.optimizer)):
                self._state["stage"] = OptState.STEPPED
                self._sync._aggregator.recall()  # what has set out during backward
                return None
        return go()

    @property
    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._scaler._per_optimizer_states[id(self._optimizer)]
        return state

    def _flags(self, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
        yield from self._scaler._found_inf_per_device(optimizer).values()


class LocalScaling:
    """Lets one GradScaler skip steps of this rank alone, where weights are exchanged; the exchange goes on all the same."""

    def __init__(self, optimizer: torch.optim.Optimizer, sync: GradientSync, scaler: Any) -> None:
        self._optimizer = optimizer
        self._sync = sync
        self._stepped = False
        self._handle = optimizer.register_step_post_hook(self._note)
        self._around = Takeover.of(scaler)
        self._around.add(optimizer, self)

    def remove(self) -> None:
        """Leave the scaler as it was."""
        self._handle.remove()
        self._around.remove(self._optimizer, self)

    def _note(self, *_: Any) -> None:
        self._stepped = True

    def unscaled(self) -> None:
        """Each rank decides by its own gradients."""

    def step(self, go: Go) -> Any:
        """Step as torch does; if that was skipped, exchange nevertheless."""
        self._stepped = False
        result = go()
        if not self._stepped and self._sync.exchanges_weights:
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
        self._claims = not getattr(optimizer, "_step_supports_amp_scaling", False)
        self._armed = False
        self._arm()
        self._around = None if known is None else Takeover.of(known)
        if self._around is not None:
            self._around.add(optimizer, self)

    def remove(self) -> None:
        """Leave the optimizer and the scaler as they were."""
        self._disarm()
        if self._around is not None:
            self._around.remove(self._optimizer, self)

    def unscaled(self) -> None:
        """The known scaler may unscale."""

    def step(self, go: Go) -> Any:
        """Let the known scaler step."""
        self._disarm()
        try:
            return go()
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
