"""What a checkpoint holds of one rank and of all: gather it from torch objects, and restore it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpisparse.backends.flat import distinct, fill, lies_as, memory_order
from mpisparse.checkpoint.h5file import Arrays
from mpisparse.checkpoint.objects import check_belonging, check_like, check_optimizer, check_scheduler
from mpisparse.errors import ConfigurationError
from mpisparse.model.shards import is_sharded
from mpisparse.names import FREE_OPTIONS
from mpisparse.randomness import random_state, set_random_state

if TYPE_CHECKING:
    from mpisparse.sync import GradientSync


OBJECTS = ("optimizer", "scheduler", "scaler")
OBJECT_KEYS = {*OBJECTS, *(f"{name}_{what}" for name in OBJECTS for what in ("kind", "module")), "optimizer_parameters"}


@dataclass(frozen=True)
class Subjects:
    """The objects whose state is saved and restored; None is left out."""

    model: torch.nn.Module
    optimizer: Any = None
    sync: GradientSync | None = None
    scheduler: Any = None
    scaler: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.model, torch.nn.Module) and any(map(is_sharded, self.model.parameters())):
            raise ConfigurationError(
                "the model is sharded: save model and optimizer with torch.distributed.checkpoint, and sync.state_dict() of "
                "every rank beside them"
            )

    def describe(self) -> list[str]:
        """One line for each parameter and buffer of the model."""
        return described(self.model.state_dict())

    def shared(self) -> dict[str, Any]:
        """The state that is the same on all ranks; local."""
        own = self._own_names()
        with self.sync._companion.global_weights() if self.sync is not None else nullcontext():
            state: dict[str, Any] = {"model": {k: v for k, v in self.model.state_dict().items() if k not in own}}
            if not self._each_its_own:
                state |= self.objects()
        if self.sync is not None:
            state["trainable"] = self._trainable()
        return state

    def objects(self) -> dict[str, Any]:
        """The states of optimizer, scheduler and scaler, their kinds, and the names of the optimizer's parameters."""
        state: dict[str, Any] = {}
        for name in OBJECTS:
            if getattr(self, name) is not None:
                state[name] = getattr(self, name).state_dict()
                state[f"{name}_kind"] = type(getattr(self, name)).__name__
                state[f"{name}_module"] = type(getattr(self, name)).__module__
        if self.optimizer is not None:
            state["optimizer_parameters"] = self._optimized()
        return state

    @property
    def _each_its_own(self) -> bool:
        """Whether each rank has its own optimizer, scheduler and scaler, or an optimizer that says so."""
        rank_own = getattr(self.optimizer, "own_state", False)
        return rank_own or (self.sync is not None and self.sync.exchanges_weights)

    def _optimized(self) -> list[str | None]:
        """The names of the optimizer's parameters in its order; None for one that is not the model's."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        return [names.get(id(p)) for group in self.optimizer.param_groups for p in group["params"]]

    def _trainable(self) -> dict[str, list[int]]:
        """The parameters that are exchanged, in the order in which they lie in the residual, and their strides.

        Those of dimensions of one element mean nothing, and are 0.
        """
        slots = self.sync._layout.slots if self.sync is not None else []
        return {
            slot.name: [s * (n > 1 and 0 not in slot.shape) for s, n in zip(slot.stride, slot.shape, strict=True)]
            for slot in slots
        }

    def check(self, shared: dict[str, Any], own: dict[str, Any], *, same_version: bool) -> None:
        """Raise ConfigurationError unless the states are of such objects, ValueError if they are malformed; changes nothing.

        In a state of another version, missing values are a difference, not damage. Local.
        """
        shared = with_objects(shared, own)
        for name in OBJECTS:
            here = getattr(self, name)
            if here is None or name not in shared:
                continue
            if shared[f"{name}_kind"] != type(here).__name__:
                raise ConfigurationError(f"the {name} was {shared[f'{name}_kind']}, this one is {type(here).__name__}")
        if self.optimizer is not None and "optimizer" in shared:
            saved, now = (
                [len(g["params"]) for g in s["param_groups"]] for s in (shared["optimizer"], self.optimizer.state_dict())
            )
            if saved != now:
                raise ConfigurationError(f"the optimizer had groups of {saved} parameters, this one has {now}")
            self._check_names("the optimizer's parameters", shared.get("optimizer_parameters"), self._optimized())
        if self.sync is not None:
            if "sync" not in own:
                raise ConfigurationError("it was saved without a GradientSync: there is no residual in it")
            lines = [[f"{name} {at}" for name, at in t.items()] for t in (shared.get("trainable", {}), self._trainable())]
            self._check_names("the exchanged parameters with their strides", *lines)
            self._check_sync(own["sync"], same_version=same_version)

    def _check_names(self, what: str, saved: Sequence[str] | None, here: Sequence[str | None]) -> None:
        """Raise ConfigurationError if the names, where they were saved, are other ones, or in another order."""
        for was, now in zip((*(saved or here), "no more"), (*here, "no more"), strict=False):
            if was != now:
                raise ConfigurationError(f"of {what} one was {was!r} where this has {now!r}")

    def _check_sync(self, state: dict[str, Any], *, same_version: bool) -> None:
        """Raise ConfigurationError if the exchange was another one, ValueError if its state is malformed."""
        assert self.sync is not None
        try:
            self.sync.check_state(state)
        except ConfigurationError as error:
            here = self.sync.state_dict(copy=False)
            other = any(state.get(key) != here[key] for key in ("format", "scheme"))
            other |= len(state["residual"]) != len(here["residual"]) or not (same_version or here.keys() <= state.keys())
            other |= (state.get("step.own") is None) != (here.get("step.own") is None)  # no optimizer was attached
            saved, now = (self.sync.options.upgraded(json.loads(text)) for text in (state["options"], here["options"]))
            if other or any(saved.get(key) != now[key] for key in now if key not in FREE_OPTIONS):
                raise
            raise ValueError(str(error)) from error

    def check_malformed(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        """Raise ValueError unless the objects, whose kinds these states are of, could go on with them; local."""
        shared = with_objects(shared, own)
        if self.sync is not None:
            check_belonging(own["sync"], shared, self.sync._layout, list(self._trainable()))
        if self.optimizer is not None and "optimizer" in shared:
            shapes = [p.shape for group in self.optimizer.param_groups for p in group["params"]]
            check_optimizer(shared["optimizer"], type(self.optimizer), lambda number, shape: shapes[number] == shape)
        if self.scheduler is not None and "scheduler" in shared:
            check_scheduler(shared["scheduler"], type(self.scheduler))
            check_like(shared["scheduler"], self.scheduler.state_dict())

    def own(self, extra: dict[str, Any] | None) -> dict[str, Any]:
        """The state of this rank alone: buffers, residual and scheme, random generators, and what the caller adds.

        If ranks have their own weights, optimizer, scheduler and scaler, too.
        """
        names = self._own_names()
        aside = self.sync._buffers.own() if self.sync is not None else {}
        state: dict[str, Any] = {
            "buffers": {k: aside.get(k, v) for k, v in self.model.state_dict().items() if k in names},
            "random": random_state(),
            "extra": dict(extra or {}),
        }
        if self._each_its_own:
            state["objects"] = self.objects()
        if self.sync is not None:
            state["sync"] = self.sync.state_dict(copy=False)
        return state

    def _own_names(self) -> set[str]:
        return {name for name, _ in self.model.named_buffers(remove_duplicate=False)}

    def restore(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        """Restore the objects' states; collective if there is a sync."""
        shared = with_objects(shared, own)
        with buffers_apart(self.model):
            self.model.load_state_dict({**shared["model"], **own["buffers"]})
        for p in self.model.parameters():
            p.grad = None
        for name in OBJECTS:
            if getattr(self, name) is not None and name in shared:
                getattr(self, name).load_state_dict(shared[name])
        if self.optimizer is not None:
            lay_out(self.optimizer)
        if self.sync is not None:
            self.sync.load_state_dict(own["sync"])
        set_random_state(own["random"])


