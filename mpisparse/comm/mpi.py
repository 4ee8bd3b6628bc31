"""MPI: the only module besides the benchmarks that imports mpi4py. Importing it starts MPI, so others import it late."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI

from mpisparse.comm import pieces
from mpisparse.comm.pieces import Messages, Parts, Sum
from mpisparse.comm.world import check_world
from mpisparse.errors import CheckpointError, CollectiveError, ConfigurationError, GradientError, check_choice

OPS: dict[str, Any] = {"sum": MPI.SUM, "max": MPI.MAX, "or": MPI.BOR}


class Communicator(MPI.Intracomm):
    """mpi4py's communicator, and what else an Exchange needs from a transport."""

    virtual = False
    ends_together = True
    one_host = over_tcp = False  # duplicate() finds out
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

    def Dup(self, info: MPI.Info | None = None) -> Communicator:  # noqa: N802
        """Make a communicator of the same ranks that shares no messages with this one; collective."""
        made: Communicator = super().Dup(info)
        made.one_host, made.over_tcp = self.one_host, self.over_tcp
        return made

    def Free(self) -> None:  # noqa: N802
        """Free the communicator, once."""
        if self != MPI.COMM_NULL:
            super().Free()

    def Ialltoallv(self, sent: Any, received: Any) -> MPI.Request | Messages:  # type: ignore[override]  # noqa: N802
        """As mpi4py's, of bytes. Between hosts as short messages."""
        if not self._in_pieces(sent[0], received[0]):
            return super().Ialltoallv(sent, received)
        return pieces.begin(self, Parts(sent[0], *sent[1]), Parts(received[0], *received[1]))

    def Iallgatherv(self, sent: Any, received: Any) -> MPI.Request | Messages:  # type: ignore[override]  # noqa: N802
        """As mpi4py's, of bytes. Between hosts as short messages."""
        if not self._in_pieces(sent, received[0]):
            return super().Iallgatherv(sent, received)
        size = self.Get_size()
        return pieces.begin(self, Parts(sent, [len(sent)] * size, [0] * size), Parts(received[0], *received[1]))

    def Iallreduce(self, sent: Any, received: Any, op: MPI.Op = MPI.SUM) -> MPI.Request | Sum:  # type: ignore[override]  # noqa: N802
        """As mpi4py's. Long sums in place between hosts go as short messages, and are added in rank order."""
        whole = sent is None and op == MPI.SUM and self._in_pieces(received)
        if not whole or received.nbytes <= pieces.PIECE:
            return super().Iallreduce(sent, received, op=op)
        return Sum(self, received)

    def _in_pieces(self, *buffers: Any) -> bool:
        """Whether short messages pay; device memory takes one call."""
        return self.over_tcp and all(isinstance(buffer, np.ndarray) for buffer in buffers)

    def lowest_here(self) -> int:
        """Return the lowest rank on the same host as this one; collective."""
        here = self.Split_type(MPI.COMM_TYPE_SHARED)
        group, every = here.Get_group(), self.Get_group()
        lowest = int(group.Translate_ranks([0], every)[0])
        for handle in (group, every, here):
            handle.Free()
        return lowest

    def end_job(self, code: int) -> None:
        """End all ranks of the job with an exit code, from any thread; local. Unflushed output is lost."""
        _end_job(code)

    # Going on without ranks that have died

    @property
    def mortal(self) -> str:
        """Why ranks cannot go on without one that has died, and what to do; empty if they can."""
        if not _tolerates_failures():
            return (
                "this MPI ends the job, or hangs, when a rank dies: start it with Open MPI's mpirun --with-ft ulfm and "
                f"OMPI_MCA_coll={WITHOUT_WRONG_VALUES}. Under srun, and with other MPIs, requeue the job instead "
                "(docs/howto/failures.md)"
            )
        left_out = os.environ.get("OMPI_MCA_coll", "")  # noqa: SIM112 - Open MPI's name
        if not (left_out.startswith("^") and {"han", "hcoll", "portals4"} <= set(left_out[1:].split(","))):
            return (
                "with Open MPI's default collectives results may be wrong after a rank has died: set "
                f"OMPI_MCA_coll={WITHOUT_WRONG_VALUES} for mpirun, got {left_out!r}"
            )
        return ""

    def end_alone(self) -> None:
        """Let an uncaught exception end this rank alone, if the other ranks do not raise it too; local."""
        global _alone
        if not _alone:
            _alone = True
            _note_exit_code()

    def leave_without_finalize(self) -> None:
        """End this process at its very end with the code of its sys.exit(), or 1 after an uncaught error; local.

        MPI_Finalize of Open MPI 5 can wait for ever for ranks that have died.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if getattr(sys, "last_value", None) is not None else _exit_code)

    def end_this_rank(self) -> None:
        """End this process so that the other ranks go on; local."""
        os.kill(os.getpid(), signal.SIGKILL)

    def tells_of_death(self, error: Exception) -> bool:
        """Whether a call raised this because a rank has died, or because another rank has noticed a death.

        After a death a collective may also return without an error and without the values; reading them then fails.
        """
        known = isinstance(error, MPI.Exception) and error.Get_error_class() in DEATHS
        return known or self._someone_died()

    def knows_of_dead(self) -> bool:
        """Whether MPI knows by now that a rank of this communicator has died; local."""
        return bool(self.Get_failed().Get_size())

    def _someone_died(self) -> bool:
        """Whether a rank has died or another rank says so, now or within seconds; local.

        Some collectives of Open MPI fail with an error of another class, possibly before MPI has noticed the death.
        """
        until = time.monotonic() + NOTICING
        while time.monotonic() < until:
            if self.Is_revoked() or self.knows_of_dead():
                return True
            with contextlib.suppress(MPI.Exception):
                self.Iprobe()  # makes MPI check
            time.sleep(0.01)
        return False

    def revoke(self) -> None:
        """Make all calls on this communicator fail, on all ranks; local."""
        self.Revoke()

    def agreed(self, fine: bool) -> bool:
        """Agree among all living ranks whether none has died and all report `fine`; collective."""
        try:
            return bool(self.Agree(int(fine)))
        except MPI.Exception as error:
            if not self.tells_of_death(error):
                raise
            return False

    def shrunk(self) -> tuple[Communicator, list[int]]:
        """Make a communicator of the living ranks; returns it and their former ranks. Collective."""
        self.Revoke()
        made = self.twin()
        group, before = made.Get_group(), self.Get_group()
        return made, group.Translate_ranks(range(made.Get_size()), before)

    def twin(self) -> Communicator:
        """Make another communicator of the living ranks; collective. Unlike Dup() it cannot hang if one dies meanwhile."""
        made = Communicator(self.Shrink())
        made.one_host, made.over_tcp = self.one_host, self.over_tcp
        return made


DEATHS = tuple(  # older versions of mpi4py lack these error classes, and do not survive a death
    getattr(MPI, name) for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED") if hasattr(MPI, name)
)
FABRICS = ("/sys/class/infiniband", "/sys/class/cxi")  # where Linux lists the adapters
WITHOUT_WRONG_VALUES = "^han,hcoll,portals4"
NOTICING = 30.0  # seconds in which MPI notices a death that made a call fail; 5 were too few on a busy machine
_alone = False  # whether an uncaught exception ends this rank alone
_exit_code = 0  # of the last call of sys.exit()


def _note_exit_code() -> None:
    """Record the code of sys.exit(), which is not available when the interpreter ends."""
    leave = sys.exit

    def noting(status: Any = None) -> NoReturn:
        global _exit_code
        _exit_code = status if isinstance(status, int) else int(status is not None)
        leave(status)

    sys.exit = noting


def knows_ulfm() -> bool:
    """Tell whether this is an Open MPI that was built with ULFM; local."""
    return _ulfm() is not None


def _tolerates_failures() -> bool:
    """Tell whether this is Open MPI under mpirun --with-ft ulfm."""
    flag = _ulfm()
    return flag is not None and flag.value


def _ulfm() -> ctypes.c_bool | None:
    """Open MPI's flag whether it tolerates failures; None if it has none."""
    try:
        return ctypes.c_bool.in_dll(ctypes.CDLL(MPI.__file__), "ompi_ftmpi_enabled")
    except (OSError, ValueError):
        return None


