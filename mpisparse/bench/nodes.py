"""bench nodes: steps between all ranks and by nodes, in turn: seconds, and the bytes that leave each host.

Bytes are those that the host's own network devices count, so they need hosts of their own, as bin/netlab makes them. The
first rank of each host reads them between barriers, which add some hundred bytes to a step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

import mpisparse
from mpisparse.bench.given import GivenModel
from mpisparse.bench.train import Case
from mpisparse.comm.transport import end_job_on_uncaught_exception
from mpisparse.errors import ConfigurationError
from mpisparse.plan.synthetic import Synthetic
from mpisparse.runtime.table import save, show

COLUMNS = {
    "case": "", "hierarchy": "", "ranks_a_node": "d", "ms": ".1f", "times_flat": ".2f", "inside_ms": ".1f",
    "link_MB": ".3f", "of_flat": ".3f", "node_MB": ".3f",
}  # fmt: skip
WARM_UP = 3
WAYS = ("flat", "node")
DEVICES = Path("/sys/class/net")


@dataclass(frozen=True)
class NodesPlan:
    """What to compare: cases as SCHEME:NAME=VALUE,..., on so many elements."""

    elements: int
    cases: list[str]
    steps: int
    as_json: bool = False
    out: Path | None = None


@dataclass
class Way:
    """A case with or without nodes. Where weights are exchanged, a step is that of an optimizer, which moves them."""

    model: GivenModel
    sync: mpisparse.GradientSync
    seconds: list[float] = field(default_factory=list)
    inside: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.exchange: Callable[[], Any] = self.sync.step
        if self.sync.options.of_weights:
            optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
            mpisparse.attach(optimizer, self.sync)
            self.exchange = optimizer.step

    def step(self, comm: MPI.Intracomm, first: bool) -> None:
        """Do one step, timed from a common start until the slowest rank is done; collective. first: of its host."""
        self.model.zero_grad()
        self.model.backward()
        comm.Barrier()
        before, start = sent_from_here() if first else 0, time.perf_counter()
        self.exchange()
        seconds = comm.allreduce(time.perf_counter() - start, MPI.MAX)
        self.sent.append(comm.allreduce(sent_from_here() - before if first else 0, MPI.MAX))
        self.seconds.append(seconds)
        self.inside.append(self.sync.stats.seconds.get("inside", 0.0))


def sent_from_here() -> int:
    """The bytes that have left this host."""
    devices = [device for device in DEVICES.glob("*") if device.name != "lo"]
    return sum(int((device / "statistics" / "tx_bytes").read_text()) for device in devices)


def run(plan: NodesPlan) -> int:
    """Measure and print on rank 0; collective."""
    end_job_on_uncaught_exception()
    comm = MPI.COMM_WORLD
    if plan.steps <= WARM_UP:
        raise ConfigurationError(f"--steps must be at least {WARM_UP + 1}: the first {WARM_UP} open connections")
    here = MPI.Intracomm(comm.Split_type(MPI.COMM_TYPE_SHARED))
    source = Synthetic(plan.elements, comm.size)
    model = GivenModel.of(source, comm.rank)
    records = [record for text in plan.cases for record in _compare(plan, comm, here.rank == 0, model, text)]
    here.Free()
    if comm.rank == 0:
        if not plan.as_json:
            print(f"{plan.elements:,} float32, {comm.size} ranks; medians of {plan.steps - WARM_UP} steps in turn")
        show(records, COLUMNS, as_json=plan.as_json)
        save("nodes", records, plan.out)
    return 0


def _compare(plan: NodesPlan, comm: MPI.Intracomm, first: bool, model: GivenModel, text: str) -> list[dict[str, Any]]:
    """Do steps of a case without and with nodes, in turn; collective."""
    case, ways = Case.parse(text), dict[str, Way]()
    for name in WAYS:
        twin = model.twin()
        ways[name] = Way(twin, mpisparse.GradientSync(twin, scheme=case.scheme, hierarchy=name, **case.values))
    if ways["node"].sync.ranks_a_node == 1 and comm.size > 1:
        raise ConfigurationError(
            "bench nodes needs hosts with the same number of ranks, at least 2 (bin/netlab --per-host 2)"
        )
    for _ in range(plan.steps):
        for way in ways.values():
            way.step(comm, first)
    records = [_record(text, name, way, ways["flat"], comm.size) for name, way in ways.items()]
    for way in ways.values():
        way.sync.close()
    return records


def _record(text: str, name: str, way: Way, flat: Way, ranks: int) -> dict[str, Any]:
    """Summarise the steps after the first ones; ratios are medians over pairs of steps."""
    pairs = zip(flat.seconds[WARM_UP:], way.seconds[WARM_UP:], strict=True)
    sent, of_flat = statistics.mean(way.sent[WARM_UP:]), statistics.mean(flat.sent[WARM_UP:])
    return {
        "case": text, "hierarchy": name, "ranks": ranks, "ranks_a_node": way.sync.ranks_a_node,
        "ms": 1e3 * statistics.median(way.seconds[WARM_UP:]), "times_flat": statistics.median(a / b for a, b in pairs),
        "inside_ms": 1e3 * statistics.median(way.inside[WARM_UP:]), "link_MB": sent / 1e6,
        "node_MB": way.sync.stats.node_bytes / 1e6, **({"of_flat": sent / of_flat} if of_flat else {}),
    }  # fmt: skip
