"""The one step: accumulate, select, agree, encode, reduce, feed back, publish, adapt, in this order and nowhere else.

`SparseStep.run` and `DenseStep.run` own that order. Everything they pass between parts is arrays and small records.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpisparse.codecs import CODECS
from mpisparse.flat import Gradients, Published, add_sparse_
from mpisparse.selector import ExclusiveSelector, Region
from mpisparse.threshold import Controller, Rungs

if TYPE_CHECKING:
    from mpisparse.exchange import Exchange

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

ROW = 65_536  # elements in a compressed row: what a uint16 column can tell apart
GATHERED_LADDERS = 16  # up to so many ranks ladders are gathered with their owners; beyond, summed

FINE, NONFINITE, NO_BACKWARD, STALE = range(4)


@dataclass(frozen=True)
class Stats:
    """What a step did. Bytes are those of other ranks' data and of this rank's to others; seconds are by phase."""

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


class StepRefused(Exception):  # noqa: N818 - not an error yet: sync.py turns it into one with the parameters' names
    """Some rank cannot go on; known to all ranks. `statuses` holds (status, detail) of every rank."""

    def __init__(self, statuses: Sequence[tuple[int, int]]) -> None:
        super().__init__(statuses)
        self.statuses = statuses


class DensityDiffers(Exception):  # noqa: N818 - as above
    """The ranks were set to different densities; carries each rank's k."""


@dataclass
class Inputs:
    """What a rank brings to a step; gradients are None where they are in the accumulator already."""

    gradients: Gradients | None
    k: int
    unused: NDArray[np.bool_]
    status: int = FINE
    detail: int = 0


@dataclass
class Outcome:
    """What a step leaves: its statistics, and which parameters had a gradient on some rank (None: all had)."""

    stats: Stats
    used: NDArray[np.bool_] | None


@dataclass(frozen=True)
class Found:
    """Candidates inside the rank's own region, ascending."""

    index: Ints
    magnitude: Floats
    bad: int


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
class Agreement:
    """What all ranks know after the counts went round: how many each selects, from which rung, and how it was found."""

    controller: Controller | None
    threshold: float
    workloads: list[int]
    reselected: int
    refined: int


def share_status(exchange: Exchange, inputs: Inputs, extra: Ints) -> Ints:
    """Gather status, k and `extra` from all ranks; raise everywhere if any rank cannot go on. Collective."""
    header = np.array([inputs.status, inputs.detail, inputs.k, int(inputs.unused.any())], dtype=np.int64)
    rows = exchange.allgather(np.concatenate([header, extra]))
    if rows[:, 0].any():
        raise StepRefused([(int(status), int(detail)) for status, detail in rows[:, :2]])
    if (rows[:, 2] != inputs.k).any():
        raise DensityDiffers(rows[:, 2].tolist())
    return rows[:, 3:]


def share_used(exchange: Exchange, inputs: Inputs, some_unused: bool) -> NDArray[np.bool_] | None:
    """Which parameters had a gradient on some rank; asked only if some rank lacked one. Collective."""
    if not some_unused:
        return None
    bits = exchange.allreduce_(np.packbits(~inputs.unused), "or")
    return np.unpackbits(bits, count=len(inputs.unused)).astype(bool)


def add_gradients_(residual: torch.Tensor, gradients: Gradients, inputs: Inputs) -> None:
    """Add the sparse gradients; the dense ones come with the pass that selects."""
    for slot, grad in gradients.sparse:
        note_nonfinite(inputs, add_sparse_(residual, slot, grad))


def note_nonfinite(inputs: Inputs, index: int) -> None:
    """Remember the first non-finite element for the agreement that follows."""
    if index >= 0 and inputs.status == FINE:
        inputs.status, inputs.detail = NONFINITE, index


