"""A stand-in for GradientSync, to check and resize its states: for any rank of any number, without model and MPI."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from mpisparse.backends.device import load_backend
from mpisparse.checkpoint.contents import saved_options
from mpisparse.checkpoint.objects import check_belonging
from mpisparse.core.records import Parts
from mpisparse.core.state import sources
from mpisparse.model.layout import Layout
from mpisparse.model.published import Published
from mpisparse.schemes.companion import Site
from mpisparse.schemes.state import STATE_FORMAT, check_state, resize_states


def check_scheme_state(sync: dict[str, Any], shared: dict[str, Any]) -> None:
    """Raise unless a GradientSync with the scheme, options and rank of the state would accept it; local.

    Does nothing if an older version did not save which parameters are trainable and some are not.
    """
    parameters = _parameters(sync, shared)
    if parameters is None:
        return
    with contextlib.closing(StandIn(list(parameters.values()), sync, shared)) as stand_in:
        stand_in.check(sync)
        check_belonging(sync, shared, stand_in.layout, list(parameters))


def resize_scheme_states(
    syncs: Mapping[int, dict[str, Any]], shared: dict[str, Any], old: int, new: int, rank: int
) -> dict[str, Any]:
    """A rank's exchange among `new` ranks, from those of the `old` ranks in sources(), by the parts of its own scheme."""
    first = {**syncs[sources(old, new, rank)[0]], "rank": rank, "size": new}
    parameters = _parameters(first, shared)
    if parameters is None:
        raise ValueError("it does not say which parameters are trained, so that it fits only as many ranks as wrote it")
    with contextlib.closing(StandIn(list(parameters.values()), first, shared)) as stand_in:
        return resize_states(syncs, old, new, rank, stand_in.aggregator, stand_in.companion)


def _parameters(sync: dict[str, Any], shared: dict[str, Any]) -> dict[str, nn.Parameter] | None:
    """Parameters of the shapes and strides of those that were trained; None if that was not written."""
    tensors = {name: t for name, t in shared["model"].items() if isinstance(t, torch.Tensor)}
    names = list(shared.get("trainable") or tensors)
    if not set(names) <= tensors.keys() or sum(tensors[name].numel() for name in names) != len(sync["residual"]):
        return None
    strides = shared.get("trainable") or {name: tensors[name].stride() for name in names}
    alike = {n: torch.empty_strided(tensors[n].shape, strides[n], dtype=tensors[n].dtype) for n in names}
    return {name: nn.Parameter(tensor.zero_()) for name, tensor in alike.items()}


class _NoExchange:
    """A stand-in for Exchange: checking needs no other ranks."""

    threaded = is_open = False
    gone = ""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def polling(self) -> _NoExchange:
        return self

    def close(self) -> None:
        """Do nothing: there is no communicator."""


class StandIn:
    """Parameters of the same shapes, and the scheme for them."""

    def __init__(self, parameters: list[nn.Parameter], sync: dict[str, Any], shared: dict[str, Any]) -> None:
        model = nn.ParameterList(parameters)
        no_exchange: Any = _NoExchange(sync["rank"], sync["size"])
        self.options = saved_options(sync)
        self.layout, backend = Layout(model), load_backend()
        self.residual = torch.zeros(self.layout.size)
        sink = Published(self.layout, backend)
        parts = Parts(self.residual, self.layout.slots, self.layout.held, sink, no_exchange, backend)
        with warnings.catch_warnings():  # whoever trained with the scheme was warned of what it lacks
            warnings.simplefilter("ignore")
            self.aggregator, self.companion = self.options.build(parts, Site(model, self.layout))
        if sync.get("step.own") is not None:
            kind = getattr(torch.optim, shared["optimizer_kind"])
            self.companion.adopt(kind(model.parameters(), lr=0.1))

    def check(self, sync: dict[str, Any]) -> None:
        """Raise ConfigurationError unless the scheme would take the state."""
        parts = {**self.aggregator.state(), **self.companion.state()}
        step = {f"step.{key}": torch.from_numpy(v) if isinstance(v, np.ndarray) else v for key, v in parts.items()}
        own = {key: sync[key] for key in ("scheme", "options", "rank", "size", "density")}
        here = {"format": STATE_FORMAT, **own, "residual": self.residual, **step}
        check_state(sync, here, self.options, self.aggregator, self.companion)

    def close(self) -> None:
        """End what the scheme keeps."""
        self.aggregator.close()
