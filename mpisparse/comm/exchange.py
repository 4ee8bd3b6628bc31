"""Collective communication between ranks, over any transport. Importing this starts no MPI; making an Exchange may.

All methods of Exchange are collective unless they say otherwise. A message longer than `segment_nbytes` travels in several
rounds, so that no count or displacement reaches MPI's limit of 2^31.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from threading import get_ident
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from mpisparse.arrays import Bytes, Ints
from mpisparse.comm import device_memory, pieces
from mpisparse.comm.place import Place
from mpisparse.comm.transport import BYTE, IN_PLACE, Transport, duplicate, local_rank
from mpisparse.errors import CollectiveError, ConfigurationError

__all__ = ["Exchange", "PollingExchange", "local_rank"]


class Gathering(NamedTuple):
    """An Allgather that has begun. `sent` and `rows` are MPI's until it is done."""

    request: Any
    sent: NDArray[Any]
    rows: NDArray[Any]


class Failed:
    """A nonblocking call that could not begin, because a rank has died; waiting for it fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        raise self.error

    Wait = Test


class GivenUpError(Exception):
    """Another rank has noticed a death and no longer waits for messages."""


IN_CACHE = 2 << 20  # bytes of a round of an all-reduce on one host that stays in cache and so takes a third of the time


class Exchange:
    """A private duplicate of a communicator with the collectives that a step needs. Counts the bytes they move.

    comm: an mpi4py communicator, a torch.distributed process group or a virtual worker's; None: all ranks of MPI.
    """

    def __init__(self, comm: Any = None, segment_nbytes: int = 1 << 30) -> None:
        self.comm: Transport = duplicate(comm)
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()
        self.began_with = self.size  # the number of ranks at the start; fewer may go on after a death
        self.segment_nbytes = segment_nbytes
        self.nbytes_sent = 0
        self.nbytes_received = 0
        self.collectives = 0
        self.nbytes_control = 0  # bytes received that are neither indices nor values
        self.cuda_aware = self.comm.cuda_aware
        self.virtual = self.comm.virtual
        self.device: Any = None  # the device whose memory MPI was given
        self._ops = self.comm.ops
        self.round_nbytes = IN_CACHE if self.comm.one_host else segment_nbytes
        self.place = Place()
        self.spot = self.place.spot()
        self.pid = os.getpid()
        self.spare = 0  # bytes of a roll call that a step may use; the same on all ranks and in all entry points
        self.gone = ""  # why roll calls are no longer answered: some rank has ended
        self.survival: Any = None  # mpisparse.comm.survival.Survival, if the others go on after a death
        self.norms: Ints = np.empty(0, dtype=np.int64)  # the norms of residuals that ranks last reported, as bits of float64

    @property
    def threaded(self) -> bool:
        """Tell whether several threads may exchange at the same time; local."""
        return self.comm.threaded

    def close(self) -> None:
        """Free the communicator, unless a rank has ended or may have died, which would not take part."""
        if self.is_open and not self.gone and self.survival is None:
            self.comm.Free()

    def adopt(self, comm: Transport) -> None:
        """Go on over a communicator of fewer ranks; local."""
        self.comm, self.rank, self.size = comm, comm.Get_rank(), comm.Get_size()

    @property
    def is_open(self) -> bool:
        """Tell whether messages can still be sent; local."""
        return self.comm.is_open

    def reset_counters(self) -> None:
        """Set the counters of bytes and of collectives to zero; local. With one rank they always are."""
        self.nbytes_sent = self.nbytes_received = self.nbytes_control = self.collectives = 0

    def allgather(self, row: NDArray[Any]) -> NDArray[Any]:
        """Gather one row from every rank, all of the same length; row r of the result is rank r's.

        Rows are control messages: counts, sizes, statuses.
        """
        rows = np.empty((self.size, len(row)), dtype=row.dtype)
        self._call("Allgather", [row, BYTE], [rows, BYTE])
        self._count_rows(row.nbytes)
        return rows

    def begin_allgather(self, row: NDArray[Any]) -> Gathering:
        """Begin to gather one row from every rank; local. A nonblocking call never matches a blocking one."""
        rows = np.empty((self.size, len(row)), dtype=row.dtype)
        comm: Any = self.comm
        try:
            request = comm.Iallgather([row, BYTE], [rows, BYTE])
        except Exception as error:
            if self.survival is None:
                raise
            request = Failed(error)
        return Gathering(request, row, rows)

    def gathered(self, gathering: Gathering) -> NDArray[Any]:
        """Wait for a gathering begun by this exchange or another one of this rank; its bytes are counted here."""
        self.collectives += self.size > 1
        self._wait_for("Allgather", gathering.request)
        self._count_rows(gathering.sent.nbytes)
        return gathering.rows

    def _count_rows(self, nbytes: int) -> None:
        moved = nbytes * (self.size - 1)
        self.nbytes_sent += moved
        self.nbytes_received += moved
        self.nbytes_control += moved

    def allreduce_(self, values: NDArray[Any], op: str = "sum") -> NDArray[Any]:
        """Reduce over ranks in place; `op` is "sum", "max" or "or" (bitwise)."""
        buffer = values if isinstance(values, np.ndarray) else self._outgoing(values)
        most = min(self.segment_nbytes, self.round_nbytes) if isinstance(buffer, np.ndarray) else self.segment_nbytes
        step = max(1, most // values.itemsize)
        for start in range(0, len(values), step):
            self._call("Allreduce", IN_PLACE, _view(buffer[start : start + step]), op=self._ops[op])
        self._count_reduction(values.nbytes)
        _arrived(buffer, values)
        return values

    def allreduce(self, source: NDArray[Any], result: NDArray[Any]) -> None:
        """Sum over ranks from one array into another."""
        step = max(1, self.segment_nbytes // source.itemsize)
        for start in range(0, len(source), step):
            part = self._outgoing(source[start : start + step])
            wanted = result[start : start + step]
            total = _landing(wanted, part)
            self._call("Allreduce", _view(part), _view(total), op=self._ops["sum"])
            _arrived(total, wanted)
        self._count_reduction(source.nbytes)

    def allgatherv(self, payload: Any, counts: Sequence[int], starts: Sequence[int], into: Any = None) -> Any:
        """Gather a payload of counts[r] bytes from every rank r; it starts at byte starts[r] of the result.

        into: memory for the result, on the payload's device.
        """
        total, mine = sum(counts), counts[self.rank]
        result = _fresh(total, payload) if into is None else into
        sent = self._outgoing(payload)
        gathered = _landing(result, sent)
        if total <= self.segment_nbytes:
            out, row = _view(sent), [_view(gathered), (counts, starts), BYTE]
            self._call("Allgatherv", out, row, longest=max(counts))
        else:
            self._allgatherv_in_rounds(sent, gathered, counts, starts)
        self.nbytes_sent += mine * (self.size - 1)
        self.nbytes_received += total - mine
        return _arrived(gathered, result)

    def _allgatherv_in_rounds(self, sent: Any, gathered: Any, counts: Sequence[int], starts: Sequence[int]) -> None:
        share = max(1, self.segment_nbytes // self.size)
        for done in range(0, max(counts), share):
            part = [min(max(count - done, 0), share) for count in counts]
            packed = _empty(sum(part), sent)
            row = [_view(packed), (part, _starts(part)), BYTE]
            self._call("Allgatherv", _view(sent[done : done + share]), row)
            _unpack(packed, part, gathered, [start + done for start in starts])

    def alltoallv(self, payload: Any, counts: Sequence[int], starts: Sequence[int], into: Any = None) -> Any:
        """Send `counts[q]` bytes, which start at byte `starts[q]` of the payload, to every rank q.

        `counts` is the same on all ranks. Returns size * counts[rank] bytes, in the order of the senders. into: memory for
        them, on the payload's device.
        """
        mine, size = counts[self.rank], self.size
        result = _fresh(mine * size, payload) if into is None else into
        sent = self._outgoing(payload)
        received = _landing(result, sent)
        if max(counts) <= max(1, self.segment_nbytes // size):
            rows = ([mine] * size, [r * mine for r in range(size)])
            out = [_view(sent), (counts, starts), BYTE]
            self._call("Alltoallv", out, [_view(received), rows, BYTE], longest=max(counts))
        else:
            self._alltoallv_in_rounds(sent, received, counts, starts)
        self.nbytes_sent += sum(counts) - mine
        self.nbytes_received += mine * (size - 1)
        return _arrived(received, result)

    def _alltoallv_in_rounds(self, sent: Any, received: Any, counts: Sequence[int], starts: Sequence[int]) -> None:
        share, mine = max(1, self.segment_nbytes // self.size), counts[self.rank]
        for done in range(0, max(counts), share):
            part = [min(max(count - done, 0), share) for count in counts]
            here = part[self.rank]
            joined, packed = _empty(sum(part), sent), _empty(here * self.size, sent)
            _pack(sent, part, joined, [start + done for start in starts])
            _wait_for(joined)
            rows = ([here] * self.size, [r * here for r in range(self.size)])
            out = [_view(joined), (part, _starts(part)), BYTE]
            self._call("Alltoallv", out, [_view(packed), rows, BYTE])
            _unpack(packed, [here] * self.size, received, [r * mine + done for r in range(self.size)])

    def route(self, payload: Bytes, table: Ints) -> Bytes:
        """Send `table[r][q]` bytes from every rank r to every rank q; `table` is the same on all ranks.

        The payload is in the order of the receivers, the result in the order of the senders.
        """
        sent, received = table[self.rank].tolist(), table[:, self.rank].tolist()
        share, longest = max(1, self.segment_nbytes // self.size), int(table.max())
        arrived = np.empty(sum(received), dtype=np.uint8)
        for done in range(0, longest, share):
            out, back = ([min(max(n - done, 0), share) for n in counts] for counts in (sent, received))
            starts = [min(start + done, len(payload)) for start in _starts(sent)]
            packed = arrived if longest <= share else np.empty(sum(back), dtype=np.uint8)
            into = [packed, (back, _starts(back)), BYTE]
            self._call("Alltoallv", [payload, (out, starts), BYTE], into, longest=min(longest, share))
            if packed is not arrived:
                _unpack(packed, back, arrived, [start + done for start in _starts(received)])
        mine = sent[self.rank]
        self.nbytes_sent += sum(sent) - mine
        self.nbytes_received += sum(received) - mine
        return arrived

    def broadcast_(self, data: Bytes, root: int = 0) -> None:
        """Overwrite bytes with the root's."""
        for start in range(0, len(data), self.segment_nbytes):
            self._call("Bcast", data[start : start + self.segment_nbytes], root=root)

    def gather_texts(self, text: str) -> list[str]:
        """Gather a text of any length from every rank."""
        payload = np.frombuffer(text.encode(), dtype=np.uint8)
        counts = self.allgather(np.array([len(payload)], dtype=np.int64))[:, 0].tolist()
        starts = _starts(counts)
        gathered = self.allgatherv(payload, counts, starts)
        return [gathered[s : s + n].tobytes().decode() for s, n in zip(starts, counts, strict=True)]

    def mean(self, value: float) -> float:
        """Average a number over ranks, summed in rank order."""
        gathered = self.allgather(np.array([value], dtype=np.float64).view(np.int64))
        return float(sum(gathered.view(np.float64)[:, 0].tolist()) / self.size)

    def raise_together(self, error: BaseException | None, kind: type[Exception] = ConfigurationError) -> None:
        """Raise a `kind` on every rank if any rank has an error; its text is that of the lowest such rank."""
        texts = self.gather_texts("" if error is None else str(error) or type(error).__name__)
        for rank, text in enumerate(texts):
            if text:
                agreed = kind(f"r{rank} | {text}")
                if isinstance(agreed, ConfigurationError):
                    agreed.repeated = self.rank != 0
                raise agreed from (error if rank == self.rank else None)

    def _call(self, name: str, *buffers: Any, longest: int = 0, **options: Any) -> None:
        """Make a collective call and wait until it is done; the watchdog sees it meanwhile.

        longest: bytes of the longest message, the same on all ranks; over TCP, long ones go in pieces.
        """
        self.collectives += self.size > 1
        if longest > pieces.PIECE and self.comm.over_tcp and self.device is None:
            self._wait_for(name, getattr(self.comm, f"I{name.lower()}")(*buffers))
            return
        self.spot.wait = name, time.monotonic(), get_ident()
        try:
            if self.device is None:
                getattr(self.comm, name)(*buffers, **options)
            else:
                with device_memory.current(self.device):
                    getattr(self.comm, name)(*buffers, **options)
        finally:
            self.spot.wait = None

    def _wait_for(self, name: str, request: Any) -> None:
        """Wait for a nonblocking call; the watchdog sees it meanwhile."""
        self.spot.wait = name, time.monotonic(), get_ident()
        try:
            request.Wait()
        except BaseException:
            _left.append(request)
            raise
        finally:
            self.spot.wait = None

    def polling(self) -> PollingExchange:
        """Make an exchange with its own communicator for a background thread."""
        other = PollingExchange(self.comm, self.segment_nbytes)
        other.share_place(self)
        return other

    def share_place(self, other: Exchange) -> None:
        """Let the watchdog of another exchange of this rank watch this one too; local."""
        self.place, self.spot = other.place, other.place.spot()

    def _outgoing(self, array: Any) -> Any:
        """The memory for MPI to read: the array itself once it is complete, or a host copy if MPI takes no device memory.

        Waits for the device, and so for earlier launches that may still use memory that was allocated before the call.
        """
        if isinstance(array, np.ndarray):
            return array
        if not self.cuda_aware:
            return device_memory.to_pinned(array)
        self.device = array.device
        device_memory.synchronize(array)
        return array

    def _count_reduction(self, nbytes: int) -> None:
        """Count the bytes of a bandwidth-optimal all-reduce; what MPI really moves depends on its algorithm."""
        moved = 2 * nbytes * (self.size - 1) // self.size
        self.nbytes_sent += moved
        self.nbytes_received += moved


