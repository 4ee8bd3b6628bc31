"""An aggregator by nodes: gradients are summed inside each node first, and only the nodes' sums are exchanged.

    reduce    in the node      each rank gets the node's sum of its shard of the vector
    exchange  between nodes    an aggregator of the shard, whose ranks are the nodes
    gather    in the node      the means of all shards, published whole

The residual belongs to the node and is sharded: a rank keeps the residual of its shard and selects in it. The exchange of
a shard spans all nodes, and every node has all shards. So all ranks learn of a shard's refusal inside their own node, and
raise together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from mpisparse.arrays import Bools, Floats, Ints, State
from mpisparse.backends.flat import Held, Pieces, Slot, pieces_of, zeros
from mpisparse.comm.agreement import BROKEN, FINE, NONFINITE, Notice, Overflow, Refusal, StepRefused
from mpisparse.comm.hierarchy import Nodes
from mpisparse.core import step
from mpisparse.core.aggregator import Aggregator
from mpisparse.core.records import Delivered, Parts, Stats, Works
from mpisparse.core.step import Clock, Peek
from mpisparse.errors import ConfigurationError, GradientError

NO_INDEX: Ints = np.empty(0, dtype=np.int64)
HALVES = (torch.float16, torch.bfloat16)


class ShardSink:
    """Holds the mean of a shard until the shards are gathered and published."""

    def __init__(self, n: int) -> None:
        self.vector = zeros(n, torch.float32)
        self.index: Any = NO_INDEX
        self.mean: Any = NO_INDEX.view(np.float32)

    def clear(self) -> None:
        """Nothing arrived."""
        self.index, self.mean = NO_INDEX, NO_INDEX.view(np.float32)

    def write(self, index: Any, mean: Any, acc: Any) -> None:
        """Keep the mean at an index; the whole mean is in the vector already."""
        self.index, self.mean = index, self.vector.numpy() if isinstance(index, range) else mean

    def whole(self) -> torch.Tensor:
        """The vector."""
        return self.vector

    def published(self) -> torch.Tensor:
        """The vector."""
        return self.vector


class Moved(NamedTuple):
    """What all shards of a step sent, and the bytes that this rank received from its own node."""

    selected: int = 0
    sent: int = 0
    nbytes_inside: int = 0
    nbytes_outside: int = 0  # bytes of the roll call of all ranks that came from other nodes
    collectives: int = 0  # calls among all ranks and inside the node


class ByNode(Aggregator):
    """An aggregator whose workers are nodes.

    parts: of the whole vector and all ranks. make: builds the aggregator of a shard. `works` and `inner` are the shard's.
    """

    def __init__(self, parts: Parts, nodes: Nodes, make: Callable[[Parts], Aggregator]) -> None:
        self.nodes = nodes
        self.region = nodes.shard
        count = self.region.hi - self.region.lo
        self.halves = any(slot.dtype in HALVES for slot in parts.slots)
        kind = torch.float16 if self.halves else torch.float32  # what is published may be rounded
        slot = Slot("shard", 0, count, (count,), (1,), kind)
        shard = replace(parts, slots=[slot], held=Held(count), exchange=nodes.between)
        self.parts = parts
        self._make = functools.partial(make, self._prepared(shard))
        self.density, self.last, self.staleness = 1.0, None, 0
        self._damaged, self._polling = "", None
        self._begin()
        self._moved = Moved()

    def _prepared(self, shard: Parts) -> Parts:
        """Allocate the memory of a step; returns the parts of the shard with its residual and its sink."""
        self.sink = ShardSink(shard.held.n)
        self._vector, self._total = self.nodes.room(), zeros(shard.held.n, torch.float32)
        self._rounded: Floats = zeros(self.nodes.n, torch.float32).numpy()  # what the published types could not hold
        return replace(shard, residual=zeros(shard.held.n, torch.float32), sink=self.sink)

    def _begin(self) -> None:
        """Start with fresh parts."""
        self.inner = self._make()
        self.works = self.inner.works

    # A step

    def agreement(self, works: Works, notice: Notice, clock: Clock, peek: Peek | None = None) -> Bools | None:
        """Raise on all ranks if any cannot go on; collective."""
        used = self.readiness(notice, clock)
        if self.parts.held.stretches:  # the same on all ranks
            raise GradientError(
                f'r{self.parts.exchange.rank} | hierarchy="node" cannot freeze parameters midway: what waits of them is '
                'shared out over the ranks of a node; save a checkpoint before, and load it with hierarchy="flat"'
            )
        return used

    def readiness(self, notice: Notice, clock: Clock) -> Bools | None:
        """Share which ranks can go on; all of them have the same parameters frozen then. Collective."""
        for exchange in (self.parts.exchange, self.nodes.inside, self.nodes.between):
            exchange.reset_counters()
        used = step.share_readiness(self.parts.exchange, notice)
        clock.lap("wait")
        return used

    def one_step(self, works: Works, pieces: Pieces | None, notice: Notice, clock: Clock) -> Delivered:
        """Sum in the node, exchange between nodes, gather and publish in the node; collective."""
        bad = self._reduce(pieces)
        clock.lap("inside")
        return self._exchanged(works, pieces_of(self._total), bad, notice, clock)

    def _exchanged(self, works: Works, pieces: Pieces | None, bad: int, notice: Notice, clock: Clock) -> Delivered:
        """Exchange the shard, and share the outcome in the node; collective.

        bad: where this rank's own vector is not finite, or -1.
        """
        delivered: Delivered | None = None
        refused: Exception | None = None
        try:
            inner = Notice(self._share(notice.k), np.zeros(1, dtype=bool), step=notice.step)
            delivered = step.run(works, pieces, inner, clock)
        except (Refusal, GradientError) as error:
            refused = error
        sent = 0 if delivered is None else len(delivered.reduced.index)
        selected = 0 if delivered is None else delivered.selected
        rows = self.nodes.inside.allgather(np.array([refused is not None, sent, selected], dtype=np.int64))
        if delivered is None or rows[:, 0].any():
            self._refuse(bad, refused)
        self._publish(delivered, rows[:, 1].tolist())
        self._note(rows)
        clock.lap("inside")
        return delivered

    def _reduce(self, pieces: Pieces | None) -> int:
        """Sum this rank's shard over the node; returns where this rank's own vector is not finite, or -1. Collective."""
        kernels: Any = self.parts.backend
        if pieces is None:
            self._vector[:] = 0.0
            bad = -1
        else:
            whole = pieces.densified()  # must live while the pass reads it
            bad = int(kernels.divide_into(self._vector, *whole.dense, 1.0))
        self.nodes.reduce_scatter(self._vector, self._total.numpy(), kernels.add)
        return bad

    def _share(self, k: int) -> int:
        """This shard's part of k elements; the parts of all shards add up to k, if k allows one each."""
        n = len(self.parts.residual)
        return max(1, k * self.region.hi // n - k * self.region.lo // n)

    def _publish(self, delivered: Delivered, counts: Sequence[int]) -> None:
        """Gather the means of all shards, scaled to means over all ranks, and publish them; collective inside the node.

        counts: the number of elements that each shard sent.
        """
        nodes, sink, backend, whole = self.nodes, self.sink, self.parts.backend, self.parts.sink
        backend.divide(sink.mean, nodes.ranks)
        if isinstance(sink.index, range):
            mean = whole.whole().numpy()
            nodes.gather(sink.mean, mean)
            whole.write(range(len(mean)), mean, self._rounded)
        else:
            payload = np.concatenate([(sink.index + self.region.lo).view(np.uint8), sink.mean.view(np.uint8)])
            arrived = nodes.gather_bytes(payload, [12 * count for count in counts])
            index, mean = (
                np.concatenate([part[begin * count : end * count] for part, count in zip(arrived, counts, strict=True)])
                for begin, end in ((0, 8), (8, 12))
            )
            whole.write(index.view(np.int64), mean.view(np.float32), self._rounded)
        if self.halves:
            left = self._rounded[self.region.lo : self.region.hi]
            left *= np.float32(nodes.ranks)
            backend.add(self.inner.parts.acc, left)
            self._rounded[:] = 0.0
            for stage in self.works.stages:
                stage.ended(backend, self.works.acc)

    def _refuse(self, bad: int, refused: Exception | None) -> NoReturn:
        """Raise the refusal of any shard on all ranks; collective over all of them.

        bad: where this rank's own vector is not finite, or -1.
        """
        status, over, trouble = NONFINITE if bad >= 0 else FINE, -1, ""
        if isinstance(refused, Overflow):
            over = self.region.lo + refused.args[0]
        elif isinstance(refused, StepRefused) and not any(state == BROKEN for state, _ in refused.statuses):
            over = self.region.lo + next(detail for state, detail in refused.statuses if state != FINE)
        elif refused is not None:
            status, trouble = BROKEN, getattr(refused, "trouble", "") or str(refused)
        rows = self.parts.exchange.allgather(np.array([status, max(bad, 0), over], dtype=np.int64))
        if rows[:, 0].any():
            raise StepRefused([(int(status), int(detail)) for status, detail, _ in rows], trouble) from refused
        raise Overflow(int(rows[:, 2].max())) from refused

    def _note(self, rows: Ints) -> None:
        """Record the step's traffic."""
        sent, selected = rows[:, 1:].sum(axis=0).tolist()
        everyone, nodes = self.parts.exchange, self.nodes
        others = max(1, everyone.size - 1)
        outside = everyone.nbytes_received * (everyone.size - nodes.ranks) // others
        inside = everyone.nbytes_received - outside + nodes.inside.nbytes_received
        self._moved = Moved(selected, sent, inside, outside, everyone.collectives + nodes.inside.collectives)

    def stats(
        self, number: int, notice: Notice, delivered: Delivered | None, seconds: dict[str, float], details: dict[str, float]
    ) -> Stats:
        """What a step did: elements of all shards; bytes, threshold and borders of this rank's shard."""
        moved, n, low = self._moved, len(self.parts.residual), self.region.lo
        stats = self.inner.stats(number, notice, delivered, seconds, details)
        return replace(
            stats,
            density=moved.selected / n,
            set_density=notice.k / n,
            selected=moved.selected,
            sent_density=moved.sent / n,
            bytes_sent=stats.bytes_sent + moved.nbytes_outside,
            bytes_received=stats.bytes_received + moved.nbytes_outside,
            control_bytes=stats.control_bytes + moved.nbytes_outside,
            node_bytes=moved.nbytes_inside,
            collectives=stats.collectives + moved.collectives,
            borders=tuple(low + border for border in stats.borders),
        )

    def _free(self) -> None:
        self.nodes.close()

    # State: the shard's under one key, and a residual as if the same ranks exchanged without nodes

    @property
    def residual(self) -> torch.Tensor:
        """This rank's shard of the node's residual, and -0 elsewhere; a copy.

        Adding -0 to a number leaves its bits unchanged.
        """
        whole = torch.full_like(self.parts.residual, -0.0)
        whole[self.region.lo : self.region.hi] = self.inner.residual
        return whole

    def restore(self, residual: torch.Tensor) -> None:
        """Load the sum of the residuals of this node's ranks; collective inside the node."""
        self.nodes.reduce_scatter(residual.numpy(), self.inner.residual.numpy(), self.parts.backend.add)

    def state(self) -> State:
        inner = {key: value for key, value in self.inner.state().items() if key != "step"}
        return {"step": self.works.selection.step, "nodes": {**self.nodes.layout, "parts": inner}}

    def upgraded(self, state: State) -> State:
        """Accept a state saved without hierarchy and with nothing in flight: the nodes' parts start fresh."""
        if "nodes" in state:
            return state
        waits = [np.asarray(state[key]) for key in ("error", "blend.value") if key in state]
        if any(values.any() for values in waits):
            raise ConfigurationError(
                'the state is of hierarchy="flat" with values on their way; load it with mpisparse.checkpoint.load'
            )
        return {**state, "nodes": None}

    def check(self, state: State) -> None:
        if state["nodes"] is None:
            int(state["step"])
            return
        here = self.nodes.layout
        layout = {key: state["nodes"][key] for key in here}
        if layout != here:
            raise ConfigurationError(f"the state was saved with nodes {layout}, these are {here}")
        self.inner.check(self._inner_of(state))

    def _inner_of(self, state: State) -> State:
        """The state of the shard's parts, as the arrays that state() returned."""
        parts = {key: v.numpy() if isinstance(v, torch.Tensor) else v for key, v in state["nodes"]["parts"].items()}
        missing = set(self.inner.state()) - {*parts, "step"}
        if missing:
            raise ConfigurationError(f"the state has no {min(missing)!r}")
        return {**parts, "step": state["step"]}

    def load(self, state: State) -> None:
        self._damaged = ""
        if state["nodes"] is None:
            self._begin()
            self.inner.load({**self.inner.state(), "step": state["step"]})
        else:
            self.inner.load(self._inner_of(state))

    def at_rest(self, state: State, residual: Floats) -> None:
        """Move what is in flight in a saved state to the saved residual, in place; local."""
        works, taken = self.works, self._inner_of(state)
        shard = residual[self.region.lo : self.region.hi]
        taken = works.reducer.at_rest(taken, shard, self.nodes.node, self.nodes.count)
        for stage in works.stages:
            taken = stage.at_rest(taken, shard)
