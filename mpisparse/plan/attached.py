"""The optimizer attached where weights are exchanged: whether it may be, and how it becomes the same on all ranks."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from mpisparse.comm.exchange import Exchange
from mpisparse.errors import GradientError
from mpisparse.schemes.optimizers import holds_copies


def hindrance(optimizers: Sequence[torch.optim.Optimizer], params: Iterable[torch.Tensor]) -> str:
    """Why weights cannot be exchanged after the step of what is attached; empty if they can.

    params: all that are exchanged. One optimizer must move them all: else a part would be moved by what nobody exchanges.
    """
    if len(optimizers) != 1:
        return f"{len(optimizers)} attached optimizers, where it takes one"
    [optimizer] = optimizers
    name = type(optimizer).__name__
    if holds_copies(optimizer):
        return f"{name}, which keeps copies of weights in its state"
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return f"{name}, which needs a closure"
    moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not all(id(p) in moved for p in params):
        return f"{name}, which does not hold all parameters that are exchanged"
    states = [optimizer.state[p] for p in optimizer.state]
    if not all(isinstance(state, dict) and all(map(_simple, state.values())) for state in states):
        return f"{name}, whose state has more than float tensors and numbers, and so no mean over ranks"
    return ""


def _simple(value: Any) -> bool:
    """Whether it is a float tensor, a number, a bool or None."""
    if isinstance(value, torch.Tensor):
        return _averaged(value) and type(value) in (torch.Tensor, torch.nn.Parameter)  # others may be made of codes
    return value is None or isinstance(value, int | float)


def same_settings(optimizer: torch.optim.Optimizer, exchange: Exchange) -> None:
    """Give all ranks rank 0's numbers of the parameter groups, such as learning rates; collective."""
    own = [{key: _number(value) for key, value in group.items()} for group in optimizer.param_groups]
    mine = [{key: value for key, value in group.items() if value is not None} for group in own]
    for group, told in zip(optimizer.param_groups, json.loads(exchange.gather_texts(json.dumps(mine))[0]), strict=True):
        for key, value in told.items():
            now = group.get(key)
            if isinstance(now, torch.Tensor):
                now.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def _number(value: Any) -> Any:
    """A number, or a tuple of them, as plain values; None for anything else."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, tuple):
        found = [_number(each) for each in value]
        return None if None in found else found
    return value if isinstance(value, int | float) else None


def average_states(optimizer: torch.optim.Optimizer, exchange: Exchange) -> None:
    """Replace the float tensors and numbers of an optimizer's state by their means over ranks; collective.

    What a rank does not have counts as zeros there. Other values stay as they are: see hindrance().
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    own = {f"{i} {key}": value for i, p in enumerate(params) for key, value in optimizer.state.get(p, {}).items()}
    mine = {name: _kind(value) for name, value in own.items() if _averaged(value)}
    every = [json.loads(text) for text in exchange.gather_texts(json.dumps(mine))]
    known: dict[str, list[Any]] = {}
    for kinds in every:
        for name, kind in kinds.items():
            if known.setdefault(name, kind) != kind:
                raise GradientError(
                    f"r{exchange.rank} | the optimizers' states differ in kind on the ranks ({name}: {known[name]} and "
                    f"{kind}), so that they have no mean; construct the optimizers alike"
                )
    for name in sorted(known):
        at, key = name.split(" ", 1)
        state = optimizer.state[params[int(at)]]
        state[key] = _mean(own.get(name), known[name], exchange)


def _averaged(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, torch.Tensor) and value.is_floating_point())


def _kind(value: torch.Tensor | float) -> list[Any]:
    """Type and shape; those of a number are empty."""
    return ["", []] if isinstance(value, float) else [str(value.dtype).removeprefix("torch."), list(value.shape)]


def _mean(value: torch.Tensor | float | None, kind: list[Any], exchange: Exchange) -> torch.Tensor | float:
    """The mean of a value over ranks, in place where it is a tensor; collective."""
    name, shape = kind
    tensor = torch.zeros(shape, dtype=getattr(torch, name)) if name else torch.tensor(0.0, dtype=torch.float64)
    if isinstance(value, torch.Tensor):
        tensor = value
    elif value is not None:
        tensor.fill_(value)
    exact = torch.float64 if tensor.numel() == 1 or tensor.dtype is torch.float64 else torch.float32
    total: Any = np.array(tensor.detach().to("cpu", exact).reshape(-1).numpy())
    exchange.allreduce_(total)
    tensor.copy_(torch.from_numpy(total / total.dtype.type(exchange.size)).reshape(tensor.shape))
    return tensor if name else float(tensor)
