"""Whose a file is: a process named so that another one can tell whether it still runs. No MPI, no torch.

A process id means something only under one kernel and in one PID namespace: two containers, or two nodes of the same
name, must not take each other's processes for dead. Elsewhere nothing can be said, and only a heartbeat tells.
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
    """A process: `kernel` is the boot and PID namespace in which `pid` counts, `start` tells it from a later one's."""

    host: str
    kernel: str
    pid: int
    start: int
    job: str = ""
    restart: int = 0

    def runs(self) -> bool | None:
        """Tell whether the process lives; None if that cannot be seen from here."""
        if self.kernel != kernel():
            return None
        started = start_of(self.pid)
        return None if started is None and hidden(self.pid) else started == self.start

    def precedes(self, other: Owner) -> bool:
        """Tell whether this is an earlier start of the other's requeued job."""
        return bool(self.job) and self.job == other.job and self.restart < other.restart

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f", {self.job}" if self.job else "")


def this_process(environ: Mapping[str, str] = os.environ) -> Owner:
    """The process that asks."""
    pid = os.getpid()
    job = next((f"{name} job {environ[key]}" for name, key in JOBS.items() if environ.get(key)), "")
    restart = environ.get("SLURM_RESTART_COUNT", "0")
    return Owner(
        platform.node(), kernel(), pid, start_of(pid) or 0, job, int(restart) if restart.isdecimal() else 0
    )  # fmt: skip


@functools.cache
def kernel() -> str:
    """What tells this boot of this machine, and this PID namespace on it, from all others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return hashlib.sha256(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:16]
    except OSError:
        return os.urandom(8).hex()  # nothing is known: equal to no other process's


def start_of(pid: int) -> int | None:
    """When a process was started, in clock ticks since boot; None if there is none, or only its exit code."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def hidden(pid: int) -> bool:
    """Tell whether there is a process that /proc does not show: another user's, where it is mounted with hidepid."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return not Path(f"/proc/{pid}").exists()
    except (ProcessLookupError, OverflowError):
        pass
    return False
