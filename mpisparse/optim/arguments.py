"""Arguments of optimizers: what torch checks, and what the exchange needs."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch

from mpisparse.backends.flat import KINDS
from mpisparse.errors import ConfigurationError, check_choice
from mpisparse.schemes.options import check_whole
from mpisparse.wire.codecs import codec_names

REFUSED = {
    "amsgrad": "it keeps the largest variance, and here the variance rests between its refreshes",
    "capturable": "a CUDA graph cannot hold an exchange",
    "differentiable": "no gradient passes through an exchange",
    "fused": "its kernels would know nothing of the exchange",
}


def check_flags(flags: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for what AdamW can do and an exchange cannot."""
    for name, why in REFUSED.items():
        if flags.get(name):
            raise ConfigurationError(f"OneBitAdamW takes no {name}={flags[name]!r}: {why}; leave it out")


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise ConfigurationError unless steps and codecs of OneBitAdamW make sense."""
    warmup, refresh, known = settings["warmup"], settings["refresh"], codec_names(blended=False)
    check_whole("warmup", warmup, 1)
    if refresh is not None:
        check_whole("refresh", refresh, 0)
        if refresh > warmup:
            raise ConfigurationError(f"refresh must be at most warmup, {warmup}, got {refresh}")
    for name in ("codec", "warmup_codec"):
        check_choice(name, settings[name], known)


def check_group(group: Mapping[str, Any]) -> None:
    """Raise as torch does for values of a group that make no sense."""
    lr, betas = group["lr"], group["betas"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    for name, value in (
        ("learning rate", lr),
        ("epsilon value", group["eps"]),
        ("weight_decay value", group["weight_decay"]),
    ):
        if not isinstance(value, Real | torch.Tensor) or not float(value) >= 0.0:
            raise ValueError(f"Invalid {name}: {value!r}")
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}")
    for i, beta in enumerate(betas):
        if not 0.0 <= float(beta) < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta}")


def check_parameter(name: str, p: torch.Tensor) -> None:
    """Raise ConfigurationError unless a parameter can be exchanged."""
    if p.dtype not in KINDS or p.dtype is torch.float64:
        kind = str(p.dtype).removeprefix("torch.")
        raise ConfigurationError(f"parameter {name} is {kind}; OneBitAdamW takes float32, bfloat16 and float16")
    if p.device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"parameter {name} is on {p.device}; OneBitAdamW works on the CPU or on one CUDA device")
