"""Where a rank is: marked by the threads that call MPI, read by the watchdog's thread.

A mark is one assignment, so readers need no lock and a step pays for two calls of the clock.
"""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LONGEST_NAME = 60  # characters of a phase's name
OWN = str(Path(__file__).parents[2])
LIBRARIES = (OWN, *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib", "scripts")), "<frozen")


class Wait(NamedTuple):
    """A call of MPI that a thread has entered and not left; `since` is monotonic."""

    call: str
    since: float
    thread: int


class Spot:
    """One thread's place: inside a call of MPI, or not."""

    __slots__ = ("wait",)

    def __init__(self) -> None:
        self.wait: Wait | None = None

    def __call__(self, call: str) -> Spot:
        """Enter a call: `with spot("Allgather"): ...`."""
        self.wait = Wait(call, time.monotonic(), threading.get_ident())
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.wait = None


class Place:
    """The place of all threads of a rank that exchange, its finished steps, and the exempt phase that it is in."""

    def __init__(self) -> None:
        self.steps = 0
        self.spots: list[Spot] = []
        self.phases: list[str] = []
        self.thread = threading.get_ident()  # of the training loop: it makes the exchange

    def spot(self) -> Spot:
        """A place for one more thread."""
        self.spots.append(Spot())
        return self.spots[-1]

    @contextlib.contextmanager
    def exempt(self, phase: str) -> Iterator[None]:
        """Excuse the rank while it is inside and waits in no exchange; local."""
        self.phases.append(str(phase)[:LONGEST_NAME])
        try:
            yield
        finally:
            self.phases.pop()

    def waits(self) -> list[Wait]:
        """The calls of MPI that the threads are in, the training loop's first."""
        return [wait for spot in self.spots if (wait := spot.wait) is not None]

    def phase(self) -> str:
        """The exempt phase that excuses this rank now, or nothing: a rank that waits itself is in nobody's way."""
        phases = self.phases[:1]
        return phases[0] if phases and not self.waits() else ""

    def line(self) -> str:
        """The line that the training loop is in: of the user's code, else of this package, else the innermost of all."""
        frame = sys._current_frames().get(self.thread)
        if frame is None:
            return "no Python code: its thread has ended"
        frames = [frame]
        while (frame := frame.f_back) is not None:
            frames.append(frame)
        own = [f for f in frames if f.f_code.co_filename.startswith(OWN)]
        users = [f for f in frames if not f.f_code.co_filename.startswith(LIBRARIES)]
        at = [*users, *own, *frames][0]
        return f"{at.f_code.co_filename}:{at.f_lineno} in {at.f_code.co_name}"

    def stack(self, thread: int) -> list[str]:
        """The lines of a thread's stack, innermost last."""
        frame = sys._current_frames().get(thread)
        entries = traceback.format_stack(frame) if frame is not None else ["  this thread has ended\n"]
        return [line for entry in entries for line in entry.rstrip("\n").split("\n")]
