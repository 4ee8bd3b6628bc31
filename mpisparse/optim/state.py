"""Checks of a saved state of OneBitAdamW."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpisparse.errors import ConfigurationError

FORMAT = 1


def check_state(state: Any, here: dict[str, Any], numbers: Sequence[int]) -> None:
    """Raise ConfigurationError unless an optimizer whose state is `here` could go on with the state; local.

    numbers: of the exchanged parameters.
    """
    if not isinstance(state, dict) or not {"state", "param_groups", "onebit"} <= state.keys():
        raise ConfigurationError(
            "a state of OneBitAdamW has state, param_groups and onebit: it was saved by another optimizer"
        )
    own, mine = state["onebit"], here["onebit"]
    for key in mine.keys() - {"rank", "size", "steps", "error"}:
        if own[key] != mine[key]:
            raise ConfigurationError(f"the state was saved with {key}={own[key]!r}, this is {key}={mine[key]!r}")
    if own["size"] == mine["size"] and own["rank"] != mine["rank"]:
        raise ConfigurationError(f"the state is that of rank {own['rank']}, this is rank {mine['rank']}")
    if type(own["steps"]) is not int or own["steps"] < 0:
        raise ConfigurationError(f"the number of steps in the state is {own['steps']!r}")
    _check_tensor("error", own["error"], None if own["size"] != mine["size"] else tuple(mine["error"].shape))
    sizes = [[len(group["params"]) for group in groups] for groups in (state["param_groups"], here["param_groups"])]
    if sizes[0] != sizes[1]:
        raise ConfigurationError(f"the state has groups of {sizes[0]} parameters, this optimizer has {sizes[1]}")
    for number in numbers:
        entry, shape = state["state"][number], tuple(here["state"][number]["exp_avg"].shape)
        for key in ("exp_avg", "exp_avg_sq", "residual"):
            _check_tensor(f"{key} of parameter {number}", entry[key], shape)
        if bool((entry["exp_avg_sq"] < 0).any()) or not (float(entry["step"]) >= 0 and float(entry["variance_step"]) >= 0):
            raise ConfigurationError(f"the variance or the steps of parameter {number} are below 0")


def _check_tensor(what: str, value: Any, shape: tuple[int, ...] | None) -> None:
    """Raise ConfigurationError unless this is a finite float32 tensor, of a shape if one is given."""
    fits = isinstance(value, torch.Tensor) and value.dtype is torch.float32 and shape in (None, tuple(value.shape))
    if not fits or not bool(torch.isfinite(value).all()):
        raise ConfigurationError(f"the {what} in the state is not a finite float32 tensor of shape {shape}")
