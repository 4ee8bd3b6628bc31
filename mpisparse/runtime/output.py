"""Where ranks' output goes: rank 0's is shown, that of others is dropped, or each rank has a log. Errors are shown."""

from __future__ import annotations

import os
import platform
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "mpirun.hydra", "orterun", "prterun", "prun", "srun")
DAEMONS = ("orted", "prted", "prte", "slurmstepd")  # of a launcher that is elsewhere; Hydra's is below its mpiexec
REDIRECTS = ("--output", "--tag-output", "--timestamp-output", "--xml")  # mpirun writes files, or puts words before lines
LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_FD", "MPI_LOCALNRANKS", "SLURM_STEP_ID")


def reaches_terminal(stream: TextIO) -> bool:
    """Tell whether a person sees what this rank writes to the stream; where that is in doubt, no. Local.

    Open MPI's mpirun gives ranks a pseudo-terminal whatever its own output is, so that isatty() says nothing: the output
    of the launcher itself is looked at. A launcher on another host is out of sight.
    """
    if not stream.isatty():
        return False
    for pid, name in _ancestors():
        if name in LAUNCHERS:
            return _is_terminal(pid, stream.fileno()) and not _redirects(pid)
        if name in DAEMONS:
            return False
    return not any(name in os.environ for name in LAUNCHED)


def _ancestors() -> Iterator[tuple[int, str]]:
    """Number and name of the processes above this one, nearest first."""
    pid = os.getppid()
    while pid:
        try:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            return
        yield pid, name
        pid = int(rest.split()[1])


def _redirects(pid: int) -> bool:
    """Tell whether a launcher was asked to do more with the ranks' output than to show it; yes, where that is not known."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return True
    return any(word.startswith(REDIRECTS) for word in words)


def _is_terminal(pid: int, descriptor: int) -> bool:
    """Tell whether a descriptor of another process is a terminal; no, where that may not be known."""
    path = f"/proc/{pid}/fd/{descriptor}"
    try:
        if not stat.S_ISCHR(os.stat(path).st_mode):
            return False
        opened = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return os.isatty(opened)
    finally:
        os.close(opened)


class Both:
    """Writes to two streams; all else is the first one's."""

    def __init__(self, first: TextIO, second: TextIO) -> None:
        self.first, self.second = first, second

    def write(self, text: str) -> int:
        self.second.write(text)
        return self.first.write(text)

    def flush(self) -> None:
        self.second.flush()
        self.first.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.first, name)


class RankOutput:
    """A context in which this rank's output goes to its place; local.

    Ranks but the first lose their standard output, C libraries' too, or have it in their log. With logs, what rank 0
    prints and what any rank prints to standard error is shown and logged.
    """

    def __init__(self, rank: int, logs: Path | None) -> None:
        self.rank = rank
        self.log: TextIO | None = None
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
            self.log = open(logs / f"rank-{rank:04}.log", "a", buffering=1)  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> RankOutput:
        self.stdout, self.stderr, self.saved = sys.stdout, sys.stderr, -1
        if self.rank:
            sys.stdout.flush()
            self.saved = os.dup(1)
            target = self.log.fileno() if self.log is not None else os.open(os.devnull, os.O_WRONLY)
            os.dup2(target, 1)
            if self.log is None:
                os.close(target)
        if self.log is not None:
            cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            self.log.write(f"rank {self.rank} on {platform.node()}, process {os.getpid()}, cores {cores}\n")
            sys.stderr = Both(sys.stderr, self.log)
            if not self.rank:
                sys.stdout = Both(sys.stdout, self.log)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        sys.stdout.flush()
        sys.stdout = self.stdout
        if self.saved >= 0:
            os.dup2(self.saved, 1)
            os.close(self.saved)
        if error is None and self.log is not None:  # an error's traceback is printed later: leave its way into the log
            sys.stderr = self.stderr
            self.log.close()
