"""An aggregator of weights by nodes: the ranks of a node have the same weights W, and each exchanges its shard of them.

    exchange  between nodes    an aggregator of the shard, whose ranks are the nodes, updates W and the shared weights G
    gather    in the node      what changed in the other shards

A node keeps one copy of G in memory that its ranks share; each of them writes only its shard. If they cannot share
memory, each rank has a copy, and the changes of G are gathered, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from mpisparse.arrays import Bools, Floats, Ints, State
from mpisparse.backends.digest import digest
from mpisparse.backends.flat import Pieces
from mpisparse.comm.agreement import Notice
from mpisparse.comm.hierarchy import Nodes
from mpisparse.core.aggregator import Aggregator
from mpisparse.core.by_node import ByNode
from mpisparse.core.records import Delivered, Parts, Works
from mpisparse.core.step import Clock, Peek
from mpisparse.errors import GradientError

COMPARED = 64  # exchanges from one comparison of the weights in a node to the next


class Weights(Protocol):
    """A rank's own weights as one vector."""

    def flat(self) -> torch.Tensor:
        """A copy of all weights."""
        ...

    def at(self, index: Ints) -> Floats:
        """A copy of the weights at an ascending index."""
        ...

    def put(self, index: Ints, values: Floats) -> None:
        """Set the weights at an ascending index."""
        ...

    def set_flat(self, values: torch.Tensor) -> None:
        """Set all weights."""
        ...


class WeightsByNode(ByNode):
    """An aggregator whose workers are nodes, with the same weights on all ranks of a node.

    parts: of the whole vector and all ranks, whose residual is G. make: builds the aggregator of a shard.
    """

    def __init__(self, parts: Parts, nodes: Nodes, make: Callable[[Parts], Aggregator], weights: Weights) -> None:
        shared, self.in_common = nodes.vector()
        super().__init__(replace(parts, residual=torch.from_numpy(shared)), nodes, make)
        self.weights = weights

    def _prepared(self, shard: Parts) -> Parts:
        return replace(shard, residual=self.parts.residual[self.region.lo : self.region.hi])

    # A step

    def agreement(self, works: Works, notice: Notice, clock: Clock, peek: Peek | None = None) -> Bools | None:
        """Raise on all ranks if any cannot go on, or if the ranks of a node have different weights; collective."""
        used = self.readiness(notice, clock)  # also with parameters frozen: weights that no optimizer moves do not drift
        if self.number % COMPARED == 0:
            mine = np.array([digest([self.weights.flat()])], dtype=np.int64)
            differ = len(set(self.nodes.inside.allgather(mine)[:, 0].tolist())) > 1
            if bad := np.flatnonzero(self.parts.exchange.allgather(np.array([differ], dtype=np.int64))[:, 0]).tolist():
                raise GradientError(
                    f"r{self.parts.exchange.rank} | the ranks of a node have different weights, rank {bad[0]} and others of "
                    'its node: with hierarchy="node" they train one replica; give their optimizers the same settings, and '
                    "change no weights on one rank alone"
                )
            clock.lap("inside")
        return used

    def one_step(self, works: Works, pieces: Pieces | None, notice: Notice, clock: Clock) -> Delivered:
        """Exchange the shard between nodes, and gather all changes in the node; collective."""
        mine = None if pieces is None else pieces.stretch(self.region.lo, self.region.hi)
        return self._exchanged(works, mine, -1, notice, clock)

    def _refuse(self, bad: int, refused: Exception | None) -> None:  # type: ignore[override]  # which never returns
        found = np.flatnonzero(~np.isfinite(self.weights.flat().numpy()))[:1].tolist()
        super()._refuse(found[0] if found else bad, refused)

    def _publish(self, delivered: Delivered, counts: Sequence[int]) -> None:
        """Gather the changes of all shards in W, and in G if each rank has a copy; collective inside the node."""
        union, lo = delivered.due.union, self.region.lo
        if isinstance(union, range):
            self._gather_all()
            return
        index = union if isinstance(union, np.ndarray) else union.index(0, len(union))
        index = index + lo
        values = [self.weights.at(index)] if self.in_common else [self.weights.at(index), self._shared[index]]
        payload = np.concatenate([part.view(np.uint8) for part in (index, *values)])
        width = 8 + 4 * len(values)
        for place, part in enumerate(self.nodes.gather_bytes(payload, [width * count for count in counts])):
            count = counts[place]
            index, moved = part[: 8 * count].view(np.int64), part[8 * count :].view(np.float32)
            if place != self.nodes.place:
                self.weights.put(index, moved[:count])
                if not self.in_common:
                    self._shared[index] = moved[count:]

    def _gather_all(self) -> None:
        """Gather all shards of W, and of G if each rank has a copy."""
        own = self.weights.flat().numpy()
        self._gather(own)
        self.weights.set_flat(torch.from_numpy(own))
        if not self.in_common:
            self._gather(self._shared)

    def _gather(self, vector: Floats) -> None:
        """Replace the other shards of a vector by those of the ranks that have them; collective inside the node."""
        self.nodes.gather(vector[self.region.lo : self.region.hi].copy(), vector)
        self.nodes.meet()  # the shared memory may be overwritten from here on

    # Between steps

    @property
    def _shared(self) -> Floats:
        """G."""
        return self.parts.acc

    @property
    def residual(self) -> torch.Tensor:
        """G."""
        return self.parts.residual

    def shift(self, by: torch.Tensor) -> None:
        """Add a vector to G that is the same on all ranks; collective inside the node."""
        part = slice(self.region.lo, self.region.hi) if self.in_common else slice(None)
        self.parts.residual[part] += by[part]
        self.nodes.meet()

    def average(self, vector: torch.Tensor) -> None:
        """Replace a vector by its mean over the ranks of the node; collective inside the node."""
        total = np.empty(self.region.hi - self.region.lo, dtype=np.float32)
        self.nodes.reduce_scatter(vector.numpy(), total, self.parts.backend.add)
        self.parts.backend.divide(total, self.nodes.ranks)
        self.nodes.gather(total, vector.numpy())

    def same_in_node(self) -> bool:
        """Tell whether the ranks of the node have the same weights; collective inside the node."""
        rows = self.nodes.inside.allgather(np.array([digest([self.weights.flat()])], dtype=np.int64))
        return bool((rows == rows[0]).all())

    def at_rest(self, state: State, residual: Floats) -> None:
        """Move the error in a saved state to the saved weights, times the ranks, since the mean divides it by them."""
        residual[self.owned()] += np.asarray(self._inner_of(state)["error"]) * np.float32(self.parts.exchange.size)

    def owned(self) -> Ints:
        """The elements whose error this rank remembers, in the order in which it does."""
        reducer: Any = self.works.reducer
        shard: Ints = np.arange(self.region.lo, self.region.hi)
        owned: Ints = shard[reducer.owned(self.nodes.node, self.nodes.count)]
        return owned
