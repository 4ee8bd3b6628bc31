"""A stand-in for GradientSync, to check and resize its states: for any rank of any number, without model and MPI."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from mpisparse.backends.device import load_backend
from mpisparse.backends.flat import zeros
from mpisparse.checkpoint.contents import saved_options
from mpisparse.checkpoint.objects import check_belonging
from mpisparse.comm.no_exchange import NoExchange, nodes_of
from mpisparse.core.records import Parts
from mpisparse.core.state import sources
from mpisparse.model.layout import Layout
from mpisparse.model.published import Published
from mpisparse.schemes.by_node import build_by_node
from mpisparse.schemes.companion import Site
from mpisparse.schemes.state import STATE_FORMAT, check_state, resize_states, step_state


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
    syncs: Mapping[int, dict[str, Any]], shared: dict[str, Any], old: int, new: int, rank: int, here: int = 1
) -> dict[str, Any]:
    """A rank's exchange among `new` ranks, from those of the `old` ranks in sources(), by the parts of its own scheme.

    here: how many of the new ranks sum in a node first.
    """
    first = {**syncs[sources(old, new, rank)[0]], "rank": rank, "size": new}
    parameters = _parameters(first, shared)
    if parameters is None:
        raise ValueError("it does not say which parameters are trained, so that it fits only as many ranks as wrote it")
    if _shared_out(first):
        syncs = FlatStates(syncs, list(parameters.values()), shared)
        first = {**syncs[sources(old, new, rank)[0]], "rank": rank, "size": new}
    with contextlib.closing(StandIn(list(parameters.values()), first, shared)) as stand_in:
        merged = resize_states(syncs, old, new, rank, stand_in.aggregator, stand_in.companion)
        if here > 1 and stand_in.options.of_weights:
            _bring_home(merged, stand_in.aggregator.works.reducer)
    return merged


def _bring_home(sync: dict[str, Any], reducer: Any) -> None:
    """Move a rank's error on the shared weights to its own weights, in place, because it owns other elements now."""
    error, size = sync["step.error"], sync["size"]
    sync["residual"].numpy()[reducer.owned(sync["rank"], size)] += error.numpy() * np.float32(size)
    sync["step.error"] = torch.zeros_like(error)


def has_nodes(sync: dict[str, Any]) -> bool:
    """Whether a state, by its contents, is of nodes that summed gradients first."""
    return sync.get("step.nodes") is not None


def _shared_out(sync: dict[str, Any]) -> bool:
    """Whether the residual of a state is shared out over nodes, by its scheme or by what scheme auto has chosen."""
    return has_nodes(sync) or "nodes" in sync.get("step.inner", {})


def ranks_a_node(sync: dict[str, Any]) -> int:
    """How many ranks of a node summed their gradients first in the exchange that saved a state."""
    return int(sync["step.nodes"]["ranks"]) if has_nodes(sync) else 1


class FlatStates(Mapping[int, dict[str, Any]]):
    """States saved with nodes, converted to states without; each is made on demand, and not kept."""

    def __init__(self, syncs: Mapping[int, dict[str, Any]], parameters: list[nn.Parameter], shared: dict[str, Any]) -> None:
        self.syncs, self.parameters, self.shared = syncs, parameters, shared

    def __getitem__(self, rank: int) -> dict[str, Any]:
        return _flat(self.syncs[rank], self.parameters, self.shared)

    def __iter__(self) -> Iterator[int]:
        return iter(self.syncs)

    def __len__(self) -> int:
        return len(self.syncs)


def _flat(sync: dict[str, Any], parameters: list[nn.Parameter], shared: dict[str, Any]) -> dict[str, Any]:
    """Convert a rank's state saved with nodes to one without: what is in flight goes to the residual."""
    residual = sync["residual"].clone()
    if not has_nodes(sync):
        with contextlib.closing(StandIn(parameters, sync, shared)) as chosen:
            parts = chosen.aggregator.flattened(step_state(sync), residual.numpy())
        return {**sync, **{f"step.{key}": value for key, value in parts.items()}, "residual": residual}
    with contextlib.closing(StandIn(parameters, sync, shared)) as by_node:
        by_node.aggregator.at_rest(step_state(sync), residual.numpy())
        kept = {f"step.{key}" for key in by_node.companion.state()}
    flat = {key: value for key, value in sync.items() if not key.startswith("step.") or key in kept}
    flat["residual"] = residual
    with contextlib.closing(StandIn(parameters, flat, shared)) as anew:
        parts = {**anew.aggregator.state(), "step": sync["step.step"]}
    return {**flat, **{f"step.{key}": torch.from_numpy(v) if isinstance(v, np.ndarray) else v for key, v in parts.items()}}


def _parameters(sync: dict[str, Any], shared: dict[str, Any]) -> dict[str, nn.Parameter] | None:
    """Parameters of the shapes and strides of those that were trained; None if that was not written."""
    tensors = {name: t for name, t in shared["model"].items() if isinstance(t, torch.Tensor)}
    names = list(shared.get("trainable") or tensors)
    if not set(names) <= tensors.keys() or sum(tensors[name].numel() for name in names) != len(sync["residual"]):
        return None
    strides = shared.get("trainable") or {name: tensors[name].stride() for name in names}
    alike = {n: torch.empty_strided(tensors[n].shape, strides[n], dtype=tensors[n].dtype) for n in names}
    return {name: nn.Parameter(tensor.zero_()) for name, tensor in alike.items()}


class StandIn:
    """Parameters of the same shapes, and the scheme for them."""

    def __init__(self, parameters: list[nn.Parameter], sync: dict[str, Any], shared: dict[str, Any]) -> None:
        model = nn.ParameterList(parameters)
        no_exchange: Any = NoExchange(sync["rank"], sync["size"])
        self.options = saved_options(sync)
        self.layout, backend = Layout(model), load_backend()
        self.residual = zeros(self.layout.size, torch.float32)
        sink = Published(self.layout, backend)
        parts = Parts(self.residual, self.layout.slots, self.layout.held, sink, no_exchange, backend)
        with warnings.catch_warnings():  # the user was warned when training with the scheme
            warnings.simplefilter("ignore")
            if has_nodes(sync):
                nodes = nodes_of(sync["step.nodes"], sync["size"], self.layout.size)
                scheme = build_by_node(self.options, parts, Site(model, self.layout), nodes)
            else:
                scheme = self.options.build_for_model(parts, Site(model, self.layout))
        self.aggregator: Any
        self.aggregator, self.companion = scheme
        if sync.get("step.own") is not None:
            kind = getattr(torch.optim, shared["optimizer_kind"])
            self.companion.adopt(kind(model.parameters(), lr=0.1))

    def check(self, sync: dict[str, Any]) -> None:
        """Raise ConfigurationError unless the scheme would load the state."""
        parts = {**self.aggregator.state(), **self.companion.state()}
        step = {f"step.{key}": torch.from_numpy(v) if isinstance(v, np.ndarray) else v for key, v in parts.items()}
        own = {key: sync[key] for key in ("scheme", "options", "rank", "size", "density")}
        here = {"format": STATE_FORMAT, **own, "residual": self.residual, **step}
        check_state(sync, here, self.options, self.aggregator, self.companion)

    def close(self) -> None:
        """Free what the scheme holds."""
        self.aggregator.close()
