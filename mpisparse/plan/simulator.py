"""All ranks in one process: the selection of real runs, with their own code, for as many workers as one likes.

What ranks decide alike (`ExclusiveSelector`, the controllers, the search for a threshold, the pickers of the baselines) runs
once; what each rank does to its own accumulator runs for one worker after the other, and messages are noted, not sent.
No accumulator of many workers is kept: where one is read, it is added up again from the gradients since the first step, with
the same roundings, and zeroed where all ranks sent. Selection is thus that of a real run with codec fp32, bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np

from mpisparse.arrays import Ints
from mpisparse.backends.device import load_backend
from mpisparse.comm.regions import Region, even_spans, shared_out
from mpisparse.comm.roll_call import VALUES
from mpisparse.errors import ConfigurationError, check_choice
from mpisparse.plan.costs import Log, Message
from mpisparse.plan.synthetic import Source
from mpisparse.plan.virtual_search import COUNT, HEADER, Accumulators, VirtualSearch
from mpisparse.schemes import SCHEMES, configure
from mpisparse.schemes.partitioned import Exdyna
from mpisparse.select import riders, search
from mpisparse.select.candidates import NONE
from mpisparse.select.exclusive import first_rungs, may_look, next_selector, settle_step
from mpisparse.select.partition import LeastBorders, imbalance
from mpisparse.select.pickers import CyclicTopK, Picker, TopK, merged
from mpisparse.select.scorers import Magnitude
from mpisparse.select.selector import ExclusiveSelector
from mpisparse.select.threshold import Controller
from mpisparse.wire.codecs import CODECS
from mpisparse.wire.indices import FEW, STATUS, rooms_of

READY = 8 * (2 + VALUES)  # bytes of the first message of a step
KEPT = 1 << 32  # bytes of accumulators that are kept; more are added up again whenever they are read


@dataclass(frozen=True)
class Simulated:
    """What one step of all workers did; workloads and borders are in the order of the regions.

    work: seconds of a worker's own on deciding: what all decide alike (borders and blocks), or picking its largest; alone:
    of the one whose turn it is, while the others wait. deciding: the first so many messages, which come before indices.
    """

    union: Ints
    regions: list[Region]
    workloads: Ints
    threshold: float
    log: Log
    work: float
    alone: float
    deciding: int
    k: int
    n: int

    @property
    def borders(self) -> tuple[int, ...]:
        return (*(r.lo for r in self.regions), self.n)

    @property
    def density(self) -> float:
        return len(self.union) / self.n

    @property
    def imbalance(self) -> float:
        return imbalance(self.workloads)

    @property
    def counts(self) -> list[Message]:
        """The messages that tell what all ranks select, before their indices."""
        return self.log.messages[: self.deciding]


@dataclass(frozen=True, eq=False)
class TimedSelector(ExclusiveSelector):
    """A selector that notes how long it takes: in a real run every rank does what it does."""

    spent: list[float] = field(default_factory=list)

    def drawn(self, counts: Sequence[Ints], able: Ints, least: LeastBorders, loads: Ints | None = None) -> ExclusiveSelector:
        start = time.perf_counter()
        drawn = super().drawn(counts, able, least, loads)
        self.spent.append(time.perf_counter() - start)
        return drawn

    def after(self, union: Ints, controller: Controller, search: Any, pick: Any) -> ExclusiveSelector:
        start = time.perf_counter()
        coming = super().after(union, controller, search, pick)
        self.spent.append(time.perf_counter() - start)
        return coming


class Simulator:
    """Steps of all workers of a scheme; a subclass says how they choose.

    spare: what the first message has room for. codec: of the values; what a lossy one leaves is not simulated.
    """

    spare = 0
    codec = "fp32"

    def __init__(self, source: Source, size: int, density: float) -> None:
        self.acc = Accumulators(source, size)
        self.size = size
        self.n = self.acc.n
        self.k = max(1, math.floor(density * self.n + 1e-6))

    def choose(self, log: Log) -> Chosen:
        """What all send in this step; notes the messages that it takes to know it."""
        raise NotImplementedError

    def step(self) -> Simulated:
        """Do one step."""
        log = Log(self.size)
        log.add("allgather", READY + self.spare)
        self.acc.begin()
        choice = self.choose(log)
        codec = CODECS[self.codec]
        shares = [codec.nbytes(stop - start) for start, stop in even_spans(len(choice.union), choice.regions)]
        log.add_reduction(shares)
        self.acc.sent(choice.union)
        return Simulated(**vars(choice), log=log, k=self.k, n=self.n)


@dataclass(frozen=True)
class Chosen:
    """What is sent, where it is summed, what each rank chose, from which magnitude on, and what deciding took.

    work: seconds of every rank; alone: seconds of one while the others wait. deciding: messages before those of indices.
    """

    union: Ints
    regions: list[Region]
    workloads: Ints
    threshold: float
    work: float = 0.0
    alone: float = 0.0
    deciding: int = 0


class ExclusiveSimulator(Simulator):
    """Scheme exdyna."""

    def __init__(self, source: Source, size: int, options: Exdyna) -> None:
        super().__init__(source, size, options.density)
        plain = Exdyna(
            density=options.density, accumulate=options.accumulate, controller=options.controller,
            partitioner=options.partitioner, blocks=options.blocks, codec=options.codec,
        )  # fmt: skip
        if options != plain or CODECS[options.codec].variable or CODECS[options.codec].blended:
            raise ConfigurationError(
                "the simulator knows density, accumulate, controller, partitioner, blocks and codecs of fixed size of "
                "scheme exdyna; leave the other options as they are by default"
            )
        self.codec = options.codec
        self.selector: Any = TimedSelector.first(
            self.n, size, controller=options.controller, partitioner=options.partitioner, blocks=options.blocks,
            reads_region=options.accumulate == "backward", prior=Magnitude.prior,
        )  # fmt: skip
        self.spare = riders.NBYTES if 1 < size <= search.GATHERED_RANKS else 0
        if self.selector.draws and 4 * self.n * size <= KEPT:
            self.acc.keep()

    def choose(self, log: Log) -> Chosen:
        selector, k = self.selector, self.k
        searching = VirtualSearch(selector.controller, k, self.acc, log)
        scopes = [selector.scope(rank) for rank in range(self.size)]
        rungs = first_rungs(selector, k)
        found = searching.select(scopes, float(rungs[0])) if len(rungs) else [NONE] * self.size
        searching.told = (
            self.spare > 0 and len(rungs) > 0 and may_look(selector) and all(map(searching.fits, found, repeat(rungs)))
        )
        told = STATUS if searching.told else 0
        settled, lesson = settle_step(searching, selector, scopes, rungs, found)
        deciding = len(log.messages)
        regions = lesson.selector.regions()
        chosen = [found.reaching(settled.threshold).index for found in settled.found]
        log_indices(log, sorted(regions), chosen, told)
        union = np.concatenate([chosen[r.rank] for r in regions])
        self.selector = next_selector(selector.controller, lesson, union, np.searchsorted, np.take)
        spent = sum(selector.spent)
        selector.spent.clear()
        return Chosen(union, regions, settled.workloads, settled.threshold, spent, deciding=deciding)


class UnionSimulator(Simulator):
    """Schemes topk and cltk: all send what any rank picked."""

    def __init__(self, source: Source, size: int, density: float, *, cyclic: bool) -> None:
        super().__init__(source, size, density)
        self.cyclic = cyclic
        backend = load_backend()
        whole = TopK(backend)
        self.pickers: list[Picker] = [CyclicTopK(backend, rank, size) if cyclic else whole for rank in range(size)]

    def choose(self, log: Log) -> Chosen:
        picks, seconds = [], []
        for rank, picker in enumerate(self.pickers):
            acc = self.acc.read(rank, 0, self.n)
            start = time.perf_counter()
            picks.append(picker.pick(acc, self.k, len(self.acc.unions)))
            seconds.append(time.perf_counter() - start)
        workloads = np.array([len(picked.index) for picked in picks], dtype=np.int64)
        log.add("allgather", HEADER)
        log.add("allgather", HEADER + 2 * COUNT)
        deciding = len(log.messages)
        log_indices(log, [Region(rank, 0, self.n) for rank in range(self.size)], [picked.index for picked in picks])
        union = merged(np.concatenate([picked.index for picked in picks]))
        threshold = max(picked.threshold for picked in picks)
        together = {"alone": max(seconds)} if self.cyclic else {"work": sum(seconds) / self.size}
        regions = shared_out(union, self.n, self.size)
        return Chosen(union, regions, workloads, threshold, deciding=deciding, **together)


def log_indices(log: Log, regions: Sequence[Region], chosen: Sequence[Ints], told: int = 0) -> None:
    """Note the messages of mpisparse.wire.indices.unite; both sequences are in rank order. told: bytes of a status."""
    nbytes = rooms_of(regions, list(map(len, chosen)))
    if sum(nbytes) > FEW:
        log.add("allgather", 8)
        backend = load_backend()
        nbytes = [len(backend.encode_indices(index, r.lo, r.hi)) for r, index in zip(regions, chosen, strict=True)]
    log.add("allgatherv", [told + count for count in nbytes])


def simulator(scheme: str, source: Source, size: int, density: float, **options: Any) -> Simulator:
    """The simulator of a scheme by name."""
    check_choice("scheme", scheme, SCHEMES)
    if scheme not in SIMULATED:
        raise ConfigurationError(
            f'scheme "{scheme}" has no simulator, with which bench scaling compares real ranks; '
            f"choose from: {', '.join(SIMULATED)}, dense"
        )
    chosen = configure(scheme, density=density, **options)
    if isinstance(chosen, Exdyna):
        return ExclusiveSimulator(source, size, chosen)
    if options:
        raise ConfigurationError(f"the simulator knows no options of scheme {scheme}, got {', '.join(options)}")
    return UnionSimulator(source, size, density, cyclic=scheme == "cltk")


SIMULATED = ("exdyna", "topk", "cltk")
