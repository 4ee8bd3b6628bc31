"""Nonblocking exchanges between hosts, as many short messages.

Over TCP, MPI sends a long message only once its receiver has answered, and the answer waits in line behind what the
receiver is sending itself. So two ranks that begin a little apart may send one after the other instead of both at once,
which takes twice the time. A short message sets out without an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mpisparse.arrays import Bytes

PIECE = 48 << 10  # bytes, below Open MPI's limit for TCP, which is 64 KiB with headers
TAG = 1


class Parts(NamedTuple):
    """Bytes for each rank, or from each: counts[q] of them from starts[q] on."""

    data: Bytes
    counts: Sequence[int]
    starts: Sequence[int]

    def of(self, rank: int) -> Bytes:
        """The bytes of one rank."""
        return self.data[self.starts[rank] : self.starts[rank] + self.counts[rank]]


class Messages:
    """Messages underway, as one request."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        """Tell whether all have arrived; local."""
        while self.requests and self.requests[-1].Test():
            self.requests.pop()
        return not self.requests

    def Wait(self) -> None:  # noqa: N802 - mpi4py's name
        """Wait until all have arrived."""
        while self.requests:
            self.requests[-1].Wait()
            self.requests.pop()


def begin(comm: Any, sent: Parts, received: Parts) -> Messages:
    """Send every rank of an mpi4py communicator its part, and receive a part from each."""
    messages, rank, size = Messages(), comm.Get_rank(), comm.Get_size()
    received.of(rank)[:] = sent.of(rank)
    others = [(rank + distance) % size for distance in range(1, size)]
    try:
        for source in reversed(others):
            for piece in _cut(received.of(source)):
                messages.requests.append(comm.Irecv(piece, source, TAG))
        for target in others:
            for piece in _cut(sent.of(target)):
                messages.requests.append(comm.Isend(piece, target, TAG))
    except Exception:
        _abandoned.append(messages)
        raise
    return messages


_abandoned: list[Messages] = []  # keep alive the memory that MPI may still use


def _cut(part: Bytes) -> Iterator[Bytes]:
    return (part[start : start + PIECE] for start in range(0, len(part), PIECE))
