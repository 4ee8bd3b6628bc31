"""Cost model of communication: a log of collective calls, and a machine that turns it into seconds. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from mpisparse.arrays import Ints


@dataclass(frozen=True)
class Message:
    """One collective call: its kind, and the bytes that each rank contributes; for "route", a table from rank to rank."""

    kind: str
    nbytes: Ints

    def sent(self) -> Ints:
        """Return the bytes that each rank sends to others, counted as mpisparse.exchange counts them."""
        size = len(self.nbytes)
        if self.kind == "route":
            return np.asarray(self.nbytes.sum(axis=1) - self.nbytes.diagonal())
        if self.kind == "alltoallv":  # nbytes[r] is what every rank sends to rank r
            return np.asarray(self.nbytes.sum() - self.nbytes)
        return self._reduced() if self.kind == "allreduce" else self.nbytes * (size - 1)

    def received(self) -> Ints:
        """Return the bytes that each rank receives from others."""
        if self.kind == "route":
            return np.asarray(self.nbytes.sum(axis=0) - self.nbytes.diagonal())
        if self.kind == "alltoallv":
            return self.nbytes * (len(self.nbytes) - 1)
        return self._reduced() if self.kind == "allreduce" else np.asarray(self.nbytes.sum() - self.nbytes)

    def rounds(self) -> int:
        """Return the number of rounds in a tree, after each of which ranks wait for each other."""
        return math.ceil(math.log2(len(self.nbytes))) * (2 if self.kind == "allreduce" else 1)

    def _reduced(self) -> Ints:
        return 2 * self.nbytes * (len(self.nbytes) - 1) // len(self.nbytes)


@dataclass
class Log:
    """The messages of one step among `size` ranks."""

    size: int
    messages: list[Message] = field(default_factory=list)

    def add(self, kind: str, nbytes: int | Sequence[int]) -> None:
        """Add a message; a single number holds for all ranks."""
        self.messages.append(Message(kind, np.broadcast_to(np.asarray(nbytes, dtype=np.int64), (self.size,))))

    def add_reduction(self, nbytes: Sequence[int]) -> None:
        """Add a reduction at owners: nbytes[r] from every rank to rank r, and as many from there to every rank."""
        self.add("alltoallv", nbytes)
        self.add("allgatherv", nbytes)

    def add_route(self, table: Ints) -> None:
        """Add a message of table[r][q] bytes from every rank r to every rank q."""
        self.messages.append(Message("route", table))

    def sent(self) -> Ints:
        """Return the bytes sent by each rank."""
        return np.asarray(np.sum([message.sent() for message in self.messages], axis=0))

    def received(self) -> Ints:
        """Return the bytes received by each rank."""
        return np.asarray(np.sum([message.received() for message in self.messages], axis=0))


@dataclass(frozen=True)
class Machine:
    """Communication parameters by number of ranks; other numbers are interpolated, see between().

    latency: seconds per round of messages, including the work around it. bandwidth: bytes per second through the link of
    the busiest rank. reducing: the same for reductions. handling: seconds to merge or add one received byte. cores: shared
    by all ranks; None if each rank has its own. Messages to many partners count as the rounds of a tree.
    """

    latency: dict[int, float]
    bandwidth: dict[int, float]
    reducing: dict[int, float]
    cores: int | None = None
    handling: float = 0.0

    def seconds(self, log: Log, computing: float, alone: float = 0.0) -> float:
        """Predict the duration of a step with these messages.

        computing: compute time per rank with a dedicated core. alone: further seconds in which only one rank computes.
        """
        rounds = sum(message.rounds() for message in log.messages)
        waiting = rounds * between(self.latency, log.size) if log.size > 1 else 0.0
        return self.busy(log.size) * computing + alone + self.moving(log) + waiting

    def busy(self, size: int) -> float:
        """Return the number of ranks per core, at least 1."""
        return max(1.0, size / self.cores) if self.cores else 1.0

    def moving(self, log: Log) -> float:
        """Return the seconds that transferring a step's bytes and processing the received ones take."""
        total = 0.0
        for message in log.messages if log.size > 1 else []:
            added = message.kind == "allreduce"
            received = int(message.received().max())
            total += max(int(message.sent().max()), received) / between(self.reducing if added else self.bandwidth, log.size)
            total += 0.0 if added else self.busy(log.size) * self.handling * received
        return total

    def record(self) -> dict[str, Any]:
        """Return the parameters as plain numbers, for the largest number of ranks."""
        most = max(self.latency)
        return {
            "latency_us": 1e6 * self.latency[most],
            "bandwidth_MB_s": self.bandwidth[most] / 1e6,
            "reducing_MB_s": self.reducing[most] / 1e6,
            "handling_ns_byte": 1e9 * self.handling,
        }


@dataclass(frozen=True)
class Nodes:
    """How nodes of so many ranks exchange: the machine of the ranks of the same place, all places side by side.

    inside: seconds per element of the vector for the sums in a node and their gathering.
    """

    ranks: int
    machine: Machine
    inside: float

    def seconds(self, log: Log, elements: int, computing: float, alone: float = 0.0) -> float:
        """Predict the duration of a step whose nodes exchange these messages of a shard."""
        return self.machine.seconds(log, computing, alone) + self.inside * elements


def overlapped(ready: Sequence[float], wires: Sequence[float], computing: float) -> float:
    """Predict when backward is done and all buckets have arrived, which travel one after the other.

    ready: when the gradients of each are there; wires: what each takes by itself; computing: the whole backward.
    """
    arrived = 0.0
    for at, wire in zip(ready, wires, strict=True):
        arrived = max(arrived, at) + wire
    return max(arrived, computing)


def between(known: dict[int, float], size: int) -> float:
    """Interpolate a value for a number of ranks, linearly in logarithms; outside the known range take the nearest."""
    sizes = sorted(known)
    if size <= sizes[0] or size >= sizes[-1]:
        return known[sizes[0] if size <= sizes[0] else sizes[-1]]
    low, high = next((a, b) for a, b in pairwise(sizes) if a <= size <= b)
    share = math.log(size / low) / math.log(high / low)
    return math.exp((1 - share) * math.log(known[low]) + share * math.log(known[high]))
