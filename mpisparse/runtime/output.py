"""Where the output of ranks goes: rank 0's is shown; that of others is dropped or logged. Errors of all are shown."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SteadyOutput:
    """A stream that also writes to a log, if given, and does not fail, as output must not end a run.

    If the disk is full or the reader of a pipe is gone, text is dropped; a full disk gives one warning.
    """

    def __init__(self, stream: TextIO, log: TextIO | None = None) -> None:
        self.stream, self.log = stream, log
        self.warned = False

    def write(self, text: str) -> int:
        for target in self._targets():
            self._attempt(target, partial(target.write, text))
        return len(text)

    def flush(self) -> None:
        for target in self._targets():
            self._attempt(target, target.flush)

    def _targets(self) -> list[TextIO]:
        return [self.stream] if self.log is None else [self.log, self.stream]

    def _attempt(self, target: TextIO, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            if error.errno not in (*NO_ROOM, errno.EPIPE):
                raise
            if not self.warned and error.errno != errno.EPIPE:  # the reader, such as `head`, has seen enough
                self.warned = True
                name = getattr(target, "name", "output")
                warnings.warn(f"{name}: {error.strerror}; output is dropped until there is room", stacklevel=4)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def give_up(stream: TextIO) -> None:
    """Flush a stream for the last time; drop what cannot be written, or Python would exit with a code of its own."""
    try:
        stream.flush()
    except OSError as error:
        if error.errno not in (*NO_ROOM, errno.EPIPE):
            raise
        kept, nowhere = os.dup(stream.fileno()), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        stream.flush()
        os.dup2(kept, stream.fileno())
        os.close(kept)
        os.close(nowhere)


class RankOutput:
    """A context that redirects this rank's output. Local.

    On all ranks but 0, standard output is dropped or goes to the rank's log, that of C libraries too. With logs,
    standard output of rank 0 and standard error of every rank are both shown and logged.
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
        sys.stdout = SteadyOutput(self.stdout, self.log if not self.rank else None)
        sys.stderr = SteadyOutput(self.stderr, self.log)
        if self.log is not None:
            cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            opening = f"rank {self.rank} on {platform.node()}, process {os.getpid()}, cores {cores}\n"
            SteadyOutput(self.log).write(opening)
        return self

    def show(self) -> None:
        """Show this rank's standard output from now on, as that of rank 0 was, which is dead."""
        if self.saved >= 0:
            sys.stdout.flush()
            os.dup2(self.saved, 1)
            os.close(self.saved)
            self.saved = -1
            sys.stdout = SteadyOutput(self.stdout, self.log)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        sys.stdout = self.stdout
        give_up(self.stdout)
        if self.saved >= 0:
            os.dup2(self.saved, 1)
            os.close(self.saved)
        if self.log is None:
            sys.stderr = self.stderr
        elif error is None:  # a traceback is printed later and must still reach the log
            sys.stderr = self.stderr
            with contextlib.suppress(OSError):
                self.log.close()
