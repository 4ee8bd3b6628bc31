"""Owners of files: identifies a process so that others can tell whether it still runs. Needs neither MPI nor torch.

A process id is valid only under one kernel and in one PID namespace. Two containers, or two nodes of the same name, must
not take each other's processes for dead: for those only a heartbeat can tell.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

JOBS = {"Slurm": "SLURM_JOB_ID", "PBS": "PBS_JOBID", "LSF": "LSB_JOBID", "SGE": "JOB_ID"}


@dataclass(frozen=True)
class Owner:
    """A process. `kernel` identifies the boot and PID namespace of `pid`; `start` differs if the pid is used again."""

    host: str
    kernel: str
    pid: int
    start: int
    job: str = ""
    restart: int = 0

    def runs(self) -> bool | None:
        """Tell whether the process is alive; None if that cannot be seen from here."""
        if self.kernel != kernel():
            return None
        started = start_of(self.pid)
        return None if started is None and hidden(self.pid) else started == self.start

    def precedes(self, other: Owner) -> bool:
        """Tell whether this is an earlier start of the same requeued job."""
        return bool(self.job) and self.job == other.job and self.restart < other.restart

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f", {self.job}" if self.job else "")


def this_process(environ: Mapping[str, str] = os.environ) -> Owner:
    """Return the owner for the current process."""
    pid = os.getpid()
    job = next((f"{name} job {environ[key]}" for name, key in JOBS.items() if environ.get(key)), "")
    restart = environ.get("SLURM_RESTART_COUNT", "0")
    return Owner(
        platform.node(), kernel(), pid, start_of(pid) or 0, job, int(restart) if restart.isdecimal() else 0
    )  # fmt: skip


@functools.cache
def kernel() -> str:
    """Return an identifier of this boot of this machine and of this PID namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return hashlib.sha256(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:16]
    except OSError:
        return os.urandom(8).hex()  # unknown: differs from that of every other process


def start_of(pid: int) -> int | None:
    """Return the start of a process in clock ticks since boot; None if it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def hidden(pid: int) -> bool:
    """Tell whether a process exists but /proc hides it, as hidepid does with those of other users."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return not Path(f"/proc/{pid}").exists()
    except (ProcessLookupError, OverflowError):
        pass
    return False
