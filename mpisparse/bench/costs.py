"""What messages weigh and what they take: a log of collective messages, and a machine that prices it. Pure."""

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
    """One collective call: its kind, and the bytes that each rank puts in; of a "route", a table from rank to rank."""

    kind: str
    nbytes: Ints

    def sent(self) -> Ints:
        """Bytes that each rank sends to others, by the rules of `mpisparse.exchange`."""
        size = len(self.nbytes)
        if self.kind == "route":
            return np.asarray(self.nbytes.sum(axis=1) - self.nbytes.diagonal())
        if self.kind == "alltoallv":  # nbytes are what every rank sends to rank r
            return np.asarray(self.nbytes.sum() - self.nbytes)
        return self._reduced() if self.kind == "allreduce" else self.nbytes * (size - 1)

    def received(self) -> Ints:
        """Bytes that each rank receives from others."""
        if self.kind == "route":
            return np.asarray(self.nbytes.sum(axis=0) - self.nbytes.diagonal())
        if self.kind == "alltoallv":
            return self.nbytes * (len(self.nbytes) - 1)
        return self._reduced() if self.kind == "allreduce" else np.asarray(self.nbytes.sum() - self.nbytes)

    def rounds(self) -> int:
        """How often ranks wait for each other, in a tree."""
        return math.ceil(math.log2(len(self.nbytes))) * (2 if self.kind == "allreduce" else 1)

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

    def add_route(self, table: Ints) -> None:
        """Note a message of table[r][q] bytes from every rank r to every rank q."""
        self.messages.append(Message("route", table))

    def sent(self) -> Ints:
        """Bytes sent by each rank."""
        return np.asarray(np.sum([message.sent() for message in self.messages], axis=0))

    def received(self) -> Ints:
        """Bytes received by each rank."""
        return np.asarray(np.sum([message.received() for message in self.messages], axis=0))


@dataclass(frozen=True)
class Machine:
    """What messages take, by the number of ranks: in logarithms between those given, as with the nearest beyond them.

    latency: seconds of a round of messages, with what ranks do around it. bandwidth: bytes a second through the busiest
    rank's link; reducing: the same where they are added up on the way. handling: seconds to merge or add a byte that came.
    cores: shared by the ranks; None where each has one. Messages to many partners count as the rounds of a tree.
    """

    latency: dict[int, float]
    bandwidth: dict[int, float]
    reducing: dict[int, float]
    cores: int | None = None
    handling: float = 0.0

    def seconds(self, log: Log, computing: float, alone: float = 0.0) -> float:
        """A step of these messages in which each rank computes so long, had it a core of its own, and one alone longer."""
        rounds = sum(message.rounds() for message in log.messages)
        waiting = rounds * between(self.latency, log.size) if log.size > 1 else 0.0
        return self.busy(log.size) * computing + alone + self.moving(log) + waiting

    def busy(self, size: int) -> float:
        """How many ranks share a core."""
        return max(1.0, size / self.cores) if self.cores else 1.0

    def moving(self, log: Log) -> float:
        """Seconds in which the bytes of a step are moved, and handled where they came."""
        total = 0.0
        for message in log.messages if log.size > 1 else []:
            added = message.kind == "allreduce"
            received = int(message.received().max())
            total += max(int(message.sent().max()), received) / between(self.reducing if added else self.bandwidth, log.size)
            total += 0.0 if added else self.busy(log.size) * self.handling * received
        return total

    def record(self) -> dict[str, Any]:
        """The parameters as plain numbers, those of the most ranks where they differ."""
        most = max(self.latency)
        return {
            "latency_us": 1e6 * self.latency[most],
            "bandwidth_MB_s": self.bandwidth[most] / 1e6,
            "reducing_MB_s": self.reducing[most] / 1e6,
            "handling_ns_byte": 1e9 * self.handling,
        }


def between(known: dict[int, float], size: int) -> float:
    """A value for a rank count from those known for others: interpolated in logarithms, the nearest one beyond them."""
    sizes = sorted(known)
    if size <= sizes[0] or size >= sizes[-1]:
        return known[sizes[0] if size <= sizes[0] else sizes[-1]]
    low, high = next((a, b) for a, b in pairwise(sizes) if a <= size <= b)
    share = math.log(size / low) / math.log(high / low)
    return math.exp((1 - share) * math.log(known[low]) + share * math.log(known[high]))
