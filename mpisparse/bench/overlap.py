"""bench overlap: scheme speculative with its exchange in flight, with a blocking exchange, and computation alone.

All three do forward, backward and the optimizer's update on batches of the same size, in interleaved blocks of steps. The
first step of a block does not count, because no exchange is in flight before it. Ratios compare blocks of the same round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI
from torch import nn
from torch.nn.functional import cross_entropy

import mpisparse
from mpisparse.runtime.table import show

WARM_UP, BLOCK = 1, 6
COLUMNS = {"what": "", "ms": ".1f", "times_computing": ".2f", "waited_ms": ".1f", "received_kB": ".0f", "density": ".4f"}


def run(batch: int, density: float, rounds: int, *, as_json: bool) -> int:
    """Measure and print on rank 0; collective."""
    comm = MPI.COMM_WORLD
    ways = {
        "computing alone": _Way(batch, None, density),
        "blocking exchange": _Way(batch, 0, density),
        "exchange in flight": _Way(batch, 1, density),
    }
    for turn in range(WARM_UP + rounds):
        for way in ways.values():
            seconds = way.block(comm.Barrier)
            if turn >= WARM_UP:
                way.seconds.append(statistics.median(seconds))
    alone = ways["computing alone"]
    records: list[dict[str, Any]] = [{"what": name, **way.record(alone)} for name, way in ways.items()]
    for record in records:
        record.update(ranks=comm.size, batch=batch, set_density=density, rounds=rounds)
    if comm.rank == 0:
        if not as_json:
            print(f"{alone.parameters:,} parameters, {comm.size} ranks; medians of {rounds} rounds")
        show(records, COLUMNS, as_json=as_json)
    for way in ways.values():
        way.close()
    return 0


class _Way:
    """One contender: its own model and optimizer. With staleness None it exchanges nothing."""

    def __init__(self, batch: int, staleness: int | None, density: float) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Conv2d(3, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 96, 3, padding=1), nn.ReLU(),
            nn.Conv2d(96, 96, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(1536, 10),
        )  # fmt: skip
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.sync: mpisparse.GradientSync | None = None
        if staleness is not None:
            self.sync = mpisparse.GradientSync(
                self.model, scheme="speculative", staleness=staleness, density=density, granularity="fine"
            )
            mpisparse.attach(self.optimizer, self.sync)
        self.inputs, self.targets = torch.randn(batch, 3, 16, 16), torch.randint(10, (batch,))
        self.seconds: list[float] = []
        self.waited: list[float] = []
        self.received: list[float] = []
        self.densities: list[float] = []

    def block(self, barrier: Callable[[], None]) -> list[float]:
        """Train a block of steps; returns the seconds of all but the first. Collective."""
        barrier()
        times = []
        for _ in range(BLOCK):
            start = time.perf_counter()
            self.optimizer.zero_grad()
            cross_entropy(self.model(self.inputs), self.targets).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            times.append(time.perf_counter() - start)
            if self.sync is not None:
                stats = self.sync.stats
                self.waited.append(stats.seconds["wait"] + stats.seconds.get("reduce", 0.0))
                self.received.append(stats.bytes_received)
                self.densities.append(stats.density)
        if self.sync is not None:
            self.sync.synchronize()
        return times[1:]

    def record(self, alone: _Way) -> dict[str, float]:
        """Summarize: times are medians over the rounds, waiting and bytes medians over all steps."""
        ratios = [mine / other for mine, other in zip(self.seconds, alone.seconds, strict=True)]
        record = {"ms": 1e3 * statistics.median(self.seconds), "times_computing": statistics.median(ratios)}
        if self.sync is not None:
            record["waited_ms"] = 1e3 * statistics.median(self.waited)
            record["received_kB"] = statistics.median(self.received) / 1e3
            record["density"] = statistics.median(self.densities)
        return record

    def close(self) -> None:
        if self.sync is not None:
            self.sync.close()
