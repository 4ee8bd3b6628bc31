"""bench scaling: steps on the ranks that mpirun started, the same steps simulated, and simulations of far more workers.

The simulated selection must equal the real one, and modelled times are compared with real ones. Compute time is measured
on single ranks, as many at once as there are cores. Communication is measured for each number of ranks: bandwidth with
large messages, latency with steps of exdyna on very few elements. Every virtual worker has a dedicated core, and the links
that two ranks of this run had unless latency and bandwidth are given.

Dense cases may be in few bits, in buckets during backward, or by nodes (bench/dense_model.py). In place of a backward real
ranks sleep. By nodes all ranks run, if they are equal nodes; virtual workers are nodes of as many ranks as one says, which
share the link of their host.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpisparse
from mpisparse.bench.dense_model import DenseModel
from mpisparse.bench.given import GivenModel
from mpisparse.bench.node_links import measure_nodes
from mpisparse.bench.sync import open_source
from mpisparse.bench.train import FIRST, Case
from mpisparse.comm.agreement import on_all
from mpisparse.comm.exchange import Exchange
from mpisparse.comm.transport import end_job_on_uncaught_exception
from mpisparse.core.records import Stats
from mpisparse.errors import ConfigurationError
from mpisparse.names import FLAT
from mpisparse.plan.costs import Log, Machine, Nodes
from mpisparse.plan.simulator import Simulated, Simulator, simulator
from mpisparse.plan.synthetic import LAYERS, Source, Synthetic
from mpisparse.runtime.table import save, show

COLUMNS = {
    "ranks": "d", "scheme": "", "how": "", "density": ".6f", "worst_density": ".3f", "build_up": ".3f", "imbalance": ".3f",
    "received_MB": ".4f", "ms": ".2f", "modelled_ms": ".2f", "error": "+.0%", "same": "",
}  # fmt: skip
SMALL, LARGE = 64, 1 << 18  # bytes per rank of the messages that measure bandwidth
TRIES = 15
LITTLE = 10 * LAYERS  # elements of a step whose time is nearly all latency
NAP = 0.002
SHORTEST = 1e-9  # seconds


@dataclass(frozen=True)
class ScalingPlan:
    """What to run on real ranks and on virtual workers. backward: seconds of a backward that exchanges overlap with."""

    elements: int
    density: float
    cases: list[str]
    steps: int
    workers: list[int]
    gradients: Path | None = None
    latency: float | None = None
    bandwidth: float | None = None
    backward: float = 0.0
    ranks_a_node: int = 1
    as_json: bool = False
    out: Path | None = None


def run(plan: ScalingPlan) -> int:
    """Measure, simulate and print on rank 0; collective."""
    end_job_on_uncaught_exception()
    comm = MPI.COMM_WORLD
    source = open_source(comm, plan.gradients, plan.elements)
    _check_cases(comm, plan, source)
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size < comm.size] + [comm.size]
    real: dict[tuple[str, int], list[list[Stats]]] = {}
    machine = Machine({}, {}, {}, _cores(comm), _handling(comm))
    little = Calibration(replace(plan, steps=FIRST + TRIES, backward=0.0), Synthetic(LITTLE, comm.size), comm)
    for size in sizes:
        part = MPI.Intracomm(comm.Split(0 if comm.rank < size else 1, comm.rank))
        with _others_asleep(comm):
            if comm.rank < size:
                machine.bandwidth[size], machine.reducing[size] = _links(part, sum(source.sizes))
                little.measure(part)
                for scheme in plan.cases:
                    if size == comm.size or not _by_node(scheme):
                        real[scheme, size] = part.allgather(_steps(part, source, scheme, plan))
        part.Free()
    with _others_asleep(comm):
        by_node = any(map(_by_node, plan.cases))
        nodes = measure_nodes(comm, sum(source.sizes), machine, _links) if by_node else None
    computing = {scheme: _computing(comm, source, scheme, plan) for scheme in plan.cases}
    with _others_asleep(comm):
        if comm.rank == 0:
            little.calibrate(machine)
            cluster = _cluster(plan, machine)
            records = [_real(plan, source, machine, nodes, computing, key, stats) for key, stats in real.items()]
            records += _virtual(plan, source, cluster, _virtual_nodes(plan, cluster, nodes), computing)
    if comm.rank == 0:
        _publish(plan, records, machine, cluster, source)
    return 0


def _check_cases(comm: MPI.Intracomm, plan: ScalingPlan, source: Source) -> None:
    """Raise on all ranks, before any measurement, if a case cannot be simulated or links are unknown; collective."""
    exchange = Exchange(comm)

    def check() -> None:
        if (plan.latency is None or plan.bandwidth is None) and comm.size < 2:
            raise ConfigurationError("one rank has no links to measure; start 2 or more, or pass --latency and --bandwidth")
        for case in plan.cases:
            if _is_dense(case):
                DenseModel(case, source.sizes)
            else:
                _simulator(plan, source, case, 1)

    on_all(exchange, check)
    exchange.close()


def _is_dense(case: str) -> bool:
    return Case.parse(case).scheme == "dense"


def _by_node(case: str) -> bool:
    """Tell whether a case is one of nodes."""
    return str(Case.parse(case).values.get("hierarchy", FLAT)) != FLAT


@contextmanager
def _others_asleep(comm: MPI.Intracomm) -> Iterator[None]:
    """Make ranks that finish first wait for the others without using a core; collective."""
    yield
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(NAP)


# Real ranks


def _steps(part: MPI.Intracomm, source: Source, scheme: str, plan: ScalingPlan) -> list[Stats]:
    """Run steps and return their statistics; `seconds` is the time from a common start until this rank is done.

    The backward counts where there is one that takes time, or that buckets overlap with.
    """
    model = GivenModel.of(source, part.rank)
    case = Case.parse(scheme)
    density = {} if case.scheme == "dense" else {"density": plan.density}
    sync = mpisparse.GradientSync(model, scheme=case.scheme, comm=part, **{**density, **case.values})
    model.nap, notes = plan.backward, []
    whole = model.nap > 0 or sync.overlaps
    for _ in range(plan.steps):
        model.zero_grad()
        if not whole:
            model.backward()
        part.Barrier()
        start = time.perf_counter()
        if whole:
            model.backward()
        held = [p.grad for p in model.layers]
        sync.step()
        notes.append(replace(sync.stats, seconds={"step": time.perf_counter() - start}))
        held.clear()
    sync.close()
    return notes


def _median(call: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> float:
    """Return the median seconds of several calls, after two warm-up calls."""
    seconds = []
    for turn in range(2 + TRIES):
        before()
        start = time.perf_counter()
        call()
        if turn >= 2:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _links(part: MPI.Intracomm, elements: int) -> tuple[float, float]:
    """Measure bytes per second of large all-gathers, and of an all-reduce of `elements` float32; collective."""
    if part.size == 1:
        return 1e12, 1e12
    times = []
    for nbytes in (SMALL, LARGE):
        row, rows = np.zeros(nbytes, np.uint8), np.zeros(nbytes * part.size, np.uint8)
        times.append(part.allreduce(_median(lambda a=row, b=rows: part.Allgather(a, b), part.Barrier), MPI.MAX))  # type: ignore[misc]
    values, sums = np.ones(elements, np.float32), np.zeros(elements, np.float32)
    reduced = part.allreduce(_median(lambda: part.Allreduce(values, sums), part.Barrier), MPI.MAX)
    moved = 2 * values.nbytes * (part.size - 1) / part.size
    return (part.size - 1) * LARGE / max(times[1] - times[0], 1e-9), moved / reduced


def _cores(comm: MPI.Intracomm) -> int:
    """Return the cores of all hosts together, assuming equal hosts; collective."""
    local = MPI.Intracomm(comm.Split_type(MPI.COMM_TYPE_SHARED))
    hosts: int = comm.allreduce(int(local.rank == 0))
    local.Free()
    return hosts * (os.cpu_count() or 1)


def _handling(comm: MPI.Intracomm) -> float:
    """Measure on rank 0 the seconds per byte of adding received values; collective."""
    values, more = np.ones((2, LARGE // 4), np.float32)
    return float(comm.bcast(_median(lambda: np.add(values, more, out=values)) / LARGE))


def _computing(comm: MPI.Intracomm, source: Source, scheme: str, plan: ScalingPlan) -> float:
    """Measure a step of a single rank with every core busy, less the decisions that the simulator times; collective."""
    seconds = 0.0
    with _others_asleep(comm):
        if comm.rank < (os.cpu_count() or 1):
            seconds = _typical([_steps(MPI.COMM_SELF, source, scheme, replace(plan, backward=0.0))])
            steps = _simulate(plan, source, scheme, 1)[FIRST:]
            seconds -= statistics.median(s.work + s.alone for s in steps) if steps else 0.0
    return float(comm.allreduce(seconds, MPI.MAX))


def _typical(stats: list[list[Stats]]) -> float:
    """Return the median over steps of the slowest rank's seconds, without the first steps."""
    steps = list(zip(*stats, strict=True))[FIRST:]
    return float(statistics.median(max(rank.seconds["step"] for rank in step) for step in steps))


