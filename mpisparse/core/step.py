"""The one step: accumulate, select, agree, encode, reduce, feed back, publish, adapt, in this order and nowhere else.

`SparseStep.run` and `DenseStep.run` own that order. Everything they pass between parts is arrays and small records.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mpisparse.arrays import Bools, Ints
from mpisparse.backends.protocol import Backend
from mpisparse.core.agree import Inputs, Overflow, share_counts
from mpisparse.core.records import Chooser, Chosen, Clock, Parts, Region, Speculation, imbalance
from mpisparse.core.rescale import MassScale
from mpisparse.select.adaptive_k import Demand
from mpisparse.select.scorers import Magnitude
from mpisparse.wire.blend import Blend, Blended
from mpisparse.wire.codecs import Codec
from mpisparse.wire.reduction import reduce_by_mpi, reduce_by_owner


@dataclass(frozen=True)
class Stats:
    """What a step did. Bytes are those of other ranks' data and of this rank's to others; seconds are by phase.

    reselected and refined count the searches for a threshold beyond the first ladder. workloads are what each rank
    selected and borders the bounds of the regions whose sums the ranks make, both in the order of the regions.
    sent_density counts also what was selected in earlier steps and still has momentum. details are the scheme's own;
    speculation is what was done ahead of the exchange, where the scheme does that.
    """

    step: int
    density: float
    set_density: float
    selected: int
    threshold: float
    bytes_sent: int
    bytes_received: int
    imbalance: float
    seconds: dict[str, float]
    reselected: int = 0
    refined: int = 0
    skipped: bool = False
    workloads: tuple[int, ...] = ()
    borders: tuple[int, ...] = ()
    sent_density: float = 0.0
    details: dict[str, float] = field(default_factory=dict)
    speculation: Speculation | None = None

    @property
    def build_up(self) -> float:
        """Actual over set density: above 1 where ranks select different elements that all must then send."""
        return self.density / self.set_density

    @property
    def bytes_per_element(self) -> float:
        """Bytes received for each element that all ranks together selected."""
        return self.bytes_received / self.selected if self.selected else 0.0


def spans_of(backend: Backend, index: Ints, regions: list[Region]) -> list[tuple[int, int]]:
    """Where each rank's region lies in a sorted index, in rank order."""
    cuts = backend.search(index, np.array([*(r.lo for r in regions), regions[-1].hi])).tolist()
    return [(cuts[p], cuts[p + 1]) for p, _ in sorted(enumerate(regions), key=lambda item: item[1].rank)]


class Synchronous:
    """What a step has to do beside its exchange: nothing, where the published gradient is all that ranks share."""

    deferred = False  # the result is of an earlier step, and what ranks must agree on travels with it
    draining = False

    @property
    def observes(self) -> bool:
        """Whether observed metrics change anything."""
        return False

    @property
    def scale(self) -> float:
        """The factor on the set density that observed metrics led to."""
        return 1.0

    def observe(self, metric: float) -> None:
        """Take note of a metric, the same on all ranks, of which more is better."""

    def check_by_hand(self) -> None:
        """Raise unless step() may be called without an optimizer attached."""

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer was attached."""

    def finish(self, stats: Stats) -> Stats:
        """The optimizer has used the published gradient."""
        return stats

    def note_loss(self, loss: float) -> None:
        """The loss of this rank's batch of the coming step."""

    def used(self) -> Bools | None:
        """Which parameters had a gradient on some rank in the step that the published gradient is of."""
        return None

    def drain(self) -> Iterator[Bools | None]:
        """Publish what is still in flight, one by one, let the optimizer use it, and make the replicas equal; collective."""
        yield from ()

    def global_weights(self) -> AbstractContextManager[None]:
        """Have the weights that are the same on all ranks in the model."""
        return nullcontext()

    def freeze(self) -> None:
        """Other parameters than before are frozen: see layout.waiting."""

    def memories(self) -> dict[str, Any]:
        """What elements are chosen by beside the accumulator, a number for each."""
        return {}

    def close(self) -> None:
        """Give back what else than memory is held; collective."""


