"""A stand-in for GradientSync that checks saved states: for any rank of any number, without the model or MPI."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import nn

from mpisparse.backends.device import load_backend
from mpisparse.checkpoint.contents import saved_options
from mpisparse.checkpoint.objects import check_belonging
from mpisparse.core.records import Parts
from mpisparse.model.layout import Layout, Published
from mpisparse.schemes.state import STATE_FORMAT, check_state


def check_scheme_state(sync: dict[str, Any], shared: dict[str, Any]) -> None:
    """Raise unless a GradientSync with the scheme, options and rank of the state would accept it; local.

    Does nothing if an older version did not save which parameters are trainable and some are not.
    """
    tensors = {name: t for name, t in shared["model"].items() if isinstance(t, torch.Tensor)}
    names = list(shared.get("trainable") or tensors)
    if not set(names) <= tensors.keys() or sum(tensors[name].numel() for name in names) != len(sync["residual"]):
        return
    strides = shared.get("trainable") or {name: tensors[name].stride() for name in names}
    alike = [torch.empty_strided(tensors[name].shape, strides[name], dtype=tensors[name].dtype) for name in names]
    stand_in = StandIn([nn.Parameter(tensor.zero_()) for tensor in alike], sync, shared)
    try:
        stand_in.check(sync)
        check_belonging(sync, shared, stand_in.layout, names)
    finally:
        stand_in.close()


class _NoExchange:
    """A stand-in for Exchange: checking needs no other ranks."""

    threaded = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def polling(self) -> _NoExchange:
        return self

    def close(self) -> None:
        """Do nothing: there is no communicator."""


class StandIn:
    """Parameters of the saved shapes and the scheme's step for them, to check a state."""

    def __init__(self, parameters: list[nn.Parameter], sync: dict[str, Any], shared: dict[str, Any]) -> None:
        model = nn.ParameterList(parameters)
        no_exchange: Any = _NoExchange(sync["rank"], sync["size"])
        self.options = saved_options(sync)
        self.layout, backend = Layout(model), load_backend()
        self.residual = torch.zeros(self.layout.size)
        parts = Parts(self.layout, self.residual, Published(self.layout, backend), no_exchange, backend, model)
        with warnings.catch_warnings():  # the scheme's warnings were for the training itself
            warnings.simplefilter("ignore")
            self.step = self.options.build(parts)
        if sync.get("step.own") is not None:
            kind = getattr(torch.optim, shared["optimizer_kind"])
            self.step.adopt(kind(model.parameters(), lr=0.1))

    def check(self, sync: dict[str, Any]) -> None:
        """Raise ConfigurationError unless the step would accept the state."""
        step = {
            f"step.{key}": torch.from_numpy(v) if isinstance(v, np.ndarray) else v for key, v in self.step.state().items()
        }
        own = {key: sync[key] for key in ("scheme", "options", "rank", "size", "density")}
        check_state(sync, {"format": STATE_FORMAT, **own, "residual": self.residual, **step}, self.options, self.step)

    def close(self) -> None:
        """Close the step."""
        self.step.close()