class Calibration:
    """Measures latency by steps of exdyna on very few elements: what they take beyond computation is rounds of messages.

    Rank 0 evaluates them after all measurements, while the other ranks sleep.
    """

    SCHEME = "exdyna"

    def __init__(self, plan: ScalingPlan, source: Source, comm: MPI.Intracomm) -> None:
        self.plan = plan
        self.source = source
        self.computing = _computing(comm, source, self.SCHEME, plan)
        self.seconds: dict[int, float] = {}

    def measure(self, part: MPI.Intracomm) -> None:
        """Time steps on the ranks of `part`; collective."""
        self.seconds[part.size] = _typical(part.allgather(_steps(part, self.source, self.SCHEME, self.plan)))

    def calibrate(self, machine: Machine) -> None:
        """Set the machine's latencies in seconds per round of messages."""
        for size, seconds in self.seconds.items():
            steps = _simulate(self.plan, self.source, self.SCHEME, size)[FIRST:]
            rounds = statistics.median(sum(message.rounds() for message in s.log.messages) for s in steps)
            known = statistics.median(machine.busy(size) * (self.computing + s.work) + machine.moving(s.log) for s in steps)
            machine.latency[size] = max((seconds - known) / rounds, SHORTEST) if size > 1 else SHORTEST


# Simulated workers


