"""The one step: accumulate, select, agree, encode, reduce, feed back, publish, adapt, in this order and nowhere else.

`SparseStep.run` and `DenseStep.run` own that order. Everything they pass between parts is arrays and small records.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpisparse.agree import Found, Inputs, Overflow, Settled, Settlement, both, share_block_counts, share_counts
from mpisparse.blend import Blend, Blended
from mpisparse.codecs import Codec
from mpisparse.flat import Layout, Published
from mpisparse.reduction import reduce_by_mpi, reduce_by_owner
from mpisparse.rows import unite
from mpisparse.score import Magnitude
from mpisparse.selector import ExclusiveSelector, Region
from mpisparse.threshold import TINY, Rungs

if TYPE_CHECKING:
    from mpisparse.exchange import Exchange

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

BALANCED, DRAWS = 0.1, 3  # borders are drawn anew until the imbalance is at most so much, at most so often


@dataclass(frozen=True)
class Stats:
    """What a step did. Bytes are those of other ranks' data and of this rank's to others; seconds are by phase.

    reselected and refined count the searches for a threshold beyond the first ladder; workloads and borders are the
    partitions' shares and bounds, in ascending order. sent_density counts also what was selected in earlier steps and
    still has momentum.
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
    def bytes_per_element(self) -> float:
        """Bytes received for each element that all ranks together selected."""
        return self.bytes_received / self.selected if self.selected else 0.0


@dataclass
class Clock:
    """Seconds by phase; a lap is charged with all time since the last."""

    seconds: dict[str, float] = field(default_factory=dict)
    last: float = field(default_factory=time.perf_counter)

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now


@dataclass(frozen=True)
class Parts:
    """What a step works on: the parameters' places, this rank's accumulator, the published gradient, the other ranks, and
    the kernels."""

    layout: Layout
    residual: torch.Tensor
    published: Published
    exchange: Exchange
    backend: Any

    @property
    def acc(self) -> Floats:
        """The accumulator as an array on the same memory."""
        values: Floats = self.residual.numpy()
        return values


def imbalance(workloads: NDArray[np.int64]) -> float:
    """How much more than the mean the busiest rank has selected, as a share of the mean."""
    total = int(workloads.sum())
    return int(workloads.max()) * len(workloads) / total - 1 if total else 0.0


def spans_of(index: Ints, regions: list[Region]) -> list[tuple[int, int]]:
    """Where each rank's region lies in a sorted index, in rank order."""
    cuts = np.searchsorted(index, [*(r.lo for r in regions), regions[-1].hi]).tolist()
    return [(cuts[p], cuts[p + 1]) for p, _ in sorted(enumerate(regions), key=lambda item: item[1].rank)]


