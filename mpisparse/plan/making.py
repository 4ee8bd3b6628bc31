"""Puts the exchanges of candidates together, in use one at a time, on the same vector and the same nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mpisparse.arrays import State
from mpisparse.comm.hierarchy import Nodes
from mpisparse.comm.no_exchange import nodes_of
from mpisparse.core.records import Parts
from mpisparse.plan.candidates import FLAT, NODES, WEIGHTS, Candidate
from mpisparse.schemes.companion import Scheme, Site
from mpisparse.vectors import NoSink

if TYPE_CHECKING:
    from mpisparse.schemes.options import Options


class Makes(Protocol):
    """What a candidate is made of: the options of its scheme, and the nodes whose ranks may sum first, if any."""

    def of(self, candidate: Candidate) -> Options: ...
    def nodes(self, parts: Parts) -> Nodes | None: ...


class Making:
    """Makes the schemes of candidates. nodes: those whose ranks may sum first; None: there are none such.

    The ranks of a node share memory from the first exchange of nodes on.
    """

    def __init__(self, parts: Parts, site: Site, makes: Makes) -> None:
        self.parts, self.site, self.makes = parts, site, makes
        self.nodes = makes.nodes(parts)

    def made(self, candidate: Candidate) -> Scheme:
        """The scheme of a candidate; collective in a node if it is one of nodes."""
        if candidate.way == NODES and self.nodes is not None:
            self.nodes.meet()  # all have read the results of the last step, which may be in shared memory
            self.nodes = self.nodes if self.nodes.rows else self.nodes.with_memory()
        return self._built(candidate, self.parts, self.nodes)

    def tried(self, candidate: Candidate, inner: State | None = None) -> Any:
        """Its aggregator, to look at only: what is in use goes on as it is. Local.

        inner: its state, which tells on which nodes it was saved.
        """
        exchange, parts = self.parts.exchange, replace(self.parts, residual=torch.zeros_like(self.parts.residual))
        spare, nodes = exchange.spare, None
        if candidate.way == NODES:
            assert inner is not None
            nodes = nodes_of(inner["nodes"], exchange.size, len(parts.residual))
        try:
            return self._built(candidate, parts, nodes).aggregator
        finally:
            exchange.spare = spare

    def _built(self, candidate: Candidate, parts: Parts, nodes: Nodes | None) -> Scheme:
        parts.exchange.spare = 0  # a scheme says itself what it tells in a roll call
        parts = replace(parts, sink=NoSink()) if candidate.kind == WEIGHTS else parts
        options = self.makes.of(candidate)
        if candidate.way == FLAT:
            return options.build(parts, self.site)
        assert nodes is not None
        return options.build_by_node(parts, self.site, nodes)
