"""The one step: accumulate, select, agree, encode, reduce, feed back, publish, adapt, in this order and nowhere else.

`SparseStep.run` and `DenseStep.run` own that order. Everything they pass between parts is arrays and small records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mpisparse.agree import Inputs, Overflow, share_counts
from mpisparse.backend import Backend
from mpisparse.blend import Blend, Blended
from mpisparse.codecs import Codec
from mpisparse.parts import Chooser, Chosen, Clock, Ints, Parts, Region, imbalance
from mpisparse.reduction import reduce_by_mpi, reduce_by_owner
from mpisparse.score import Magnitude


@dataclass(frozen=True)
class Stats:
    """What a step did. Bytes are those of other ranks' data and of this rank's to others; seconds are by phase.

    reselected and refined count the searches for a threshold beyond the first ladder. workloads are what each rank
    selected and borders the bounds of the regions whose sums the ranks make, both in the order of the regions.
    sent_density counts also what was selected in earlier steps and still has momentum.
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


class SparseStep:
    """What a chooser chose, exchanged through the regions' owners (codec None: by MPI's reduction).

    `compensate`: what is not sent is kept for later steps; False drops it.
    """

    def __init__(
        self, parts: Parts, *, scorer: Magnitude, chooser: Chooser, codec: Codec | None, blend: Blend | None,
        compensate: bool = True,
    ) -> None:  # fmt: skip
        self.parts = parts
        self.acc = parts.acc
        self.scorer = scorer
        self.chooser = chooser
        self.codec = codec
        self.blend = blend
        self.compensate = compensate

    def run(self, inputs: Inputs, clock: Clock) -> Stats:
        """Do one step; collective. Raises StepRefused or Overflow on all ranks alike if values are not finite."""
        exchange, backend, published = self.parts.exchange, self.parts.backend, self.parts.published
        chosen = self.chooser.choose(inputs, clock)
        union = chosen.union
        values = backend.empty(len(union), np.float32)
        backend.take(self.acc, union, values)
        sent = self.blend.mix(backend, union, values) if self.blend else Blended(union, values, np.empty(0, dtype=np.uint8))
        left = sent.values.copy() if self.blend else values
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
            self.acc.fill(0.0)
        clock.lap("publish")
        self.chooser.adapt()
        clock.lap("adapt")
        return self._stats(inputs, chosen, clock, len(sent.index))

    def _stats(self, inputs: Inputs, chosen: Chosen, clock: Clock, sent: int) -> Stats:
        exchange, n = self.parts.exchange, len(self.acc)
        return Stats(
            step=self.chooser.step - 1,
            density=len(chosen.union) / n,
            set_density=inputs.k / n,
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
        )

    def state(self) -> dict[str, Any]:
        """What the next step depends on beside the residual."""
        return {**self.chooser.state(), **(self.blend.state() if self.blend else {})}

    def check(self, state: dict[str, Any]) -> None:
        """Raise ConfigurationError unless load() could take the state."""
        self.chooser.check(state)
        if self.blend:
            self.blend.check(state, len(self.acc))

    def load(self, state: dict[str, Any]) -> None:
        """Take what state() gave."""
        self.chooser.load(state)
        if self.blend:
            self.blend.load(state)


class DenseStep:
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
