"""Messages between ranks: the only module that imports mpi4py, but for the benches, which time plain MPI.

Importing it starts MPI (mpi4py initialises on import of MPI), so the package imports it late. All methods of Exchange
are collective unless they say otherwise. A message larger than `segment_nbytes` travels in several rounds, so that no
count or displacement reaches MPI's 2^31.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpisparse.arrays import Bytes, Ints
from mpisparse.comm import device_memory
from mpisparse.comm.watchdog.place import Place
from mpisparse.errors import ConfigurationError, check_choice


class Exchange:
    """A private duplicate of a communicator, with the few patterns that a step needs and a count of their bytes."""

    def __init__(self, comm: Any = None, segment_nbytes: int = 1 << 30) -> None:
        self.comm: MPI.Intracomm = (MPI.COMM_WORLD if comm is None else comm).Dup()
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()
        self.segment_nbytes = segment_nbytes
        self.nbytes_sent = 0
        self.nbytes_received = 0
        self.cuda_aware = cuda_awareness().usable
        self.place = Place()
        self.spot = self.place.spot()

    @property
    def threaded(self) -> bool:
        """Tell whether MPI allows calls from one thread while another makes calls too."""
        return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)

    def close(self) -> None:
        """Give the communicator back."""
        if self.comm != MPI.COMM_NULL:
            self.comm.Free()

    def reset_counters(self) -> None:
        """Begin counting bytes anew; local."""
        self.nbytes_sent = self.nbytes_received = 0

    def allgather(self, row: NDArray[Any]) -> NDArray[Any]:
        """Gather one row of equal length from every rank; row r of the result is rank r's."""
        rows = np.empty((self.size, len(row)), dtype=row.dtype)
        self._call("Allgather", [row, MPI.BYTE], [rows, MPI.BYTE])
        self._count(row.nbytes * (self.size - 1), row.nbytes * (self.size - 1))
        return rows

    def allreduce_(self, values: NDArray[Any], op: str = "sum") -> NDArray[Any]:
        """Sum (or take the maximum, or the bitwise or) over ranks in place, in segments."""
        buffer = self._outgoing(values)
        step = max(1, self.segment_nbytes // values.itemsize)
        for start in range(0, len(values), step):
            self._wait_in("Allreduce", MPI.IN_PLACE, _view(buffer[start : start + step]), op=_OPS[op])
        self._count_reduction(values.nbytes)
        if buffer is not values:
            values[:] = _incoming(buffer, values)
        return values

    def allreduce(self, source: NDArray[Any], result: NDArray[Any]) -> None:
        """Sum over ranks from one array into another, in segments."""
        step = max(1, self.segment_nbytes // source.itemsize)
        for start in range(0, len(source), step):
            part = self._outgoing(source[start : start + step])
            staged = isinstance(part, np.ndarray) and not isinstance(result, np.ndarray)
            total = _empty(len(part), part) if staged else result[start : start + step]
            self._wait_in("Allreduce", _view(part), _view(total), op=MPI.SUM)
            if staged:
                result[start : start + step] = _incoming(total, result)
        self._count_reduction(source.nbytes)

    def allgatherv(self, payload: Any, counts: Sequence[int], places: Sequence[int]) -> Any:
        """Gather payloads of known byte counts; rank r's lies at byte places[r] of the result."""
        sent = self._outgoing(payload)
        gathered = _empty(sum(counts), sent)
        share = max(1, self.segment_nbytes // self.size)
        if sum(counts) <= self.segment_nbytes:
            self._call("Allgatherv", _view(sent), [_view(gathered), (counts, places), MPI.BYTE])
        else:
            for start in range(0, max(counts), share):
                part = [min(max(count - start, 0), share) for count in counts]
                packed = _empty(sum(part), sent)
                row = [_view(packed), (part, _starts(part)), MPI.BYTE]
                self._call("Allgatherv", _view(sent[start : start + share]), row)
                _unpack(packed, part, gathered, [place + start for place in places])
        mine = counts[self.rank]
        self._count(mine * (self.size - 1), sum(counts) - mine)
        return _incoming(gathered, payload)

    def alltoallv(self, payload: Any, counts: Sequence[int], places: Sequence[int]) -> Any:
        """Send counts[q] bytes from places[q] on to rank q, where every rank sends q as many; returns the rows received."""
        mine = counts[self.rank]
        sent = self._outgoing(payload)
        received = _empty(mine * self.size, sent)
        share = max(1, self.segment_nbytes // self.size)
        if max(counts, default=0) <= share:
            rows = ([mine] * self.size, [r * mine for r in range(self.size)])
            self._wait_in("Alltoallv", [_view(sent), (counts, places), MPI.BYTE], [_view(received), rows, MPI.BYTE])
        else:
            for start in range(0, max(counts), share):
                part = [min(max(count - start, 0), share) for count in counts]
                here = part[self.rank]
                joined, packed = _empty(sum(part), sent), _empty(here * self.size, sent)
                _pack(sent, part, joined, [place + start for place in places])
                _wait_for(joined)
                rows = ([here] * self.size, [r * here for r in range(self.size)])
                out = [_view(joined), (part, _starts(part)), MPI.BYTE]
                self._wait_in("Alltoallv", out, [_view(packed), rows, MPI.BYTE])
                _unpack(packed, [here] * self.size, received, [r * mine + start for r in range(self.size)])
        self._count(sum(counts) - mine, mine * (self.size - 1))
        return _incoming(received, payload)

    def route(self, payload: Bytes, table: Ints) -> Bytes:
        """Send table[r][q] bytes from rank r to q, of a payload in the order of q; returns what comes in the order of r."""
        sent, received = table[self.rank].tolist(), table[:, self.rank].tolist()
        share, longest = max(1, self.segment_nbytes // self.size), int(table.max())
        arrived = np.empty(sum(received), dtype=np.uint8)
        for start in range(0, longest, share):
            out, back = ([min(max(n - start, 0), share) for n in counts] for counts in (sent, received))
            places = [min(at + start, len(payload)) for at in _starts(sent)]
            packed = arrived if longest <= share else np.empty(sum(back), dtype=np.uint8)
            self._call("Alltoallv", [payload, (out, places), MPI.BYTE], [packed, (back, _starts(back)), MPI.BYTE])
            if packed is not arrived:
                _unpack(packed, back, arrived, [at + start for at in _starts(received)])
        mine = sent[self.rank]
        self._count(sum(sent) - mine, sum(received) - mine)
        return arrived

    def broadcast_(self, data: Bytes, root: int = 0) -> None:
        """Overwrite bytes with the root's, in segments."""
        for start in range(0, len(data), self.segment_nbytes):
            self._wait_in("Bcast", data[start : start + self.segment_nbytes], root=root)

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
        """Raise on every rank if any rank has an error: the first such rank's, with its rank, as `kind`."""
        texts = self.gather_texts("" if error is None else str(error) or type(error).__name__)
        for rank, text in enumerate(texts):
            if text:
                agreed = kind(f"r{rank} | {text}")
                if isinstance(agreed, ConfigurationError):
                    agreed.repeated = self.rank != 0
                raise agreed from (error if rank == self.rank else None)

    def _call(self, name: str, *buffers: Any) -> None:
        """One of MPI's collective calls by name; whoever waits for it keeps the processor."""
        self._wait_in(name, *buffers)

    def _wait_in(self, name: str, *buffers: Any, **how: Any) -> None:
        """A call of MPI that blocks, marked for the watchdog while it lasts."""
        with self.spot(name):
            getattr(self.comm, name)(*buffers, **how)

    def beside(self) -> BesideExchange:
        """One with its own communicator for a thread that works beside the computation."""
        other = BesideExchange(self.comm, self.segment_nbytes)
        other.share_place(self)
        return other

    def share_place(self, other: Exchange) -> None:
        """Have the watchdog of another exchange of this rank watch this one too; local."""
        self.place, self.spot = other.place, other.place.spot()

    def _outgoing(self, array: Any) -> Any:
        """What MPI is to read: the array itself once it is complete, or a copy on the host if MPI takes no device memory."""
        if isinstance(array, np.ndarray):
            return array
        if not self.cuda_aware:
            return device_memory.to_pinned(array)
        device_memory.synchronize(array)
        return array

    def _count(self, sent: int, received: int) -> None:
        self.nbytes_sent += sent
        self.nbytes_received += received

    def _count_reduction(self, nbytes: int) -> None:
        """A reduction's bytes depend on MPI's algorithm: count what the bandwidth-optimal one moves."""
        moved = 2 * nbytes * (self.size - 1) // self.size
        self._count(moved, moved)


class BesideExchange(Exchange):
    """Leaves the processor to the computation while it waits: calls do not block, and are looked after from time to time.

    It must do its gathering, routing and texts in one thread at a time.
    """

    SHORTEST, LONGEST = 5e-5, 2e-3  # seconds between looks: sockets hold what arrives in the longest at 1 Gbit/s

    def _call(self, name: str, *buffers: Any) -> None:
        request = getattr(self.comm, f"I{name.lower()}")(*buffers)
        pause = self.SHORTEST
        with self.spot(name):
            while not request.Test():
                time.sleep(pause)
                pause = min(1.5 * pause, self.LONGEST)


def _view(array: Any) -> Any:
    """The buffer to hand to mpi4py."""
    return array if isinstance(array, np.ndarray) else device_memory.mpi_view(array)


def _wait_for(array: Any) -> None:
    """Wait until what was launched to write an array is done."""
    if not isinstance(array, np.ndarray):
        device_memory.synchronize(array)


def _empty(count: int, like: Any) -> Any:
    """Allocate as many elements of the same type in the same memory, for MPI to write to at once."""
    return np.empty(count, dtype=like.dtype) if isinstance(like, np.ndarray) else device_memory.empty_for_mpi(count, like)


def _incoming(array: Any, wanted: Any) -> Any:
    """What MPI wrote, in the memory where `wanted` is."""
    staged = isinstance(array, np.ndarray) and not isinstance(wanted, np.ndarray)
    return device_memory.from_pinned(array, wanted) if staged else array


_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "or": MPI.BOR}


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(counts[:-1]).tolist()] if counts else []


def _unpack(packed: Bytes, counts: Sequence[int], target: Bytes, places: Sequence[int]) -> None:
    for start, count, place in zip(_starts(counts), counts, places, strict=True):
        target[place : place + count] = packed[start : start + count]


def _pack(source: Bytes, counts: Sequence[int], packed: Bytes, places: Sequence[int]) -> None:
    for start, count, place in zip(_starts(counts), counts, places, strict=True):
        packed[start : start + count] = source[place : place + count]


def library() -> dict[str, str]:
    """Name and version of MPI, and the thread level it gave; local."""
    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    name, version = MPI.get_vendor()
    return {
        "name": name,
        "version": ".".join(map(str, version)),
        "standard": ".".join(map(str, MPI.Get_version())),
        "threads": levels[MPI.Query_thread()],
    }


def local_rank(comm: Any = None) -> int:
    """This process's rank among those on the same host; collective."""
    everyone: MPI.Intracomm = MPI.COMM_WORLD if comm is None else comm
    here = everyone.Split_type(MPI.COMM_TYPE_SHARED)
    rank = int(here.Get_rank())
    here.Free()
    return rank


@dataclass(frozen=True)
class Awareness:
    """Whether MPI is given device memory as it is, and why."""

    usable: bool
    why: str

    def __str__(self) -> str:
        way = "device buffers go to MPI as they are" if self.usable else "what is selected goes through pinned host memory"
        return f"{'yes' if self.usable else 'no'}: {self.why}; {way}"


def cuda_awareness() -> Awareness:
    """Ask the environment, then MPI, whether device buffers may be passed to it; local.

    MPISPARSE_CUDA_AWARE=0|1 decides; then, for Cray's MPI and for MPICH, the variable that turns their device support on or
    off; then Open MPI and MPICH themselves say how they were built (MPIX_Query_cuda_support).
    """
    forced = os.environ.get("MPISPARSE_CUDA_AWARE")
    if forced:
        check_choice("MPISPARSE_CUDA_AWARE", forced, ("0", "1"))
        return Awareness(forced == "1", f"MPISPARSE_CUDA_AWARE={forced}")
    version = MPI.Get_library_version().upper()
    if "CRAY" in version:
        value = os.environ.get("MPICH_GPU_SUPPORT_ENABLED", "0")
        return Awareness(value == "1", f"MPICH_GPU_SUPPORT_ENABLED={value}")
    if "MPICH" in version and os.environ.get("MPIR_CVAR_ENABLE_GPU") == "0":
        return Awareness(False, "MPIR_CVAR_ENABLE_GPU=0")
    try:
        query = ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support
    except (OSError, AttributeError):
        return Awareness(False, "this MPI has no MPIX_Query_cuda_support; MPISPARSE_CUDA_AWARE=1 if it takes device buffers")
    answer = bool(query())
    return Awareness(answer, f"MPIX_Query_cuda_support() is {int(answer)}")


def end_job(code: int) -> None:
    """End all ranks of the job with an exit code, from any thread; local. Output that is not flushed is lost."""
    MPI.COMM_WORLD.Abort(code)


def end_job_on_uncaught_exception() -> None:
    """From now on an uncaught exception prints its traceback and ends all ranks; local, once for a process.

    Without it the other ranks wait for ever in their next collective call.
    """
    if MPI.COMM_WORLD.Get_size() == 1 or getattr(sys.excepthook, "ends_mpi_job", False):
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> NoReturn:
        try:
            previous(kind, error, trace)
        except Exception:
            traceback.print_exception(kind, error, trace)
        print(f"r{MPI.COMM_WORLD.Get_rank()} | uncaught {kind.__name__}: ending all ranks", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(0.2)  # MPICH drops what its launcher has not read yet
        MPI.COMM_WORLD.Abort(1)
        raise SystemExit(1)

    hook.ends_mpi_job = True  # type: ignore[attr-defined]
    sys.excepthook = hook
