"""Exchanges between hosts over TCP, as many short messages.

There, MPI sends a long message only once its receiver has answered, and the answer waits in line behind what the
receiver is sending itself. So two ranks that begin a little apart may send one after the other instead of both at once,
which takes twice the time, and more among many. A short message sets out without an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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


class Sum:
    """A sum over ranks in place, as one request: each rank adds up a part of the array, in rank order, for all."""

    def __init__(self, comm: Any, values: NDArray[Any]) -> None:
        self.comm, self.values = comm, values
        rank, size = comm.Get_rank(), comm.Get_size()
        bounds = [len(values) * place // size for place in range(size + 1)]
        self.own = values[bounds[rank] : bounds[rank + 1]]
        self.rows = np.empty((size, len(self.own)), dtype=values.dtype)
        starts = [bound * values.itemsize for bound in bounds]
        counts = [stop - start for start, stop in pairwise(starts)]
        mine = self.own.nbytes
        self.parts = Parts(values.view(np.uint8), counts, starts[:-1])
        rows = Parts(self.rows.reshape(-1).view(np.uint8), [mine] * size, [mine * place for place in range(size)])
        self.underway = begin(comm, self.parts, rows)
        self.summed = False

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        """Tell whether the sum is there; local."""
        if not self.underway.Test():
            return False
        if self.summed:
            return True
        self._add()
        return self.underway.Test()

    def Wait(self) -> None:  # noqa: N802 - mpi4py's name
        """Wait for the sum."""
        self.underway.Wait()
        if not self.summed:
            self._add()
            self.underway.Wait()

    @np.errstate(over="ignore", invalid="ignore")
    def _add(self) -> None:
        """Add up the own part, and send it to all."""
        self.own[:] = self.rows[0]
        for row in self.rows[1:]:
            self.own += row
        size, own = len(self.rows), self.own.view(np.uint8)
        self.underway, self.summed = begin(self.comm, Parts(own, [len(own)] * size, [0] * size), self.parts), True


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
    except BaseException:
        _abandoned.append(messages)
        raise
    return messages


_abandoned: list[Messages] = []  # keep alive the memory that MPI may still use


def _cut(part: Bytes) -> Iterator[Bytes]:
    return (part[start : start + PIECE] for start in range(0, len(part), PIECE))
