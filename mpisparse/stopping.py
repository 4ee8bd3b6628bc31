"""What asks a run to stop: signals, and the time limit of its Slurm job. No MPI, no torch."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from types import FrameType

from mpisparse.errors import ConfigurationError

COMMAND_SECONDS = 10
INTERRUPTED = 85  # exit code: stopped by a signal after a checkpoint; the same command continues
SIGNALS = ("USR1", "TERM")


def _number(name: str) -> signal.Signals:
    try:
        return signal.Signals[f"SIG{name.upper().removeprefix('SIG')}"]
    except KeyError:
        raise ConfigurationError(f"MPISPARSE_SIGNALS: {name!r} is no signal; expected names like USR1,TERM") from None


class StopRequest:
    """Whether this rank was asked to stop, by one of the signals in MPISPARSE_SIGNALS (default USR1,TERM)."""

    def __init__(self) -> None:
        self.check_thread()
        self.asked = False
        names = os.environ.get("MPISPARSE_SIGNALS", ",".join(SIGNALS)).split(",")
        self.numbers = [_number(name.strip()) for name in names if name.strip()]
        self.previous = {number: signal.signal(number, self._note) for number in self.numbers}

    @staticmethod
    def check_thread() -> None:
        """Raise ConfigurationError outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise ConfigurationError("only a program's main thread can listen to signals; call this there first")

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.asked = True

    def restore(self) -> None:
        """Restore the earlier signal handlers."""
        for number, handler in self.previous.items():
            signal.signal(number, handler)


def ignore() -> None:
    """Ignore the signals, so that this process exits with its own code."""
    for name in SIGNALS:
        signal.signal(_number(name), signal.SIG_IGN)


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


def command_output(*command: str) -> str | None:
    """Return what a command prints, or None if it is missing, fails or times out."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout + done.stderr if done.returncode == 0 else None