class SparseStep:
    """Selection inside exclusive regions, exchanged through the regions' owners (codec None: by MPI's reduction).

    What reaches the threshold is selected: of the scores, or (mask "gradient") of the accumulator, with a threshold by
    the scores. `exact`: the threshold is the score of rank k, by gathering all. `compensate`: what is not sent is kept.
    """

    def __init__(
        self, parts: Parts, *, scorer: Magnitude, selector: ExclusiveSelector, codec: Codec | None, blend: Blend | None,
        mask: str = "score", exact: bool = False, compensate: bool = True,
    ) -> None:  # fmt: skip
        self.parts = parts
        self.acc = parts.acc
        self.scorer = scorer
        self.selector = selector
        self.codec = codec
        self.blend = blend
        self.masked = self.acc if mask == "gradient" else scorer.scores
        self.exact = exact
        self.by_ladder = mask == "score" and not exact
        self.compensate = compensate

    def run(self, inputs: Inputs, clock: Clock) -> Stats:
        """Do one step; collective. Raises StepRefused or Overflow on all ranks alike if values are not finite."""
        exchange, backend, published = self.parts.exchange, self.parts.backend, self.parts.published
        scope, rungs = self.selector.scope(exchange.rank), self._rungs(inputs.k)
        found = self.scorer.accumulate(inputs, *(scope if len(rungs) else (0, 0)), float(rungs[0]) if len(rungs) else 0.0)
        clock.lap("accumulate")
        settled = (self._settle if self.by_ladder else self._settle_percentile)(inputs, scope, rungs, found)
        regions, workloads = self.selector.regions(), settled.workloads.tolist()
        clock.lap("agree")
        union = unite(exchange, backend, settled.found, settled.threshold, regions, workloads)
        clock.lap("unite")
        values = np.empty(len(union), dtype=np.float32)
        backend.take(self.acc, union, values)
        sent = self.blend.mix(backend, union, values) if self.blend else Blended(union, values, np.empty(0, dtype=np.uint8))
        left = sent.values.copy() if self.blend else values
        if self.codec is None:
            mean = reduce_by_mpi(exchange, left)
        else:
            mean = reduce_by_owner(exchange, backend, self.codec, left, spans_of(sent.index, regions))
        bad = np.flatnonzero(~np.isfinite(mean))[:1]
        if len(bad):  # on all ranks alike; the owner knows best where
            raise Overflow(int(exchange.allreduce_(sent.index[bad], "max")[0]))
        clock.lap("reduce")
        if self.blend:
            self.blend.settle(backend, self.acc, sent, mean, left)
        elif self.codec is not None and not self.codec.lossless:
            backend.put(self.acc, union, left)
        clock.lap("feedback")
        published.clear()
        if published.write(sent.index, mean):
            backend.add_at(self.acc, sent.index, mean)
        if not self.compensate:
            self.acc.fill(0.0)
        clock.lap("publish")
        if inputs.k < len(self.acc):
            after = self.selector.controller.after(settled.rungs, settled.total, settled.rung, inputs.k)
        else:
            after = self.selector.controller
        self.selector.adapt(union, after)
        clock.lap("adapt")
        return self._stats(inputs, regions, settled, clock, len(sent.index))

    def _rungs(self, k: int) -> Rungs:
        return self.selector.controller.ladder(k) if k < len(self.acc) else np.zeros(1, dtype=np.float32)

    def _settle(self, inputs: Inputs, scope: tuple[int, int], rungs: Rungs, found: Found) -> Settled:
        """Agree on the threshold; where borders are drawn in the step, once for them and once inside them."""
        exchange, selector = self.parts.exchange, self.selector
        settlement = Settlement(exchange, self.parts.backend, self.scorer.scores, selector.controller, inputs)
        settled = settlement.settle(scope, rungs, found, everywhere=selector.in_step)
        everywhere, floor = settled.found, settled.rungs[0]
        for _ in range(DRAWS if selector.in_step else 0):
            selector.draw(share_block_counts(exchange, self.parts.backend, everywhere, settled.threshold, selector.edges))
            mine = next((r.lo, r.hi) for r in selector.regions() if r.rank == exchange.rank)
            settled = both(settled, settlement.settle(mine, settled.rungs, everywhere.within(*mine)))
            if imbalance(settled.workloads) <= BALANCED:
                break
            if settled.rungs[0] < floor:  # selected again below: the next borders need candidates from there
                floor = settled.rungs[0]
                everywhere = Found(*self.parts.backend.select(self.scorer.scores, *scope, float(floor)))
        return settled

    def _settle_percentile(self, inputs: Inputs, scope: tuple[int, int], rungs: Rungs, found: Found) -> Settled:
        """A threshold by the scores in the ranks' regions, and what reaches it in the masked vector."""
        exchange, backend, scores = self.parts.exchange, self.parts.backend, self.scorer.scores
        if self.exact:
            rungs = np.array([self._percentile(inputs.k, scope)], dtype=np.float32)
            settled = Settled(found, rungs, 0, np.array([inputs.k]), np.zeros(exchange.size, dtype=np.int64))
        else:
            settled = Settlement(exchange, backend, scores, self.selector.controller, inputs).settle(scope, rungs, found)
        selected = Found(*backend.select(self.masked, *scope, settled.threshold))
        counts = np.array([len(selected.index)], dtype=np.int64)
        return replace(settled, found=selected, workloads=share_counts(exchange, inputs, counts, len(scores))[:, 0])

    def _percentile(self, k: int, scope: tuple[int, int]) -> float:
        """The score that k of all ranks' scores in their regions reach: by gathering and sorting all, for tests."""
        regions = sorted(self.selector.regions(), key=lambda r: r.rank)
        mine = self.scorer.scores[slice(*scope)].view(np.uint8)
        every = self.parts.exchange.allgatherv(mine, [4 * (r.hi - r.lo) for r in regions], [4 * r.lo for r in regions])
        n = len(self.acc)
        return max(float(np.partition(np.abs(every.view(np.float32)), n - k)[n - k]), TINY)

    def _stats(self, inputs: Inputs, regions: list[Region], settled: Settled, clock: Clock, sent: int) -> Stats:
        exchange, n = self.parts.exchange, len(self.acc)
        selected = int(settled.workloads.sum())
        return Stats(
            step=self.selector.step - 1,
            density=selected / n,
            set_density=inputs.k / n,
            selected=selected,
            threshold=settled.threshold,
            bytes_sent=exchange.nbytes_sent,
            bytes_received=exchange.nbytes_received,
            imbalance=imbalance(settled.workloads),
            seconds=clock.seconds,
            reselected=settled.reselected,
            refined=settled.refined,
            workloads=tuple(int(settled.workloads[r.rank]) for r in regions),
            borders=(*(r.lo for r in regions), n),
            sent_density=sent / n,
        )

    def state(self) -> dict[str, Any]:
        """What the next step depends on beside the residual."""
        return {**self.selector.state(), **self.scorer.state(), **(self.blend.state() if self.blend else {})}

    def check(self, state: dict[str, Any]) -> None:
        """Raise ConfigurationError unless load() could take the state."""
        self.selector.check(state)
        self.scorer.check(state)
        if self.blend:
            self.blend.check(state, len(self.acc))

    def load(self, state: dict[str, Any]) -> None:
        """Take what state() gave."""
        self.selector.load(state)
        self.scorer.load(state)
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
        *_, bad = self.parts.backend.select(total.numpy(), 0, n, float("inf"))
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
        self.parts.exchange.allreduce(self.acc, total.numpy())
        return total

    def _publish(self, total: torch.Tensor) -> None:
        """Publish the mean; the residual keeps what rounding to a parameter's type left."""
        published, residual = self.parts.published, self.parts.residual
        total.div_(self.parts.exchange.size)
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
