"""A torch.distributed process group as a transport. No MPI is needed.

Messages travel over gloo, in host memory, whatever the backend of the given group, because a group for CUDA devices only
(NCCL) would not take them. The ranks open new connections, so that no message of the caller's own group mixes in.
Allreduce sums floats in gloo's order, the same on all ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.distributed_c10d import PrefixStore, Store

from mpisparse.arrays import Bytes
from mpisparse.errors import ConfigurationError

CONNECTING = timedelta(minutes=30)
WAITING = timedelta(days=365)  # the watchdog ends what hangs; a long phase of another rank is no error
SUMMED = (np.float32, np.float64, np.int64, np.int32, np.uint8, np.int8)  # types that gloo reduces
OPS: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "or": dist.ReduceOp.BOR}
_MADE: Counter[tuple[int, ...]] = Counter()  # groups made so far per set of ranks; all its members have the same number


def of_group(group: dist.ProcessGroup) -> GroupComm:
    """Make a transport for the ranks of a process group; collective over them alone."""
    rank, ranks = dist.get_rank(group), tuple(dist.get_process_group_ranks(group))
    if rank < 0:
        raise ConfigurationError("this process is not a member of the process group that was passed as comm")
    if not dist.is_gloo_available():
        raise ConfigurationError("this torch has no gloo, over which process groups exchange; pass an MPI communicator")
    return GroupComm(dist.distributed_c10d._get_default_store(), rank, ranks)


def local_rank_in(group: dist.ProcessGroup) -> int:
    """Return the rank of this process among those of the group on the same host; collective."""
    comm = of_group(group)
    here = comm.on_this_host()
    comm.Free()
    return here.index(comm.rank)


class Pending:
    """A call that was started; `finish` stores what arrived, once."""

    def __init__(self, rank: int, work: Any, finish: Callable[[], None] | None = None) -> None:
        self.rank, self.work, self.finish = rank, work, finish

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        return bool(self.work.is_completed()) and self.Wait()

    def Wait(self) -> bool:  # noqa: N802 - mpi4py's name
        try:
            self.work.wait()
        except RuntimeError as error:
            raise ConnectionError(
                f"r{self.rank} | the exchange with the other ranks broke off ({error}); one of them has probably ended: "
                "look for its error"
            ) from error
        if self.finish is not None:
            self.finish()
        return True


def _waited(start: Callable[..., Pending]) -> Callable[..., None]:
    """The blocking form of a call."""

    def complete(*args: Any, **options: Any) -> None:
        start(*args, **options).Wait()

    return complete


class GroupComm:
    """The methods of mpi4py's communicators that Exchange uses, on NumPy arrays, over gloo."""

    ops = OPS
    virtual = one_host = over_tcp = ends_together = False  # the process group sends by itself
    mortal = "a process group of torch.distributed ends with the first rank that dies; let torchrun restart the job"
    threaded = True
    cuda_aware = False

    def __init__(self, store: Store, rank: int, ranks: tuple[int, ...]) -> None:
        """`ranks`: of the members, in the default group whose store this is."""
        self.rank, self.size = rank, len(ranks)
        self._store, self._ranks = store, ranks
        _MADE[ranks] += 1
        name = f"mpisparse/{'-'.join(map(str, ranks))}/{_MADE[ranks]}"
        later = hasattr(dist.ProcessGroupGloo, "set_timeout")  # since torch 2.10 or so
        self._group: Any = dist.ProcessGroupGloo(PrefixStore(name, store), rank, self.size, CONNECTING if later else WAITING)
        if later:
            self._group.set_timeout(WAITING)
        _LIVE.add(self)

    def Get_rank(self) -> int:  # noqa: N802
        return self.rank

    def Get_size(self) -> int:  # noqa: N802
        return self.size

    def Dup(self) -> GroupComm:  # noqa: N802
        return GroupComm(self._store, self.rank, self._ranks)

    def Split(self, color: int, key: int) -> GroupComm:  # noqa: N802
        rows = np.empty((self.size, 2), dtype=np.int64)
        self.Allgather(np.array([color, key], dtype=np.int64), rows)
        alike = sorted((other, rank) for rank, (group, other) in enumerate(rows.tolist()) if group == color)
        members = [rank for _, rank in alike]
        return GroupComm(self._store, members.index(self.rank), tuple(self._ranks[rank] for rank in members))

    def on_this_host(self) -> list[int]:
        """The ranks on the same host as this one; collective."""
        name = np.zeros(256, dtype=np.uint8)
        text = np.frombuffer(socket.gethostname().encode()[: len(name)], dtype=np.uint8)
        name[: len(text)] = text
        names = np.empty((self.size, len(name)), dtype=np.uint8)
        self.Allgather(name, names)
        here: list[int] = np.flatnonzero((names == name).all(axis=1)).tolist()
        return here

    def lowest_here(self) -> int:
        """Return the lowest rank on the same host as this one; collective."""
        return self.on_this_host()[0]

    @property
    def is_open(self) -> bool:
        """Tell whether messages can still be sent."""
        return self._group is not None

    def Free(self) -> None:  # noqa: N802
        self._group = None

    def end_job(self, code: int) -> NoReturn:
        """End this process. Its launcher ends the others, or they notice that it is gone."""
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

    def Ibcast(self, buffer: Any, root: int = 0) -> Pending:  # noqa: N802
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return Pending(self.rank, self._group.broadcast([_tensor(buffer)], options))

    def Iallgather(self, sent: Any, received: Any) -> Pending:  # noqa: N802
        return Pending(self.rank, self._group._allgather_base(_tensor(received), _tensor(sent)))

    def Iallgatherv(self, sent: Any, received: Any) -> Pending:  # noqa: N802
        """Send the same bytes to every rank, because gloo gathers only messages of equal size."""
        gathered, (counts, starts) = _bytes_of(received), received[1]
        copies = np.tile(_bytes_of(sent), self.size)
        sizes = [len(copies) // self.size] * self.size
        return self._all_to_all(copies, sizes, gathered, counts, starts)

    def Ialltoallv(self, sent: Any, received: Any) -> Pending:  # noqa: N802
        payload, (counts, starts) = _bytes_of(sent), sent[1]
        if not _in_a_row(counts, starts):
            payload = np.concatenate([payload[start : start + count] for count, start in zip(counts, starts, strict=True)])
        return self._all_to_all(payload[: sum(counts)], counts, _bytes_of(received), *received[1])

    def Iallreduce(self, sent: Any, received: Any, op: Any = OPS["sum"]) -> Pending:  # noqa: N802
        if sent is not None:
            received[:] = sent
        wide = received if received.dtype in SUMMED else received.astype(np.int64)  # counts of fewer bytes
        options = dist.AllreduceOptions()
        options.reduceOp = op
        work = self._group.allreduce([torch.from_numpy(wide)], options)
        return Pending(self.rank, work, None if wide is received else lambda: np.copyto(received, wide, casting="unsafe"))

    Bcast, Allreduce = _waited(Ibcast), _waited(Iallreduce)
    Allgather, Allgatherv, Alltoallv = _waited(Iallgather), _waited(Iallgatherv), _waited(Ialltoallv)

    def _all_to_all(
        self, sent: Bytes, sizes: Sequence[int], received: Bytes, counts: Sequence[int], starts: Sequence[int]
    ) -> Pending:
        """Send sizes[q] bytes to every rank q; what comes from rank r goes to received[starts[r]], counts[r] bytes."""
        straight = _in_a_row(counts, starts)
        target = received[: sum(counts)] if straight else np.empty(sum(counts), dtype=np.uint8)
        work = self._group.alltoall_base(_tensor(target), _tensor(sent), list(counts), list(sizes))

        def unpack() -> None:
            at = 0
            for count, start in zip(counts, starts, strict=True):
                received[start : start + count] = target[at : at + count]
                at += count

        return Pending(self.rank, work, None if straight else unpack)


def _bytes_of(buffer: Any) -> Bytes:
    """A buffer of mpi4py's as bytes."""
    array: NDArray[Any] = buffer[0] if isinstance(buffer, list | tuple) else buffer
    return array.reshape(-1).view(np.uint8)


def _tensor(buffer: Any) -> torch.Tensor:
    """A buffer as a tensor of bytes; read-only memory is copied, because torch does not take it."""
    array = _bytes_of(buffer)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _in_a_row(counts: Sequence[int], starts: Sequence[int]) -> bool:
    """Whether pieces are contiguous from the start of a buffer."""
    return list(starts) == [0, *np.cumsum(counts[:-1]).tolist()]


_LIVE: weakref.WeakSet[GroupComm] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End the threads of groups that were never closed; they must not outlive the interpreter."""
    for comm in list(_LIVE):
        comm.Free()