class SparseStep:
    """Selection inside exclusive regions, exchanged through the regions' owners."""

    def __init__(
        self,
        residual: torch.Tensor,
        published: Published,
        exchange: Exchange,
        backend: Any,
        *,
        selector: ExclusiveSelector,
        codec: str,
        reduce: str,
    ) -> None:
        self.residual = residual
        self.acc: Floats = residual.numpy()
        self.published = published
        self.exchange = exchange
        self.backend = backend
        self.selector = selector
        self.codec = CODECS[codec]
        self.reduce = reduce

    def run(self, inputs: Inputs) -> Outcome:
        """Do one step; collective. Raises StepRefused or DensityDiffers on all ranks alike, before anything is sent."""
        clock = Clock()
        regions = self.selector.regions()
        region = next(r for r in regions if r.rank == self.exchange.rank)
        rungs = self._rungs(inputs.k)
        found = self._accumulate(inputs, region, rungs)
        clock.lap("accumulate")
        found, agreement, some_unused = self._agree(inputs, region, rungs, found)
        used = share_used(self.exchange, inputs, some_unused)
        clock.lap("agree")
        union, spans = self._unite(found, agreement, regions, region)
        clock.lap("unite")
        values = np.empty(len(union), dtype=np.float32)
        self.backend.take(self.acc, union, values)
        mean, held_back = self._reduce(values, spans)
        clock.lap("reduce")
        self._feed_back(union, spans, values, held_back)
        clock.lap("feedback")
        self.published.clear()
        if self.published.write(union, mean):
            self.backend.add_at(self.acc, union, mean)
        clock.lap("publish")
        self.selector.adapt(union, agreement.controller or self.selector.controller)
        clock.lap("adapt")
        return Outcome(self._stats(inputs, regions, agreement, clock), used)

    def _rungs(self, k: int) -> Rungs:
        if k >= len(self.acc):
            return np.zeros(1, dtype=np.float32)
        return self.selector.controller.ladder(k)

    def _accumulate(self, inputs: Inputs, region: Region, rungs: Rungs) -> Found:
        """Add this step's gradients and collect the candidates above the lowest rung in one pass."""
        lo, hi, floor = (region.lo, region.hi, float(rungs[0])) if len(rungs) else (0, 0, 0.0)
        gradients = inputs.gradients
        if gradients is None:
            found = Found(*self.backend.select(self.acc, lo, hi, floor))
        else:
            add_gradients_(self.residual, gradients, inputs)
            args = (gradients.pointers, gradients.ends, gradients.kinds)
            found = Found(*self.backend.accumulate_select(self.acc, *args, lo, hi, floor))
        note_nonfinite(inputs, found.bad)
        return found

    def _agree(self, inputs: Inputs, region: Region, rungs: Rungs, found: Found) -> tuple[Found, Agreement, bool]:
        """Find the rung that gives k over all ranks, with finer ladders or a new selection where it takes them."""
        controller = self.selector.controller
        everything = inputs.k >= len(self.acc)
        reselected = refined = 0
        while True:
            counts = self.backend.tail_counts(found.magnitude, rungs)
            total, rows, some_unused = self._share_counts(inputs, counts)
            if everything:
                rung = 0
                break
            choice = controller.choose(rungs, total, inputs.k)
            if choice.rung is not None:
                rung = choice.rung
                break
            if choice.finer is not None:
                refined += 1
                rungs = choice.finer
                continue
            reselected += len(rungs) > 0
            histogram = self.exchange.allreduce_(self.backend.histogram(self.acc, region.lo, region.hi))
            rungs = controller.locate(histogram, inputs.k)
            found = Found(*self.backend.select(self.acc, region.lo, region.hi, float(rungs[0])))
        workloads = rows[:, rung] if rows is not None else self.exchange.allgather(counts[rung : rung + 1])[:, 0]
        after = None if everything else controller.after(rungs, total, rung, inputs.k)
        return found, Agreement(after, float(rungs[rung]), workloads.tolist(), reselected, refined), some_unused

    def _share_counts(self, inputs: Inputs, counts: Ints) -> tuple[Ints, Ints | None, bool]:
        """Sum the ladders over ranks; up to 16 ranks in the message that carries the status, with each rank's own."""
        if self.exchange.size <= GATHERED_LADDERS:
            rows = share_status(self.exchange, inputs, counts)
            return rows[:, 1:].sum(axis=0), rows[:, 1:], bool(rows[:, 0].any())
        rows = share_status(self.exchange, inputs, counts[:0])
        return self.exchange.allreduce_(counts.copy()), None, bool(rows[:, 0].any())

    def _unite(
        self, found: Found, agreement: Agreement, regions: list[Region], region: Region
    ) -> tuple[Ints, list[tuple[int, int]]]:
        """Gather everyone's indices as compressed rows. Returns the sorted union and each rank's span in it."""
        rows = [-(-(r.hi - r.lo) // ROW) for r in regions]
        shares = [agreement.workloads[r.rank] for r in regions]
        nbytes = [4 * (n + -(-count // 2)) for n, count in zip(rows, shares, strict=True)]
        starts = np.cumsum([0, *nbytes]).tolist()
        by_rank = sorted(range(len(regions)), key=lambda p: regions[p].rank)
        mine = rows[next(p for p in by_rank if regions[p].rank == region.rank)]
        counts, columns = self.backend.compress_rows(found.index, found.magnitude, agreement.threshold, region.lo, ROW, mine)
        padding = np.zeros(len(columns) % 2, dtype=np.uint16)
        payload = np.concatenate([counts.view(np.uint8), columns.view(np.uint8), padding.view(np.uint8)])
        gathered = self.exchange.allgatherv(payload, [nbytes[p] for p in by_rank], [starts[p] for p in by_rank])
        union = np.empty(sum(shares), dtype=np.int64)
        ends = np.cumsum([0, *shares]).tolist()
        spans = [(0, 0)] * len(regions)
        for p, r in enumerate(regions):
            block = gathered[starts[p] : starts[p + 1]]
            columns_at = block[4 * rows[p] :].view(np.uint16)[: shares[p]]
            if not self.backend.expand_rows(
                block[: 4 * rows[p]].view(np.uint32), columns_at, r.lo, ROW, union[ends[p] : ends[p + 1]]
            ):
                raise RuntimeError(f"r{self.exchange.rank} | the rows of rank {r.rank} do not add up: message damaged")
            spans[r.rank] = (ends[p], ends[p + 1])
        return union, spans

    def _reduce(self, values: Floats, spans: list[tuple[int, int]]) -> tuple[Floats, Floats | None]:
        """The mean at the union, and what the owner's encoding held back of its span's sum (None: nothing).

        `values` keeps what this rank's encoding did not send.
        """
        size = self.exchange.size
        if self.reduce == "allreduce":
            mean = self.exchange.allreduce_(values.copy())
            values.fill(0.0)
            mean /= np.float32(size)
            return mean, None
        codec, kernels = self.codec, self.backend
        nbytes = [codec.nbytes(stop - start) for start, stop in spans]
        places = _places(nbytes, [start for start, _ in spans])
        payload = np.empty(sum(nbytes), dtype=np.uint8)
        for (start, stop), place, n in zip(spans, places, nbytes, strict=True):
            codec.encode(kernels, values[start:stop], payload[place : place + n])
        total, back = self._sum(self.exchange.alltoallv(payload, nbytes, places), spans[self.exchange.rank])
        gathered = self.exchange.allgatherv(back, nbytes, places)
        mean = np.empty(len(values), dtype=np.float32)
        for (start, stop), place, n in zip(spans, places, nbytes, strict=True):
            codec.decode(kernels, gathered[place : place + n], mean[start:stop])
        mean /= np.float32(size)
        return mean, None if codec.lossless else total

    def _sum(self, rows: Bytes, span: tuple[int, int]) -> tuple[Floats, Bytes]:
        """Sum the ranks' rows in rank order and encode the sum; returns what encoding left, and the payload."""
        count = span[1] - span[0]
        nbytes = self.codec.nbytes(count)
        total, term = np.empty((2, count), dtype=np.float32)
        self.codec.decode(self.backend, rows[:nbytes], total)
        for rank in range(1, self.exchange.size):
            self.codec.decode(self.backend, rows[rank * nbytes : (rank + 1) * nbytes], term)
            total += term
        back = np.empty(nbytes, dtype=np.uint8)
        self.codec.encode(self.backend, total, back)
        return total, back

    def _feed_back(self, union: Ints, spans: list[tuple[int, int]], left: Floats, held_back: Floats | None) -> None:
        """Keep in the residual what was not sent; the owner also keeps what it did not send of the sum."""
        if held_back is None:
            return
        start, stop = spans[self.exchange.rank]
        left[start:stop] += held_back
        self.backend.put(self.acc, union, left)

    def _stats(self, inputs: Inputs, regions: list[Region], agreement: Agreement, clock: Clock) -> Stats:
        selected = sum(agreement.workloads)
        size, n = self.exchange.size, len(self.acc)
        return Stats(
            step=self.selector.step - 1,
            density=selected / n,
            set_density=inputs.k / n,
            selected=selected,
            threshold=agreement.threshold,
            bytes_sent=self.exchange.nbytes_sent,
            bytes_received=self.exchange.nbytes_received,
            imbalance=max(agreement.workloads) * size / selected - 1 if selected else 0.0,
            seconds=clock.seconds,
            reselected=agreement.reselected,
            refined=agreement.refined,
            workloads=tuple(agreement.workloads[r.rank] for r in regions),
            borders=(*(r.lo for r in regions), n),
        )

    def state(self) -> dict[str, Any]:
        """What the next step depends on beside the residual."""
        return self.selector.state()

    def load(self, state: dict[str, Any]) -> None:
        """Take what state() gave."""
        self.selector.load(state)


def _places(nbytes: list[int], starts: list[int]) -> list[int]:
    """Byte offsets of payloads laid one behind the other in the order of their starts."""
    order = sorted(range(len(nbytes)), key=lambda r: (starts[r], nbytes[r]))
    places, at = [0] * len(nbytes), 0
    for r in order:
        places[r] = at
        at += nbytes[r]
    return places


class DenseStep:
    """Everything, at once: one Allreduce of the accumulator."""

    def __init__(self, residual: torch.Tensor, published: Published, exchange: Exchange, backend: Any) -> None:
        self.residual = residual
        self.acc: Floats = residual.numpy()
        self.published = published
        self.exchange = exchange
        self.backend = backend
        self.step = 0

    def run(self, inputs: Inputs) -> Outcome:
        """Do one step; collective. Raises StepRefused on all ranks alike, before anything is sent."""
        clock = Clock()
        if inputs.gradients is not None:
            add_gradients_(self.residual, inputs.gradients, inputs)
            grads = inputs.gradients
            found = self.backend.accumulate_select(self.acc, grads.pointers, grads.ends, grads.kinds, 0, 0, 0.0)
            note_nonfinite(inputs, found[2])
        clock.lap("accumulate")
        rows = share_status(self.exchange, inputs, np.empty(0, dtype=np.int64))
        used = share_used(self.exchange, inputs, bool(rows.any()))
        clock.lap("agree")
        self._publish(clock)
        self.step += 1
        n = len(self.acc)
        stats = Stats(
            step=self.step - 1,
            density=1.0,
            set_density=1.0,
            selected=n,
            threshold=0.0,
            bytes_sent=self.exchange.nbytes_sent,
            bytes_received=self.exchange.nbytes_received,
            imbalance=0.0,
            seconds=clock.seconds,
        )
        return Outcome(stats, used)

    def _publish(self, clock: Clock) -> None:
        """Sum into the published buffer where it is float32, else through a copy; what rounding left stays behind."""
        runs = self.published.runs
        direct = len(runs) == 1 and runs[0].buffer.dtype == torch.float32
        total = runs[0].buffer if direct else torch.empty_like(self.residual)
        self.exchange.allreduce(self.acc, total.numpy())
        clock.lap("reduce")
        total.div_(self.exchange.size)
        self.residual.zero_()
        if not direct:
            for run in runs:
                part = total[run.begin : run.end]
                limit = torch.finfo(run.buffer.dtype).max
                run.buffer.copy_(part.clamp(-limit, limit))
                self.residual[run.begin : run.end] = part - run.buffer.to(torch.float32)
        self.published.version = self.published.written()
        clock.lap("publish")

    def state(self) -> dict[str, Any]:
        """What the next step depends on beside the residual."""
        return {"step": self.step}

    def load(self, state: dict[str, Any]) -> None:
        """Take what state() gave."""
        self.step = int(state["step"])