class PollingExchange(Exchange):
    """Leaves the core to the computation while it waits: polls a nonblocking call and sleeps in between.

    Only one thread at a time may use it. It does not reduce in rounds, because each would end with a sleep. It stops waiting
    once `gone` says that some rank will not come.
    """

    SHORTEST, LONGEST = 5e-5, 4e-4  # seconds between polls; with 2 ms an exchange at 1 Gbit/s took a fifth longer

    def __init__(self, comm: Any = None, segment_nbytes: int = 1 << 30) -> None:
        super().__init__(comm, segment_nbytes)
        self.round_nbytes = segment_nbytes

    def _call(self, name: str, *buffers: Any, longest: int = 0, **options: Any) -> None:
        self.collectives += self.size > 1
        with contextlib.nullcontext() if self.device is None else device_memory.current(self.device):
            self._wait_for(name, getattr(self.comm, f"I{name.lower()}")(*buffers, **options))

    def _wait_for(self, name: str, request: Any) -> None:
        pause, comm = self.SHORTEST, cast(Any, self.comm)
        self.spot.wait = name, time.monotonic(), get_ident()
        try:
            while not request.Test():
                if self.gone:
                    raise CollectiveError(f"r{self.rank} | {self.gone}")
                if self.survival is not None and comm.Is_revoked():
                    raise GivenUpError(f"r{self.rank} | a rank has died, and this one waited in {name}")
                time.sleep(pause)
                pause = min(1.5 * pause, self.LONGEST)
        except BaseException:
            _left.append(request)
            raise
        finally:
            self.spot.wait = None