def _real(
    plan: ScalingPlan,
    source: Source,
    machine: Machine,
    nodes: Nodes | None,
    computing: dict[str, float],
    key: tuple[str, int],
    stats: list[list[Stats]],
) -> dict[str, Any]:  # fmt: skip
    """Make the record of real steps, compared with the same steps simulated: equal selection, and error of modelled time."""
    scheme, size = key
    seconds = _typical(stats)
    first = stats[0]
    record = {
        "ranks": size, "scheme": scheme, "how": "real",
        "density": statistics.mean(s.density for s in first[FIRST:]),
        "worst_density": max(abs(s.build_up - 1) for s in first[FIRST:]),
        "build_up": statistics.mean(s.build_up for s in first[FIRST:]),
        "imbalance": statistics.mean(s.imbalance for s in first[FIRST:]),
        "received_MB": statistics.mean(max(row[t].bytes_received for row in stats) for t in range(FIRST, plan.steps)) / 1e6,
        "ms": 1e3 * seconds,
    }  # fmt: skip
    same: bool | None  # None: it is not known what is the same
    if _is_dense(scheme):
        dense = DenseModel(scheme, source.sizes, plan.backward)
        modelled = dense.seconds(machine, size, computing[scheme], nodes)
        same = dense.log(size).received().tolist() == [row[-1].bytes_received for row in stats]
        same = None if dense.by_node and nodes is not None else same
    else:
        steps = _simulate(plan, source, scheme, size)
        modelled = statistics.median(machine.seconds(s.log, computing[scheme] + s.work, s.alone) for s in steps[FIRST:])
        modelled += plan.backward
        same = all(_equal(s, [row[t] for row in stats]) for t, s in enumerate(steps))
        same = None if Case.parse(scheme).values.get("codec", "fp32") != "fp32" else same
    told = {} if same is None else {"same": "yes" if same else "NO"}
    return {**record, "modelled_ms": 1e3 * modelled, "error": modelled / seconds - 1, **told}


def _simulator(plan: ScalingPlan, source: Source, scheme: str, size: int) -> Simulator | None:
    """Create the simulator of a case; None for dense, which selects nothing."""
    case = Case.parse(scheme)
    options = {"density": plan.density, **case.values}
    return None if case.scheme == "dense" else simulator(case.scheme, source, size, **options)


def _simulate(plan: ScalingPlan, source: Source, scheme: str, size: int) -> list[Simulated]:
    virtual = _simulator(plan, source, scheme, size)
    return [] if virtual is None else [virtual.step() for _ in range(plan.steps)]


def _equal(simulated: Simulated, real: list[Stats]) -> bool:
    """Tell whether a simulated step selected what the real one did, and moved the same bytes on every rank."""
    chosen = {(s.selected, s.threshold, s.borders, s.workloads) for s in real}
    workloads = tuple(int(simulated.workloads[r.rank]) for r in simulated.regions)
    moved = [(s.bytes_sent, s.bytes_received) for s in real]
    counted = list(zip(simulated.log.sent().tolist(), simulated.log.received().tolist(), strict=True))
    return chosen == {(len(simulated.union), simulated.threshold, simulated.borders, workloads)} and moved == counted