@contextmanager
def buffers_apart(model: torch.nn.Module) -> Iterator[None]:
    """Inside the block the elements of expanded buffers have memory of their own, so that values can be loaded into them."""
    expanded = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and distinct(buffer).numel() < buffer.numel()
    ]
    for module, name, buffer in expanded:
        module._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)
    try:
        yield
    finally:
        for module, name, buffer in expanded:
            loaded = module._buffers[name]
            assert loaded is not None
            fill(buffer, loaded)
            module._buffers[name] = buffer


def with_objects(shared: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The replicated state with the states of optimizer, scheduler and scaler, which may be the rank's own."""
    return {**shared, **own.get("objects", {})}


def lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer's state the memory order of its parameters: files do not keep it, and fused kernels rely on it."""
    for p, entry in optimizer.state.items():
        for key, value in entry.items() if isinstance(entry, dict) else ():
            dense = isinstance(value, torch.Tensor) and value.shape == p.shape and value.layout is torch.strided
            if dense and not lies_as(value, order := memory_order(p)):
                entry[key] = torch.empty_strided(p.shape, order, dtype=value.dtype, device=value.device).copy_(value)


def described(tensors: dict[str, Any]) -> list[str]:
    """One line for each tensor: its name, shape and type."""
    return [
        f"{name} {list(t.shape)} {str(t.dtype).removeprefix('torch.')}"
        for name, t in tensors.items()
        if isinstance(t, torch.Tensor)
    ]


class ArrayCopies:
    """Memory for copies of arrays. Touching fresh memory takes longer than copying, so it is kept for the next copies."""

    def __init__(self) -> None:
        self.block = np.empty(0, dtype=np.uint8)

    def copy(self, groups: dict[str, Arrays]) -> dict[str, Arrays]:
        """Copy groups of arrays, overwriting the copies made before."""
        aligned = [-(-array.nbytes // 64) * 64 for arrays in groups.values() for array in arrays.values()]
        if len(self.block) < sum(aligned):
            self.block = np.empty(sum(aligned), dtype=np.uint8)
        starts = iter(np.cumsum([0, *aligned]).tolist())
        return {
            group: {name: self._put(array, next(starts)) for name, array in arrays.items()}
            for group, arrays in groups.items()
        }

    def _put(self, array: NDArray[Any], start: int) -> NDArray[Any]:
        copy = self.block[start : start + array.nbytes].view(array.dtype)
        copy[:] = array.reshape(-1)
        return copy.reshape(array.shape)


def split(arrays: Arrays, parts: int) -> list[Arrays]:
    """Distribute arrays over parts of about equal size in bytes; the same result on every rank."""
    shares: list[Arrays] = [{} for _ in range(parts)]
    loads = [0] * parts
    for name in sorted(arrays, key=lambda name: (-arrays[name].nbytes, name)):
        least = loads.index(min(loads))
        shares[least][name] = arrays[name]
        loads[least] += arrays[name].nbytes
    return shares