_left: list[Any] = []  # abandoned requests, which keep alive the memory that MPI may still use


def _view(array: Any) -> Any:
    """The buffer to hand to mpi4py."""
    return array if isinstance(array, np.ndarray) else device_memory.mpi_view(array)


def _wait_for(array: Any) -> None:
    """Wait for the launches that write an array."""
    if not isinstance(array, np.ndarray):
        device_memory.synchronize(array)


def _empty(count: int, like: Any) -> Any:
    """Allocate `count` elements of the same type on the same device, for MPI to write to at once."""
    return np.empty(count, dtype=like.dtype) if isinstance(like, np.ndarray) else device_memory.empty_for_mpi(count, like)


def _fresh(count: int, like: Any) -> Any:
    """Allocate `count` elements of the same type on the same device, in memory that earlier launches may still use."""
    return np.empty(count, dtype=like.dtype) if isinstance(like, np.ndarray) else like.new_empty(count)


def _landing(wanted: Any, sent: Any) -> Any:
    """The memory for MPI to write what belongs in `wanted`: `wanted` itself, or pinned memory if messages are staged."""
    staged = isinstance(sent, np.ndarray) and not isinstance(wanted, np.ndarray)
    return device_memory.empty_pinned(len(wanted), wanted) if staged else wanted


def _arrived(landed: Any, wanted: Any) -> Any:
    """Copy what MPI wrote to `wanted`, if it is not there already."""
    if isinstance(landed, np.ndarray) and not isinstance(wanted, np.ndarray):
        device_memory.from_pinned(landed, wanted)
    return wanted


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(counts[:-1]).tolist()] if counts else []


def _unpack(packed: Bytes, counts: Sequence[int], target: Bytes, starts: Sequence[int]) -> None:
    for place, count, start in zip(_starts(counts), counts, starts, strict=True):
        target[start : start + count] = packed[place : place + count]


def _pack(source: Bytes, counts: Sequence[int], packed: Bytes, starts: Sequence[int]) -> None:
    for place, count, start in zip(_starts(counts), counts, starts, strict=True):
        packed[place : place + count] = source[start : start + count]
