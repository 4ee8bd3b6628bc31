"""What messages weigh and what they take: a log of collective messages, and a machine that prices it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Message:
    """One collective call: its kind, and the bytes that each rank puts in."""

    kind: str
    nbytes: Ints

    def sent(self) -> Ints:
        """Bytes that each rank sends to others, by the rules of `mpisparse.exchange`."""
        size = len(self.nbytes)
        if self.kind == "alltoallv":  # nbytes are what every rank sends to rank r
            return np.asarray(self.nbytes.sum() - self.nbytes)
        return self._reduced() if self.kind == "allreduce" else self.nbytes * (size - 1)

    def received(self) -> Ints:
        """Bytes that each rank receives from others."""
        if self.kind == "alltoallv":
            return self.nbytes * (len(self.nbytes) - 1)
        return self._reduced() if self.kind == "allreduce" else np.asarray(self.nbytes.sum() - self.nbytes)

    def _reduced(self) -> Ints:
        return 2 * self.nbytes * (len(self.nbytes) - 1) // len(self.nbytes)


@dataclass
class Log:
    """The messages of one step, among so many ranks."""

    size: int
    messages: list[Message] = field(default_factory=list)

    def add(self, kind: str, nbytes: int | Sequence[int]) -> None:
        """Note a message; one number is the same for all ranks."""
        self.messages.append(Message(kind, np.broadcast_to(np.asarray(nbytes, dtype=np.int64), (self.size,))))

    def sent(self) -> Ints:
        """Bytes sent by each rank."""
        return np.asarray(np.sum([message.sent() for message in self.messages], axis=0))

    def received(self) -> Ints:
        """Bytes received by each rank."""
        return np.asarray(np.sum([message.received() for message in self.messages], axis=0))


@dataclass(frozen=True)
class Machine:
    """What a cluster takes: latencies in seconds by rank count, bandwidth in bytes a second and rank, and computation.

    latency: of one round of messages, by the number of ranks; between those given it is interpolated in the logarithm, and
    beyond them stays what it is for the largest. overhead: seconds of a step without elements and messages.
    per_element: seconds to accumulate one. cores: shared by the ranks; None where each rank has its own.
    """

    latency: dict[int, float]
    bandwidth: dict[int, float]
    overhead: float
    per_element: float
    cores: int | None = None

    def seconds(self, log: Log, elements: int, work: float) -> float:
        """A step of these messages in which each rank accumulates so many elements and computes `work` seconds more."""
        busy = max(1.0, log.size / self.cores) if self.cores else 1.0
        compute = busy * (self.overhead + self.per_element * elements + work)
        return compute + sum(self.message_seconds(message) for message in log.messages)

    def message_seconds(self, message: Message) -> float:
        """Rounds of latency, and the bytes through the busiest rank's link."""
        size = len(message.nbytes)
        if size == 1:
            return 0.0
        rounds = math.ceil(math.log2(size)) * (2 if message.kind == "allreduce" else 1)
        moved = max(int(message.sent().max()), int(message.received().max()))
        return rounds * between(self.latency, size) + moved / between(self.bandwidth, size)

    def record(self) -> dict[str, Any]:
        """The parameters as plain numbers, those of the most ranks where they differ."""
        most = max(self.latency)
        return {
            "latency_us": 1e6 * self.latency[most],
            "bandwidth_MB_s": self.bandwidth[most] / 1e6,
            "overhead_ms": 1e3 * self.overhead,
            "ns_per_element": 1e9 * self.per_element,
        }


def between(known: dict[int, float], size: int) -> float:
    """A value for a rank count from those known for others: interpolated in logarithms, the nearest one beyond them."""
    sizes = sorted(known)
    if size <= sizes[0] or size >= sizes[-1]:
        return known[sizes[0] if size <= sizes[0] else sizes[-1]]
    low, high = next((a, b) for a, b in pairwise(sizes) if a <= size <= b)
    share = math.log(size / low) / math.log(high / low)
    return math.exp((1 - share) * math.log(known[low]) + share * math.log(known[high]))