class SparseStep(Synchronous):
    """What a chooser chose, exchanged through the regions' owners (codec None: by MPI's reduction).

    `compensate`: what is not sent is kept for later steps; False drops it, and with `mass` what is sent stands for it.
    `demand` moves k by what is observed.
    """

    def __init__(
        self, parts: Parts, *, scorer: Magnitude, chooser: Chooser, codec: Codec | None, blend: Blend | None,
        compensate: bool = True, mass: MassScale | None = None, demand: Demand | None = None,
    ) -> None:  # fmt: skip
        self.parts = parts
        self.acc = parts.acc
        self.scorer = scorer
        self.chooser = chooser
        self.codec = codec
        self.blend = blend
        self.compensate = compensate
        self.mass = mass
        self.demand = demand

    @property
    def scale(self) -> float:
        return self.demand.scale if self.demand else 1.0

    @property
    def observes(self) -> bool:
        return self.demand is not None

    def observe(self, metric: float) -> None:
        if self.demand:
            self.demand = self.demand.after(metric)

    def freeze(self) -> None:
        if self.blend:
            self.blend.rest(self.parts.backend, self.acc, self.parts.layout.waits)

    def memories(self) -> dict[str, Any]:
        return self.scorer.memories()

    def close(self) -> None:
        self.scorer.close()

    def run(self, inputs: Inputs, clock: Clock) -> Stats:
        """Do one step; collective. Raises StepRefused or Overflow on all ranks alike if values are not finite."""
        exchange, backend, published = self.parts.exchange, self.parts.backend, self.parts.published
        self.scorer.prepare(exchange, clock)
        chosen = self.chooser.choose(inputs, clock)
        union = chosen.union
        values = backend.empty(len(union), np.float32)
        factors = self.mass.factors(self.acc, union) if self.mass else None
        backend.take(self.acc, union, values)
        if factors is not None:
            values *= factors
        sent = self.blend.mix(backend, union, values) if self.blend else Blended(union, values, np.empty(0, dtype=np.uint8))
        left = backend.copy(sent.values) if self.blend else values
        if self.codec is None:
            mean = reduce_by_mpi(exchange, backend, left)
        else:
            mean = reduce_by_owner(exchange, backend, self.codec, left, spans_of(backend, sent.index, chosen.regions))
        *_, bad = backend.select(mean, 0, len(mean), float("inf"))
        if bad >= 0:  # on all ranks alike; the owner knows best where
            at = backend.to_host(sent.index[bad : bad + 1]).copy()
            raise Overflow(int(exchange.allreduce_(at, "max")[0]))
        clock.lap("reduce")
        if self.blend:
            self.blend.settle(backend, self.acc, sent, mean, left)
        elif self.codec is not None and not self.codec.lossless:
            backend.put(self.acc, union, left)
        self.scorer.sent(union)
        clock.lap("feedback")
        published.clear()
        if published.write(sent.index, mean):
            backend.add_at(self.acc, sent.index, mean)
        if not self.compensate:
            backend.fill(self.acc, 0.0)
        clock.lap("publish")
        self.chooser.adapt()
        clock.lap("adapt")
        return self._stats(inputs, chosen, clock, len(sent.index))

    def _stats(self, inputs: Inputs, chosen: Chosen, clock: Clock, sent: int) -> Stats:
        exchange, n = self.parts.exchange, len(self.acc)
        return Stats(
            step=self.chooser.step - 1,
            density=len(chosen.union) / n,
            set_density=(inputs.k if chosen.k is None else chosen.k) / n,
            selected=len(chosen.union),
            threshold=chosen.threshold,
            bytes_sent=exchange.nbytes_sent,
            bytes_received=exchange.nbytes_received,
            imbalance=imbalance(chosen.workloads),
            seconds=clock.seconds,
            reselected=chosen.reselected,
            refined=chosen.refined,
            workloads=tuple(int(chosen.workloads[r.rank]) for r in chosen.regions),
            borders=(*(r.lo for r in chosen.regions), n),
            sent_density=sent / n,
            details={**self.scorer.details(), **({"k_scale": self.scale} if self.demand else {})},
        )

    def state(self) -> dict[str, Any]:
        """What the next step depends on beside the residual."""
        demand = {f"demand.{key}": value for key, value in self.demand.state().items()} if self.demand else {}
        return {**self.chooser.state(), **(self.blend.state() if self.blend else {}), **demand}

    def check(self, state: dict[str, Any]) -> None:
        """Raise ConfigurationError unless load() could take the state."""
        self.chooser.check(state)
        if self.demand:
            self._demand_of(self.demand, state)
        if self.blend:
            self.blend.check(state, len(self.acc))

    def load(self, state: dict[str, Any]) -> None:
        """Take what state() gave."""
        self.chooser.load(state)
        if self.blend:
            self.blend.load(state)
        if self.demand:
            self.demand = self._demand_of(self.demand, state)

    @staticmethod
    def _demand_of(demand: Demand, state: dict[str, Any]) -> Demand:
        return demand.load({key: state[f"demand.{key}"] for key in demand.state()})


