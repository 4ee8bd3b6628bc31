"""The interface of a transport, and which transport a communicator gets: MPI's, a process group's, or a virtual worker's.

A transport has the methods of mpi4py's communicators that take buffers. Importing this starts no MPI and needs none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, Protocol

import torch.distributed as dist

from mpisparse.errors import ConfigurationError

BYTE = "B"  # mpi4py's name for the type of all elements
IN_PLACE = None


class Transport(Protocol):
    """A communicator.

    It also has Allgather, Allgatherv, Alltoallv, Allreduce and Bcast, and their nonblocking forms Iallgather and so on,
    which return a request with Test() and Wait(). ops: what Allreduce takes as op, for "sum", "max" and "or" (bitwise).
    virtual: the ranks are threads of one process. ends_together: processes wait for each other when they end. is_open:
    messages can still be sent. threaded: several threads may exchange at the same time, on communicators of their own.
    cuda_aware: buffers may be in device memory.
    mortal: why ranks cannot go on after a death, and what to do; if empty, the transport is the Communicator of comm/mpi.py,
    with end_alone, tells_of_death, revoke, agreed, shrunk and twin.
    one_host: all ranks are known to share memory, so a large Allreduce is faster in rounds that stay in cache.
    over_tcp: messages between hosts go over TCP, as far as can be told, so long ones are better sent in pieces.
    """

    @property
    def ops(self) -> Mapping[str, Any]: ...
    @property
    def virtual(self) -> bool: ...
    @property
    def ends_together(self) -> bool: ...
    @property
    def one_host(self) -> bool: ...
    @property
    def over_tcp(self) -> bool: ...
    @property
    def mortal(self) -> str: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def threaded(self) -> bool: ...
    @property
    def cuda_aware(self) -> bool: ...
    def Get_rank(self) -> int: ...  # noqa: N802
    def Get_size(self) -> int: ...  # noqa: N802
    def Dup(self) -> Any:  # noqa: N802
        """Make a communicator of the same ranks that shares no messages with this one; collective."""
        ...

    def Split(self, color: int, key: int) -> Any:  # noqa: N802
        """Make a communicator of the ranks of the same color, in the order of their keys; collective."""
        ...

    def lowest_here(self) -> int:
        """Return the lowest rank on the same host as this one; collective."""
        ...

    def Free(self) -> None:  # noqa: N802
        """Free it; further calls do nothing."""
        ...

    def end_job(self, code: int) -> None:
        """End all ranks with an exit code, from any thread; local."""
        ...


def duplicate(comm: Any = None) -> Transport:
    """Make a transport of its own for the ranks of a communicator; None: all ranks of MPI. Collective."""
    made: Transport
    if isinstance(comm, dist.ProcessGroup):
        from mpisparse.comm.group import of_group

        made = of_group(comm)
    elif hasattr(comm, "end_job"):
        made = comm.Dup()
    elif comm is None or hasattr(comm, "Dup"):
        made = started().duplicate(comm)
    else:
        _refuse(comm)
    return made


def end_job_on_uncaught_exception(comm: Any = None) -> None:
    """Make an uncaught exception end all MPI ranks; local. Other transports notice by themselves that a rank is gone."""
    if comm is None or (hasattr(comm, "Dup") and not hasattr(comm, "end_job")):
        started().end_job_on_uncaught_exception()


def local_rank(comm: Any = None) -> int:
    """Return the rank of this process among those on the same host; collective. None: all ranks of MPI."""
    if isinstance(comm, dist.ProcessGroup):
        from mpisparse.comm.group import local_rank_in

        return local_rank_in(comm)
    return int(started().local_rank(comm))


def started() -> Any:
    """Start MPI; returns comm/mpi.py."""
    try:
        from mpisparse.comm import mpi
    except (ImportError, RuntimeError, OSError) as error:
        raise ConfigurationError(
            f"MPI cannot be used here ({error}); load your site's MPI module or pip install 'mpisparse[mpi]', or exchange "
            "over torch.distributed: under torchrun, after init_process_group, pass comm=torch.distributed.group.WORLD"
        ) from error
    return mpi


def _refuse(comm: Any) -> NoReturn:
    if comm == dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigurationError(
            "this process is not a member of the process group that was passed as comm; construct only on its members"
        )
    hint = "; of a DeviceMesh pass mesh.get_group(name)" if hasattr(comm, "get_group") else ""
    raise ConfigurationError(
        f"comm must be an mpi4py communicator or a torch.distributed process group, got {type(comm).__name__}{hint}"
    )