def _end_job(code: int) -> None:
    """End all ranks. Under --with-ft ulfm mpirun hangs after MPI_Abort, so the launcher is signalled to end the job."""
    launcher = _launcher() if _tolerates_failures() else 0
    if not launcher:
        MPI.COMM_WORLD.Abort(code)
    os.kill(launcher, signal.SIGTERM)
    time.sleep(60.0)


def _launcher() -> int:
    """The process id of the Open MPI launcher that started this process, or 0."""
    process = os.getppid()
    while process > 1:
        try:
            name, _, rest = Path(f"/proc/{process}/stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            return 0
        if name in ("prterun", "prted", "mpirun", "prte"):
            return process
        process = int(rest.split()[1])
    return 0


def duplicate(comm: Any = None) -> Communicator:
    """Duplicate a communicator; None: all ranks, unless the launcher says that MPI sees too few. Collective."""
    if comm is None:
        check_world(MPI.COMM_WORLD.Get_size(), library()["name"])
    made = Communicator(MPI.COMM_WORLD if comm is None else comm).Dup()
    made.one_host = _on_this_host(made)[1] == made.Get_size()
    made.over_tcp = not made.one_host and not made.allreduce(_has_fabric(), MPI.LOR)
    return made


def _has_fabric() -> bool:
    """Whether this host has a network that MPI would use instead of TCP: InfiniBand, RoCE, Omni-Path, EFA, Slingshot."""
    return any(any(Path(place).glob("*")) for place in FABRICS)


def everyone() -> Communicator:
    """All ranks that MPI sees, whatever the launcher says."""
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

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        try:
            previous(kind, error, trace)
        except Exception:
            traceback.print_exception(kind, error, trace)
        if _alone:
            _end_this_rank(error)
            return
        print(f"r{MPI.COMM_WORLD.Get_rank()} | uncaught {kind.__name__}: ending all ranks", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(0.2)  # MPICH drops output that its launcher has not read yet
        _end_job(1)
        raise SystemExit(1)

    hook.ends_mpi_job = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _end_this_rank(error: BaseException) -> None:
    """End this process so that the other ranks go on, unless they raise the same error and end, too; local.

    mpirun ends all ranks if one leaves with an exit code of its own, but not if a signal ends one.
    """
    if isinstance(error, CheckpointError | CollectiveError | ConfigurationError | GradientError | KeyboardInterrupt):
        return
    rank = MPI.COMM_WORLD.Get_rank()
    print(f"r{rank} | uncaught {type(error).__name__}: this rank ends, the others go on without it", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.2)  # mpirun drops output that it has not read yet
    os.kill(os.getpid(), signal.SIGKILL)
