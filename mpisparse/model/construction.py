"""How a GradientSync is put together: what all ranks check first, and the parts that are made of it.

A rank that objects has the others object, too: whatever fails here fails on all ranks, before anything was exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mpisparse.backends.device import load_backend
from mpisparse.backends.flat import zeros
from mpisparse.comm.agreement import on_all
from mpisparse.comm.hierarchy import find_nodes
from mpisparse.comm.watchdog import check_timeout
from mpisparse.core.buckets import Bucketed
from mpisparse.core.records import Parts
from mpisparse.errors import ConfigurationError, check_choice
from mpisparse.model.alike import check_alike, described
from mpisparse.model.early import Early, Loop
from mpisparse.model.gradients import ModelGradients
from mpisparse.model.layout import Layout, refuse_wrapped
from mpisparse.model.published import Published
from mpisparse.model.shards import check_replicas
from mpisparse.model.survivors import SHRINK, check_mirror, check_survives
from mpisparse.schemes import configure
from mpisparse.schemes.by_node import build_by_node
from mpisparse.schemes.companion import Scheme, Site
from mpisparse.schemes.options import check_whole
from mpisparse.vectors import NoSink

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.exchange import Exchange
    from mpisparse.comm.hierarchy import Nodes
    from mpisparse.schemes.options import Options


class Care(NamedTuple):
    """How ranks look after each other, whatever the scheme. See GradientSync."""

    timeout: float
    check_every: int
    on_failure: str
    mirror: int | None


class Ground(NamedTuple):
    """What all ranks have agreed to build on: the model's layout, the scheme's options, and the device's backend."""

    exchange: Exchange
    model: torch.nn.Module
    layout: Layout
    backend: Backend
    scheme: str
    options: Options
    care: Care


class Assembly(NamedTuple):
    """The scheme, put together, and what it works on. nodes: None if all ranks exchange with each other.

    attached: the attachments of optimizers, empty at first.
    """

    parts: Parts
    nodes: Nodes | None
    scheme: Scheme
    attached: list[Any]


def check(exchange: Exchange, model: torch.nn.Module, scheme: str, care: Care, options: Mapping[str, Any]) -> Ground:
    """Lay out the model and check all that was given; collective. Raise on all ranks if any objects, or if they differ."""
    ground = on_all(exchange, lambda: _laid_out(exchange, model, scheme, care, options))
    check_replicas(list(model.named_parameters()), exchange, ground.options, scheme)
    others = f"on_failure {care.on_failure}, mirror {care.mirror}, check_every {care.check_every}"
    check_alike(exchange, [*described(model, ground.layout, scheme, ground.options, ground.care.timeout), others])
    exchange.segment_nbytes = ground.options.segment_nbytes
    return ground


def _laid_out(exchange: Exchange, model: torch.nn.Module, scheme: str, care: Care, options: Mapping[str, Any]) -> Ground:
    """What one rank can check by itself; local."""
    care = care._replace(timeout=check_timeout(care.timeout))
    configured = configure(scheme, **options)
    check_whole("check_every", care.check_every, 0)
    check_choice("on_failure", care.on_failure, ("abort", SHRINK))
    refuse_wrapped(model)
    layout = Layout(model)
    backend = load_backend(device=layout.device)
    if backend.name == "cuda" and not configured.on_device:
        raise ConfigurationError(f'scheme "{scheme}" runs on the host only, the model is on {layout.device}')
    if care.on_failure == SHRINK:
        check_survives(exchange, scheme, configured)
    if care.mirror is not None:
        check_mirror(exchange, scheme, configured, care.mirror, care.on_failure)
    return Ground(exchange, model, layout, backend, scheme, configured, care)


def assemble(ground: Ground) -> Assembly:
    """Put the scheme together; what it refuses of the model is raised on all ranks. Collective."""
    exchange, layout, options = ground.exchange, ground.layout, ground.options
    nodes = find_nodes(exchange, options.fixed_hierarchy, layout.size)
    residual = zeros(layout.size, torch.float32, layout.device)
    sink = NoSink() if options.of_weights else Published(layout, ground.backend)
    survives = ground.care.on_failure == SHRINK
    parts = Parts(residual, layout.slots, layout.held, sink, exchange, ground.backend, survives)
    attached: list[Any] = []
    site = Site(ground.model, layout, attached)

    def build() -> Scheme:
        return options.build_for_model(parts, site) if nodes is None else build_by_node(options, parts, site, nodes)

    return Assembly(parts, nodes, on_all(exchange, build), attached)


def gradients_of(ground: Ground, assembly: Assembly, loop: Loop) -> ModelGradients:
    """The model's gradients, to be exchanged; during backward already if they are sent in buckets. Local."""
    parts, aggregator, options = assembly.parts, assembly.scheme.aggregator, ground.options
    assert isinstance(parts.sink, Published)
    gradients = ModelGradients(
        ground.model, ground.layout, parts.sink, ground.backend, parts.residual,
        in_backward=options.accumulate == "backward",
        looks=options.nonfinite == "skip" and not aggregator.undoes,
    )  # fmt: skip
    gradients.add = aggregator.add
    if isinstance(aggregator, Bucketed):
        gradients.send_early(Early(ground.layout, parts.sink, gradients.watch, aggregator, loop, gradients.look))
    return gradients
