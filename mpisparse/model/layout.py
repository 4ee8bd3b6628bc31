"""A model's parameters as one flat vector: the place of each, and whether they have changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from mpisparse.arrays import Ints
from mpisparse.backends.flat import KINDS, Held, Pieces, Slot, collect, memory_order
from mpisparse.errors import ConfigurationError
from mpisparse.model.shards import Shard, is_sharded, local_of


class Layout:
    """The slots of all trainable parameters, in the order of model.parameters(); `named`: of these tensors instead.

    For a sharded parameter (DTensor), the slot is that of the local part.
    """

    def __init__(self, model: torch.nn.Module, named: Sequence[tuple[str, Any]] | None = None) -> None:
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad] if named is None else named
        if not trainable:
            raise ConfigurationError(
                f"{type(model).__name__} has no parameter that requires a gradient; nothing would be exchanged"
            )
        self.params: list[torch.nn.Parameter] = [p for _, p in trainable]
        self.members: list[Any] = [Shard(p) if is_sharded(p) else p for p in self.params]  # this rank's parts
        self.device = self.params[0].device
        self.frozen = [p for p in model.parameters() if not p.requires_grad]
        self.slots: list[Slot] = []
        at = 0
        for name, whole in trainable:
            p = local_of(whole)
            _check_parameter(name, whole, self.device)
            self.slots.append(Slot(name, at, at + p.numel(), tuple(p.shape), memory_order(p), p.dtype))
            at += p.numel()
        self.size = at
        self.held = Held(at)  # parameters that were frozen since
        if at == 0:
            raise ConfigurationError(f"the trainable parameters of {type(model).__name__} have no elements")
        self.ends: Ints = np.array([slot.end for slot in self.slots], dtype=np.int64)
        self.kinds = np.array([s.sent_kind for s in self.slots], dtype=np.uint8)

    def describe(self) -> list[str]:
        """One line for each parameter; equal on all ranks if and only if the layouts are."""
        return [f"{s.name} {list(s.shape)} {str(s.dtype).removeprefix('torch.')} {list(s.stride)}" for s in self.slots]

    def misfit(self, grads: Iterable[torch.Tensor | None]) -> str | None:
        """A text that says what has changed in the parameters or their gradients since construction; None if nothing."""
        for slot, p, grad in zip(self.slots, self.members, grads, strict=True):
            if not slot.fits(p) or p.device != self.device:
                was = _looks(slot.dtype, slot.shape, slot.stride, self.device)
                now = _looks(p.dtype, p.shape, p.stride(), p.device)
                return (
                    f"parameter {slot.name} was {was} when GradientSync was constructed and is {now} now; convert the model "
                    "first, then construct GradientSync and the optimizer, or convert it back"
                )
            if grad is not None and (not slot.takes(grad) or grad.device != self.device):
                was, now = (_looks(t.dtype, t.shape, None, t.device) for t in (p, grad))
                return f"the gradient of parameter {slot.name} is {now}, its parameter is {was}; they must be alike"
        return None

    def name_at(self, index: int) -> str:
        """The name of the parameter that holds a flat index."""
        return self.slots[int(np.searchsorted(self.ends, index, side="right"))].name


def _check_parameter(name: str, p: torch.nn.Parameter, device: torch.device) -> None:
    if isinstance(p, torch.nn.UninitializedParameter):
        raise ConfigurationError(f"parameter {name} is not initialised; run one forward pass of the model first")
    if p.dtype not in KINDS:
        known = ", ".join(str(d).removeprefix("torch.") for d in KINDS)
        raise ConfigurationError(f"parameter {name} is {p.dtype}; supported are {known}")
    if p.device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"parameter {name} is on {p.device}; move the model to the CPU or to one CUDA device")
    if p.device != device:
        raise ConfigurationError(f"parameter {name} is on {p.device}, others are on {device}; move the model to one device")


def _looks(dtype: torch.dtype, shape: Iterable[int], stride: Iterable[int] | None, device: torch.device) -> str:
    strides = "" if stride is None else f" with strides {list(stride)}"
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}{strides} on {device}"


def collect_gradients(layout: Layout, grads: Iterable[torch.Tensor | None]) -> Pieces:
    """The gradients as pieces of the flat vector; None marks an absent one."""
    return collect(layout.slots, layout.ends, layout.kinds, grads)


def refuse_wrapped(model: torch.nn.Module) -> None:
    """Raise ConfigurationError if a wrapper in the model averages gradients by itself, or if it is not a model."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(f"expected the model, a torch.nn.Module, got {type(model).__name__}; pass the model itself")
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            raise ConfigurationError(
                "the model is wrapped in DistributedDataParallel, which averages gradients by itself: pass model.module, or "
                "keep the wrapper and exchange in its hook: state = mpisparse.integrations.ddp.State(model), then "
                "model.register_comm_hook(state, mpisparse.integrations.ddp.hook)"
            )
        if isinstance(module, DataParallel):
            raise ConfigurationError(
                "the model is wrapped in DataParallel, whose replicas live in one process: pass model.module, and start a "
                "process for each device"
            )
