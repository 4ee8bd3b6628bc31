"""What a rank is doing: written by the threads that call MPI, read by the watchdog's thread.

A thread marks its calls with one assignment, so readers need no lock and a collective needs no call into this module.
"""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LONGEST_NAME = 60  # characters of a phase's name
OWN = str(Path(__file__).parents[1])
LIBRARIES = (OWN, *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib", "scripts")), "<frozen")


class Wait(NamedTuple):
    """A collective call that a thread has not returned from; `since` is of the monotonic clock."""

    call: str
    since: float
    thread: int


class Spot:
    """The collective call that one thread is in: the fields of a Wait, or None between calls."""

    __slots__ = ("wait",)

    def __init__(self) -> None:
        self.wait: tuple[str, float, int] | None = None


class Place:
    """What a rank is doing: the calls that its threads are in, its finished steps, and its exempt phases."""

    def __init__(self) -> None:
        self.steps = 0
        self.spots: list[Spot] = []
        self.phases: list[str] = []
        self.thread = threading.get_ident()  # the training loop's, which creates the exchange

    def spot(self) -> Spot:
        """Add the spot of one more thread."""
        self.spots.append(Spot())
        return self.spots[-1]

    @contextlib.contextmanager
    def exempt(self, phase: str) -> Iterator[None]:
        """Stop the watchdog's clock while this rank is inside, unless it waits in a collective itself; local."""
        self.phases.append(str(phase)[:LONGEST_NAME])
        try:
            yield
        finally:
            self.phases.pop()

    def waits(self) -> list[Wait]:
        """List the collective calls that the threads are in, the training loop's first."""
        return [Wait(*wait) for spot in self.spots if (wait := spot.wait) is not None]

    def phase(self) -> str:
        """Return the outermost exempt phase, or "" outside of one and while this rank itself waits for others."""
        phases = self.phases[:1]
        return phases[0] if phases and not self.waits() else ""

    def line(self) -> str:
        """Return the line that the training loop is at: the innermost of the user's code, else of this package, else any."""
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
        """Format a thread's stack, innermost frame last."""
        frame = sys._current_frames().get(thread)
        entries = traceback.format_stack(frame) if frame is not None else ["  this thread has ended\n"]
        return [line for entry in entries for line in entry.rstrip("\n").split("\n")]
