"""bench sync: one step of the exchange against dense all-reduce, interleaved in the same run.

Only step() is timed, after a real backward. The gradients stay alive until the clock has stopped: with any exchange torch
frees them in zero_grad(), so this is charged to none. A scheme that moves weights itself (speculative) has no step() to
call; there the step of a plain SGD with the scheme attached is timed, updates included.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

import mpisparse
from mpisparse.bench.given import GivenModel
from mpisparse.comm.agreement import on_all
from mpisparse.comm.exchange import Exchange
from mpisparse.names import CODECS
from mpisparse.plan.synthetic import Source, Synthetic, worker_gradient
from mpisparse.runtime.recording import Recording
from mpisparse.runtime.table import save, show
from mpisparse.schemes import find_scheme

WARM_UP = 16  # until thresholds have settled, and borders stay where gradients let them
COLUMNS = {
    "what": "", "codec": "", "ms": ".2f", "times_faster": ".2f", "received_MB": ".3f", "bytes_per_element": ".2f",
    "density": ".6f", "sent_density": ".6f", "build_up": ".3f", "imbalance": ".3f",
}  # fmt: skip


@dataclass(frozen=True)
class SyncPlan:
    """Which schemes and accumulation paths to measure, on which gradients."""

    elements: int
    density: float
    schemes: list[str]
    codec: str | None
    rounds: int
    paths: list[str]
    gradients: Path | None = None
    gloo: bool = True
    as_json: bool = False
    out: Path | None = None


def run(plan: SyncPlan) -> int:
    """Measure every scheme on every path and print on rank 0; collective."""
    comm = MPI.COMM_WORLD
    source = open_source(comm, plan.gradients, plan.elements)
    elements = sum(source.sizes)
    peers = _dense_peers(comm, elements, gloo=plan.gloo)
    model = GivenModel.of(source, comm.rank)
    syncs = {
        f"{scheme}, {path}": _Path(scheme, path, model, plan.density, plan.codec)
        for scheme in plan.schemes
        for path in plan.paths
        if path == "step" or not find_scheme(scheme).of_weights
    }
    times: dict[str, list[float]] = {}
    for turn in range(WARM_UP + plan.rounds):
        for name, work in peers.items():
            seconds = timed(comm, work)
            if turn >= WARM_UP:
                times.setdefault(name, []).append(seconds)
        for name, path in syncs.items():
            path.backward()
            seconds = timed(comm, path.step)
            if turn >= WARM_UP:
                times.setdefault(name, []).append(seconds)
                path.note()
    if comm.rank == 0:
        _publish(plan, comm.size, elements, times, syncs)
    for path in syncs.values():
        path.sync.close()
    if plan.gloo and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


def _publish(plan: SyncPlan, ranks: int, elements: int, times: dict[str, list[float]], syncs: dict[str, _Path]) -> None:
    """Print the table or the records, and write them to `plan.out`."""
    records = [_record(name, seconds, times["MPI Allreduce"]) for name, seconds in times.items()]
    for path, record in zip(syncs.values(), records[len(records) - len(syncs) :], strict=True):
        record.update(path.summary())
    for record in records:
        record.update(elements=elements, ranks=ranks, set_density=plan.density, rounds=plan.rounds)
    if not plan.as_json:
        print(f"{elements:,} float32, {ranks} ranks, density {plan.density:g}; medians of {plan.rounds} rounds")
    show(records, COLUMNS, as_json=plan.as_json)
    if not plan.as_json:
        _explain(records, syncs)
    save("sync", records, plan.out)


def open_source(comm: MPI.Intracomm, path: Path | None, elements: int, ranks: int | None = None) -> Source:
    """Open recorded gradients, or synthetic ones without a path, and load those of this rank; collective.

    An error on one rank is raised on all.
    """
    exchange = Exchange(comm)

    def opened() -> Source:
        source: Source = Synthetic(elements, ranks or comm.size) if path is None else Recording(path)
        for step in range(source.steps):
            worker_gradient(source, comm.rank, step)
        return source

    source = on_all(exchange, opened)
    exchange.close()
    return source


def moves_weights(sync: mpisparse.GradientSync) -> bool:
    """Tell whether a scheme moves weights itself: it needs an attached optimizer and has no step() to call."""
    return bool(getattr(sync.options, "staleness", 0)) and not sync.options.of_weights


class _Path:
    """A scheme with one way to accumulate, on its own parameters and the common gradients.

    Where weights are exchanged, that is in every step, and the optimizer's step before it is not timed.
    """

    def __init__(self, scheme: str, path: str, source: GivenModel, density: float, codec: str | None) -> None:
        self.model = source.twin()
        blended = f"momentum-{codec}"
        self.codec = blended if scheme == "momentum" and blended in CODECS else codec
        share = None if find_scheme(scheme).density == 1.0 else density
        more = {"every": 1} if find_scheme(scheme).of_weights else {"accumulate": path}
        self.sync = mpisparse.GradientSync(self.model, scheme=scheme, density=share, codec=self.codec, **more)
        self.before: Callable[[], Any] = lambda: None
        if self.sync.options.of_weights:
            self.before = torch.optim.SGD(self.model.parameters(), lr=1e-3).step
        self.step: Callable[[], Any] = self.sync.step
        if moves_weights(self.sync):
            optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
            mpisparse.attach(optimizer, self.sync)
            self.step = optimizer.step
        self.held: list[torch.Tensor | None] = []
        self.notes: list[mpisparse.Stats] = []

    def backward(self) -> None:
        self.model.zero_grad()
        self.model.backward()
        self.before()
        self.held = [p.grad for p in self.model.layers]

    def note(self) -> None:
        self.held.clear()
        self.notes.append(self.sync.stats)

    def summary(self) -> dict[str, Any]:
        """Summarize: phases are medians over the rounds, the rest means, because bytes alternate with the partitions."""
        selected = statistics.mean(s.selected for s in self.notes)
        received = statistics.mean(s.bytes_received for s in self.notes)
        phases = {key: statistics.median(s.seconds[key] for s in self.notes) for key in self.notes[0].seconds}
        return {
            "codec": self.sync.options.codec,
            "received_MB": received / 1e6,
            "bytes_per_element": received / selected if selected else None,  # sidco may find nothing in small vectors
            "density": statistics.mean(s.density for s in self.notes),
            "sent_density": statistics.mean(s.sent_density for s in self.notes),
            "build_up": statistics.mean(s.build_up for s in self.notes),
            "imbalance": statistics.mean(s.imbalance for s in self.notes),
            "ms_by_phase": {key: round(1e3 * value, 3) for key, value in phases.items()},
        }


def _record(name: str, seconds: list[float], dense: list[float]) -> dict[str, Any]:
    ratios = [d / s for d, s in zip(dense, seconds, strict=True)]
    return {"what": name, "ms": 1e3 * statistics.median(seconds), "times_faster": statistics.median(ratios)}


def timed(comm: MPI.Intracomm, work: Callable[[], Any]) -> float:
    """Return the seconds from a common start until the slowest rank is done; collective."""
    comm.Barrier()
    start = time.perf_counter()
    work()
    return float(comm.allreduce(time.perf_counter() - start, op=MPI.MAX))


def _dense_peers(comm: MPI.Intracomm, elements: int, *, gloo: bool) -> dict[str, Callable[[], Any]]:
    """Return dense all-reduces of the same elements, and a plain in-place add of them: the minimum work of a step."""
    source = np.random.default_rng(comm.rank).standard_normal(elements, dtype=np.float32)
    target, zeros = np.zeros_like(source), np.zeros_like(source)

    def in_place() -> None:
        comm.Allreduce(MPI.IN_PLACE, target)

    peers: dict[str, Callable[[], Any]] = {
        "MPI Allreduce": lambda: comm.Allreduce(source, target),
        "MPI Allreduce, in place": in_place,
    }
    if gloo:
        reason = start_gloo(comm)
        if reason is None:
            tensor = torch.from_numpy(zeros)
            peers["gloo all-reduce"] = lambda: torch.distributed.all_reduce(tensor)
        elif comm.rank == 0:
            print(f"r0 | no gloo peer: {reason}", file=sys.stderr)
    peers["plain in-place add"] = lambda: np.add(target, zeros, out=target)
    return peers


def start_gloo(comm: MPI.Intracomm) -> str | None:
    """Create a gloo group of all ranks through rank 0's host; returns the error, the same on all ranks. Collective."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        return "this torch has no gloo"
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = comm.bcast(probe.getsockname()[1])
    host = comm.bcast(socket.gethostname() if os.environ.get("GLOO_SOCKET_IFNAME") else "127.0.0.1")
    if comm.Split_type(MPI.COMM_TYPE_SHARED).size < comm.size and host == "127.0.0.1":
        host = comm.bcast(socket.gethostname())
    error = None
    try:
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://{host}:{port}", rank=comm.rank, world_size=comm.size
        )
    except (RuntimeError, ValueError) as caught:
        error = str(caught).splitlines()[0]
    errors = [e for e in comm.allgather(error) if e]
    return errors[0] if errors else None


def _explain(records: list[dict[str, Any]], syncs: dict[str, _Path]) -> None:
    add = next(r["ms"] for r in records if r["what"] == "plain in-place add")
    for name, path in syncs.items():
        record = next(r for r in records if r["what"] == name)
        phases = ", ".join(f"{key} {value:.2f}" for key, value in path.summary()["ms_by_phase"].items())
        updates = " (with the optimizer's updates)" if moves_weights(path.sync) else ""
        print(f"{name}: {record['ms'] / add:.2f} times the plain in-place add{updates}; ms by phase: {phases}")
