"""Whether a person watches: a progress bar in a file or a pipe is noise."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

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