def _cluster(plan: ScalingPlan, machine: Machine) -> Machine:
    """Return the machine of the virtual workers: a dedicated core each, links as given or as measured with two ranks."""
    latency = plan.latency if plan.latency is not None else machine.latency[2]
    bandwidth = plan.bandwidth if plan.bandwidth is not None else machine.bandwidth[2]
    reducing = plan.bandwidth if plan.bandwidth is not None else machine.reducing[2]
    return Machine({2: latency}, {2: bandwidth}, {2: reducing}, handling=machine.handling)


def _virtual_nodes(plan: ScalingPlan, cluster: Machine, nodes: Nodes | None) -> Nodes | None:
    """Return what nodes of virtual workers take: their ranks share the link of a host, all places side by side."""
    ranks = plan.ranks_a_node
    if ranks == 1:
        return None
    shared = replace(cluster, bandwidth={2: cluster.bandwidth[2] / ranks}, reducing={2: cluster.reducing[2] / ranks})
    inside = 8 * cluster.handling if nodes is None else nodes.inside  # bytes of an element that are added, and copied
    return Nodes(ranks, shared, inside)


def _sharing(cluster: Machine, size: int, ranks: int) -> Machine:
    """Return the machine of so many ranks of which some share the link of a host; what stays in the host takes no time."""
    if ranks == 1 or size <= ranks:
        return cluster
    share = (size - 1) / (size - ranks) / ranks
    return replace(cluster, bandwidth={2: share * cluster.bandwidth[2]}, reducing={2: share * cluster.reducing[2]})


def _virtual(
    plan: ScalingPlan, source: Source, cluster: Machine, nodes: Nodes | None, computing: dict[str, float]
) -> list[dict[str, Any]]:
    """Make records of virtual workers; for schemes without exclusive partitions only while all workers' gradients differ."""
    records = []
    for size in plan.workers:
        machine = _sharing(cluster, size, plan.ranks_a_node)
        for scheme in plan.cases:
            if _is_dense(scheme):
                dense = DenseModel(scheme, source.sizes, plan.backward)
                seconds = dense.seconds(machine, size, computing[scheme], nodes)
                records.append(_modelled(size, scheme, [dense.log(size)], seconds))
            elif scheme.startswith("exdyna") or size <= source.ranks * source.steps:
                steps = _simulate(plan, source, scheme, size)[FIRST:]
                times = [machine.seconds(s.log, computing[scheme] + s.work, s.alone) for s in steps]
                seconds = plan.backward + statistics.median(times)
                ratios = [len(s.union) / s.k for s in steps]
                records.append({
                    **_modelled(size, scheme, [s.log for s in steps], seconds),
                    "density": statistics.mean(s.density for s in steps),
                    "worst_density": max(abs(ratio - 1) for ratio in ratios),
                    "build_up": statistics.mean(ratios),
                    "imbalance": statistics.mean(s.imbalance for s in steps),
                })  # fmt: skip
    return records


def _modelled(size: int, scheme: str, logs: list[Log], seconds: float) -> dict[str, Any]:
    received = statistics.mean(int(log.received().max()) for log in logs) / 1e6
    return {"ranks": size, "scheme": scheme, "how": "simulated", "received_MB": received, "modelled_ms": 1e3 * seconds}


def _publish(plan: ScalingPlan, records: list[dict[str, Any]], machine: Machine, cluster: Machine, source: Source) -> None:
    elements = sum(source.sizes)
    for record in records:
        priced = (machine if record["how"] == "real" else cluster).record()
        record.update(elements=elements, set_density=plan.density, steps=plan.steps, **priced)
    if not plan.as_json:
        print(f"{elements:,} float32, density {plan.density:g}, {plan.steps} steps, statistics from the third on")
    show(records, COLUMNS, as_json=plan.as_json)
    if not plan.as_json:
        says, others = (", ".join(f"{key} {value:.4g}" for key, value in m.record().items()) for m in (machine, cluster))
        errors = [abs(r["error"]) for r in records if "error" in r and r["ranks"] > 1]
        print(f"machine: {says}, {machine.cores} cores")
        print(f"virtual workers: {others}, one core each")
        if errors:
            print(f"modelled times are off by {statistics.mean(errors):.0%} on average, {max(errors):.0%} at most")
        print(f"workers beyond {source.ranks} reuse gradients of other steps: {source.ranks * source.steps} workers differ")
    save("scaling", records, plan.out)
