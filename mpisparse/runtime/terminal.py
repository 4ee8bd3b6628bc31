"""Whether output reaches a person: a progress bar in a file or a pipe is noise."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "mpirun.hydra", "orterun", "prterun", "prun", "srun")
DAEMONS = ("orted", "prted", "prte", "slurmstepd")  # of a launcher on another host; Hydra's runs below its mpiexec
REDIRECTS = (
    "--output",
    "--tag-output",
    "--timestamp-output",
    "--xml",
)  # with these mpirun writes files or prefixes lines
LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_FD", "MPI_LOCALNRANKS", "SLURM_STEP_ID")


def reaches_terminal(stream: TextIO) -> bool:
    """Return whether a person sees what this rank writes to the stream; False if that is unclear. Local.

    Open MPI's mpirun gives ranks a pseudo-terminal whatever its own output is, so isatty() is not enough: the launcher's
    own output must be a terminal. A launcher on another host cannot be examined.
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
    """Yield id and name of the parent process, its parent, and so on."""
    pid = os.getppid()
    while pid:
        try:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            return
        yield pid, name
        pid = int(rest.split()[1])


def _redirects(pid: int) -> bool:
    """Return whether a launcher has options that redirect or change the ranks' output; True if that is unknown."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return True
    return any(word.startswith(REDIRECTS) for word in words)


def _is_terminal(pid: int, descriptor: int) -> bool:
    """Return whether a descriptor of another process is a terminal; False if that is unknown."""
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
