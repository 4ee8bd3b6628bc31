"""Checks of saved states of torch objects: optimizers, schedulers, scalers, and random generators.

torch accepts nearly any state and fails a step later. So a state is compared with that of a real object of its class: an
optimizer of torch is tried on a single number with the saved hyper-parameters. All raise ValueError; local.
"""

from __future__ import annotations

import functools
import inspect
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from mpisparse.backends.flat import checksum
from mpisparse.model.layout import Layout

# torch's optimizers whose state consists of tensors of the parameter's shape and of scalars.
ELEMENTWISE_NAMES = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Adadelta", "Rprop", "ASGD")
ELEMENTWISE = {getattr(torch.optim, name) for name in ELEMENTWISE_NAMES}
# Hyper-parameters that torch adds itself if an older version did not write them, or that do not change results.
OPTIONAL = {"nesterov", "maximize", "amsgrad", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"}
SIMILAR: tuple[Any, ...] = ((bool, int, float), (list, tuple), dict, str)
UNTRIED = {"foreach", "capturable", "differentiable", "fused"}


def need(fits: bool, what: str) -> None:
    """Raise ValueError unless the condition holds."""
    if not fits:
        raise ValueError(what)


def is_number(value: Any) -> bool:
    """Tell whether a value is a finite number, or a tensor with one."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and value.dtype is not torch.bool and math.isfinite(value.item())
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_optimizer(state: Any, kind: type | None, has_shape: Callable[[int, torch.Size], bool]) -> None:
    """Raise unless this is the state of an optimizer, of class `kind` if given.

    has_shape(number, shape) tells whether parameter `number` has that shape.
    """
    need(isinstance(state, dict) and isinstance(state.get("state"), dict), "the optimizer's state is not a dict")
    groups = state.get("param_groups")
    need(isinstance(groups, list) and all(isinstance(g, dict) for g in groups), "the optimizer's groups are not dicts")
    numbers = [number for group in groups for number in group["params"]]
    need(numbers == list(range(len(numbers))), "the optimizer's parameters are not numbered from 0")
    need(set(state["state"]) <= set(numbers), "the optimizer's state has entries of unknown parameters")
    for group in groups:
        tried = _try(kind, group) if kind in ELEMENTWISE else None
        for number in group["params"]:
            entry = state["state"].get(number, {})
            need(isinstance(entry, dict), f"the optimizer's state of parameter {number} is not a dict")
            if tried is not None and entry:
                what = f"the optimizer's state of parameter {number}"
                _check_entry(what, entry, tried, kind, functools.partial(has_shape, number))


def _try(kind: Any, group: dict[str, Any]) -> dict[str, Any]:
    """Return the state that such an optimizer keeps per parameter after a step; raises if it refuses the group."""
    model = torch.nn.Parameter(torch.zeros(1))
    usual = kind([model], lr=0.0).param_groups[0]
    for key in usual.keys() - {"params"}:
        need(key in group or key in OPTIONAL, f"the optimizer's group has no {key}")
        need(key not in group or _alike(group[key], usual[key]), f"the optimizer's {key} is {group.get(key)!r}")
    taken = inspect.signature(kind).parameters
    chosen = {key: value for key, value in group.items() if key in taken and key not in UNTRIED | {"params"}}
    trial = kind([model], **{**chosen, "foreach": False})
    model.grad = torch.zeros(1)
    trial.step()
    return dict(trial.state[model])


def _alike(value: Any, usual: Any) -> bool:
    """Tell whether a hyper-parameter has the type of its default, and is finite."""
    if isinstance(usual, bool) or usual is None:
        return value is None or isinstance(value, bool)
    if isinstance(usual, tuple):
        return isinstance(value, list | tuple) and len(value) == len(usual) and all(map(is_number, value))
    return is_number(value)


def _check_entry(
    what: str, entry: dict[str, Any], tried: dict[str, Any], kind: Any, has_shape: Callable[[torch.Size], bool]
) -> None:
    lacking = [] if kind is torch.optim.SGD else sorted(tried.keys() - entry.keys())
    need(not lacking, f"{what} has no {lacking and lacking[0]}")
    for key, usual in tried.items():
        value = entry.get(key)
        if usual is None or (value is None and kind is torch.optim.SGD):
            continue
        if isinstance(usual, torch.Tensor) and usual.dim() > 0:
            fits = isinstance(value, torch.Tensor) and value.dtype.is_floating_point and has_shape(value.shape)
        else:
            fits = is_number(value) and (key != "step" or float(value) >= 0)  # type: ignore[arg-type]
        need(fits, f"{what} has a malformed {key}")


def check_scheduler(state: Any, kind: type | None) -> None:
    """Raise unless this is the state of a scheduler; for one of torch's, with values of the types it takes."""
    named = isinstance(state, dict) and all(isinstance(key, str) and key.isidentifier() for key in state)
    need(named, "the scheduler's state is not a dict of attribute names")
    if kind is None or not kind.__module__.startswith("torch."):
        return
    for key in ("base_lrs", "_last_lr"):
        rates = state.get(key, [])
        need(isinstance(rates, list | tuple) and all(map(is_number, rates)), f"the scheduler's {key} is {rates!r}")
    types = {name: str(p.annotation) for name, p in inspect.signature(kind.__init__).parameters.items()}  # type: ignore[misc]
    for key, value in state.items():
        need(not callable(getattr(kind, key, None)), f"the scheduler's state would replace its method {key}")
        a_number = types.get(key) in ("int", "float") or key in ("last_epoch", "_step_count")
        a_flag = key in ("_is_initial", "_get_lr_called_within_step")
        need(not a_number or is_number(value), f"the scheduler's {key} is {value!r}")
        need(not a_flag or isinstance(value, bool), f"the scheduler's {key} is {value!r}")


def check_scaler(state: Any) -> None:
    """Raise unless this is the state of torch's GradScaler; a disabled one has an empty state."""
    need(isinstance(state, dict), "the scaler's state is not a dict")
    value: Any
    for name in ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker") if state else ():
        value = state.get(name)
        fits = is_number(value) and (value > 0 or (name == "_growth_tracker" and value == 0))
        need(
            fits and (type(value) is int or not name.endswith(("interval", "tracker"))), f"the scaler's {name} is {value!r}"
        )


def check_like(saved: dict[str, Any], here: dict[str, Any]) -> None:
    """Raise unless values that two states of a scheduler share have similar types; None matches any."""
    for key in saved.keys() & here.keys():
        needed = next((kinds for kinds in SIMILAR if isinstance(here[key], kinds)), object)
        need(saved[key] is None or isinstance(saved[key], needed), f"the scheduler's {key} is {saved[key]!r}")


def check_random(state: Any) -> None:
    """Raise unless random generators accept these states; tried on separate generators."""
    need(isinstance(state, dict) and {"torch", "numpy", "python"} <= state.keys(), "the random states are missing")
    seeds, numpy_state = state["torch"], state["numpy"]
    need(isinstance(seeds, torch.Tensor) and seeds.dtype is torch.uint8, "torch's random state is not a tensor of bytes")
    torch.Generator().set_state(seeds)
    need(isinstance(numpy_state, list) and len(numpy_state) == 5, "NumPy's random state is not a list of five values")
    name, keys, position, cached, gauss = numpy_state
    fits = name == "MT19937" and isinstance(keys, np.ndarray) and keys.dtype == np.uint32 and keys.shape == (624,)
    need(fits and type(position) is int and 0 <= position <= 624, "NumPy's random state is malformed")
    need(cached in (0, 1) and type(cached) is int and isinstance(gauss, float), "NumPy's random state is malformed")
    random.Random().setstate(state["python"])


def check_belonging(sync: dict[str, Any], shared: dict[str, Any], layout: Layout, names: list[str]) -> None:
    """Raise unless a rank's own weights, if its scheme has any, match the replicated ones; `names` are the layout's."""
    digest = sync.get("step.digest") if sync.get("step.own") is None else sync["step.own"]["digest"]
    if digest is None:
        return
    weights = []
    for name, slot in zip(names, layout.slots, strict=True):
        weights.append(torch.empty_strided(slot.shape, slot.stride, dtype=slot.dtype).copy_(shared["model"][name]))
    need(checksum(weights) == digest, "a rank's own weights do not match the replicated ones")


def check_strides(shape: Sequence[int], strides: Any) -> None:
    """Raise unless a tensor with these strides is dense in memory; dimensions of one element have stride 0."""
    problem = "the strides are not those of the parameters"
    need(isinstance(strides, list) and len(strides) == len(shape) and all(type(s) is int for s in strides), problem)
    step = 1
    for s, n in sorted(zip(strides, shape, strict=True)):
        need(s == (step if n > 1 and 0 not in shape else 0), problem)
        step *= n if n > 1 else 1
