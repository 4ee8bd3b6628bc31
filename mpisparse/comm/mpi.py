"""MPI: the only module, apart from the benchmarks, that imports mpi4py. Importing it starts MPI: others import it late."""

from __future__ import annotations

import ctypes
import os
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any, NoReturn

from mpi4py import MPI

from mpisparse.comm.world import check_world
from mpisparse.errors import check_choice

OPS: dict[str, Any] = {"sum": MPI.SUM, "max": MPI.MAX, "or": MPI.BOR}


class Communicator(MPI.Intracomm):
    """mpi4py's communicator, and what else an Exchange asks of its transport."""

    virtual = False
    ends_together = True
    one_host = False  # until duplicate() has found out
    ops = OPS

    @property
    def threaded(self) -> bool:
        """Tell whether several threads may call MPI at the same time."""
        return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)

    @property
    def cuda_aware(self) -> bool:
        """Tell whether device buffers may be passed."""
        return cuda_awareness().usable

    @property
    def is_open(self) -> bool:
        """Tell whether messages can still be sent."""
        return not MPI.Is_finalized() and self != MPI.COMM_NULL

    def Free(self) -> None:  # noqa: N802
        """Free the communicator, once."""
        if self != MPI.COMM_NULL:
            super().Free()

    def end_job(self, code: int) -> None:
        """End all ranks of the job with an exit code, from any thread; local. Unflushed output is lost."""
        MPI.COMM_WORLD.Abort(code)


def duplicate(comm: Any = None) -> Communicator:
    """Duplicate a communicator; None: all ranks, unless their launcher says that these are not all. Collective."""
    if comm is None:
        check_world(MPI.COMM_WORLD.Get_size(), library()["name"])
    made = Communicator(MPI.COMM_WORLD if comm is None else comm).Dup()
    made.one_host = _on_this_host(made)[1] == made.Get_size()
    return made


def everyone() -> Communicator:
    """All ranks that MPI sees, whatever their launcher says."""
    return Communicator(MPI.COMM_WORLD)


def library() -> dict[str, str]:
    """Describe the MPI library: name, version, standard and thread level; local."""
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
    """Return the rank of this process among those on the same host; collective."""
    return _on_this_host(MPI.COMM_WORLD if comm is None else comm)[0]


def _on_this_host(comm: MPI.Intracomm) -> tuple[int, int]:
    """This process's rank among those on the same host, and their number; collective."""
    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    rank, size = int(here.Get_rank()), int(here.Get_size())
    here.Free()
    return rank, size


@dataclass(frozen=True)
class Awareness:
    """Whether device buffers are passed to MPI directly, and why."""

    usable: bool
    why: str

    def __str__(self) -> str:
        way = (
            "device buffers are passed to MPI directly"
            if self.usable
            else "selected values are staged in pinned host memory"
        )
        return f"{'yes' if self.usable else 'no'}: {self.why}; {way}"


def cuda_awareness() -> Awareness:
    """Find out from the environment, then from MPI, whether device buffers may be passed to it; local.

    MPISPARSE_CUDA_AWARE=0|1 decides if it is set. Cray's MPI and MPICH have a variable that turns device support on or off.
    Open MPI and MPICH report how they were built (MPIX_Query_cuda_support).
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
        return Awareness(
            False, "this MPI has no MPIX_Query_cuda_support; set MPISPARSE_CUDA_AWARE=1 if it accepts device buffers"
        )
    answer = bool(query())
    return Awareness(answer, f"MPIX_Query_cuda_support() is {int(answer)}")


def end_job_on_uncaught_exception() -> None:
    """Make an uncaught exception print its traceback and end all ranks; local. Further calls do nothing.

    Without it the other ranks would wait forever in their next collective call.
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
        time.sleep(0.2)  # MPICH drops output that its launcher has not read yet
        MPI.COMM_WORLD.Abort(1)
        raise SystemExit(1)

    hook.ends_mpi_job = True  # type: ignore[attr-defined]
    sys.excepthook = hook
