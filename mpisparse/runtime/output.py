"""Where ranks' output goes: rank 0's is shown, that of others is dropped, or each rank has a log. Errors are shown."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any, TextIO


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