class DenseStep(Synchronous):
    """Everything, at once: one Allreduce of the accumulator."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.acc = parts.acc
        self.scorer = Magnitude(parts.residual, parts.backend)
        self.step = 0

    def run(self, inputs: Inputs, clock: Clock) -> Stats:
        """Do one step; collective. Raises StepRefused or Overflow on all ranks alike if values are not finite."""
        exchange, n = self.parts.exchange, len(self.acc)
        if inputs.gradients is not None:
            self.scorer.accumulate(inputs, 0, 0, 0.0)
        clock.lap("accumulate")
        share_counts(exchange, inputs, np.empty(0, dtype=np.int64), n)
        clock.lap("agree")
        total = self._sum()
        *_, bad = self.parts.backend.select(self.parts.backend.array_of(total), 0, n, float("inf"))
        if bad >= 0:
            raise Overflow(bad)
        clock.lap("reduce")
        self._publish(total)
        clock.lap("publish")
        self.step += 1
        return Stats(
            step=self.step - 1,
            density=1.0,
            set_density=1.0,
            selected=n,
            threshold=0.0,
            bytes_sent=exchange.nbytes_sent,
            bytes_received=exchange.nbytes_received,
            imbalance=0.0,
            seconds=clock.seconds,
            sent_density=1.0,
        )

    def _sum(self) -> torch.Tensor:
        """Sum into the published buffer where it is one of float32, else into a tensor of its own."""
        runs = self.parts.published.runs
        direct = len(runs) == 1 and runs[0].buffer.dtype == torch.float32
        total = runs[0].buffer if direct else torch.empty_like(self.parts.residual)
        self.parts.exchange.allreduce(self.acc, self.parts.backend.array_of(total))
        return total

    def _publish(self, total: torch.Tensor) -> None:
        """Publish the mean; the residual keeps what rounding to a parameter's type left."""
        published, residual = self.parts.published, self.parts.residual
        self.parts.backend.divide(self.parts.backend.array_of(total), self.parts.exchange.size)
        residual.zero_()
        for run in published.runs:
            if run.buffer is total:
                continue
            part = total[run.begin : run.end]
            limit = min(torch.finfo(run.buffer.dtype).max, torch.finfo(torch.float32).max)
            run.buffer.copy_(part.clamp(-limit, limit))
            residual[run.begin : run.end] = part - run.buffer.to(torch.float32)
        published.filled()

    def state(self) -> dict[str, Any]:
        """What the next step depends on beside the residual."""
        return {"step": self.step}

    def check(self, state: dict[str, Any]) -> None:
        """Nothing in it could be wrong but the step."""
        int(state["step"])

    def load(self, state: dict[str, Any]) -> None:
        """Take what state() gave."""
        self.step = int(state["step"])
