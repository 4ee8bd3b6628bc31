"""What the environment of a Slurm job tells, and when the job ends. No MPI, no torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping

from mpisparse.comm.world import started_by

COMMAND_SECONDS = 10


def pmi(environ: Mapping[str, str] = os.environ) -> str:
    """Return how the ranks learned of each other."""
    if "PMIX_NAMESPACE" in environ:
        return f"pmix {environ.get('PMIX_VERSION', '')}".strip()
    if "PMI_FD" in environ or "PMI_RANK" in environ:
        return "pmi2" if started_by(environ) == "srun" else "pmi"
    return "none"


class Deadline:
    """When the job ends, and whether it is time to stop."""

    def __init__(self, end: float | None, margin: float) -> None:
        """`end` in seconds since the epoch; `margin` is limited to a tenth of the remaining time."""
        self.end = end
        self.margin = margin if end is None else min(margin, max(0.0, end - time.time()) / 10)
        self.longest = 0.0
        self.last: float | None = None
        self.reached = False

    def near(self) -> bool:
        """Return whether there may be no time for another step and a checkpoint; call once per step.

        Together they are assumed to take twice the longest time between calls so far.
        """
        now = time.time()
        if self.last is not None:
            self.longest = max(self.longest, now - self.last)
        self.last = now
        self.reached = self.end is not None and now + 2 * self.longest + self.margin >= self.end
        return self.reached


def end_time(environ: Mapping[str, str] = os.environ) -> float | None:
    """Return when this job reaches its time limit, in seconds since the epoch; None without a job or a limit."""
    if "SLURM_JOB_END_TIME" in environ:
        try:
            return float(environ["SLURM_JOB_END_TIME"])
        except ValueError:
            return None
    if "SLURM_JOB_ID" not in environ:
        return None
    left = command_output("squeue", "--noheader", "--jobs", environ["SLURM_JOB_ID"], "--format", "%L")
    seconds = parse_time(left.strip()) if left else None
    return None if seconds is None else time.time() + seconds


def parse_time(text: str, *, left: bool = True) -> int | None:
    """Convert a time of Slurm to seconds; None for UNLIMITED and the like.

    `left`: the text is time left as squeue prints it, where a single number is seconds; else it is minutes.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return None
    days, *rest = match.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is not None:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(numbers) == 1 and not left:
        return 60 * numbers[0]
    total = 0
    for number in numbers:
        total = 60 * total + number
    return total


def facts(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what doctor shows of Slurm and of this process's job."""
    version = (command_output("sinfo", "--version") or "").strip()
    found = {"installed": version or "no"}
    if "SLURM_JOB_ID" not in environ:
        return {**found, "job": "none"}
    found["job"] = environ["SLURM_JOB_ID"]
    found["nodes"] = f"{environ.get('SLURM_JOB_NUM_NODES', '?')}: {environ.get('SLURM_JOB_NODELIST', '?')}"
    found["tasks"] = environ.get("SLURM_STEP_NUM_TASKS" if started_by(environ) == "srun" else "SLURM_NTASKS", "?")
    end = end_time(environ)
    found["time left"] = "no limit known" if end is None else f"{end - time.time():.0f} s"
    if started_by(environ) == "srun":
        found["srun --mpi"] = environ.get("SLURM_MPI_TYPE", "none")
    return found


def command_output(*command: str) -> str | None:
    """Return what a command prints, or None if it is missing, fails or times out."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout + done.stderr if done.returncode == 0 else None
