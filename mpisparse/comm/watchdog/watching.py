"""The watchdog's thread: measures how long its rank waits, exchanges heartbeats, and ends a job that hangs."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpisparse.comm.place import Place, Wait
from mpisparse.comm.watchdog.beat import CLOSED, EXEMPT, EXITS, RUNS, WAITS, Beat
from mpisparse.comm.watchdog.transport import Answer, Files, Hub, LastBeat, Line, Mailbox
from mpisparse.comm.watchdog.words import HUNG, own_report, print_lines, rank_table

if TYPE_CHECKING:
    from mpisparse.comm.transport import Transport  # needs torch

LONGEST_BEAT = 5.0  # seconds between heartbeats of one rank
MOST_BEATS = 50  # that rank 0 receives per second
LAST_RESORT = 20.0  # seconds after which the process exits by itself if MPI has not ended the job


class Watchdog:
    """The watchdog of one rank. Its thread ends with close() or with the interpreter."""

    def __init__(self, exchange: Any, timeout: float, made: socket.socket | None, agreed: dict[str, Any]) -> None:
        self.place: Place = exchange.place
        self.rank, self.size, self.timeout = exchange.rank, exchange.size, timeout
        self.tick = min(max(LONGEST_BEAT, self.size / MOST_BEATS), timeout / 10)
        self.silent = 3 * self.tick + 2.0  # seconds without a heartbeat after which a rank counts as stopped or gone
        self.grace = 2 * self.tick + 3.0  # seconds that other ranks get to report once one has timed out
        self.end_job: Callable[[int], None] = functools.partial(_end_job, exchange.comm)
        key = bytes.fromhex(agreed["key"])
        self.mail = Mailbox(made, key) if made is not None else None
        self.hub = Hub(self.mail, self.size, self.tick / 20) if self.mail is not None and self.rank == 0 else None
        reachable = self.mail is not None and self.rank > 0 and agreed["port"] is not None
        self.line = Line(self.mail, agreed["names"], agreed["port"]) if self.mail is not None and reachable else None
        self.files = Files(Path(agreed["directory"]), key, self.size) if agreed["directory"] is not None else None
        self.counted: dict[Wait, float] = {}  # seconds of each wait during which no rank was exempt
        self.number = 0
        self.final = ""  # how this rank left, once it has
        self.struck = 0.0  # when this rank timed out
        self.ending = 0.0  # when rank 0 learnt of a rank that timed out
        self.reported = False
        self.left = threading.Event()
        self.pid = os.getpid()
        self.thread = threading.Thread(target=self._run, name="mpisparse-watchdog", daemon=True)

    def start(self) -> Watchdog:
        """Start the thread."""
        self._tell()  # from now on rank 0 knows this host and process
        self.thread.start()
        _LIVE.add(self)
        return self

    def close(self, state: str = CLOSED) -> None:
        """Report that this rank has left, and end the thread; local. Rank 0's thread runs until all others have left."""
        if self.final or os.getpid() != self.pid:  # a forked process does not report for the rank
            return
        self.final = state
        for _ in range(2):  # a datagram may be lost
            self._tell()
        if self.files is not None:
            self.files.remove(self.rank)
        self.left.set()
        if self.mail is not None:
            self.mail.wake()

    # The thread

    def _run(self) -> None:
        self.left.wait(self.tick * (0.5 + 0.5 * self.rank / self.size))  # spread the ranks' beats
        try:
            last = due = time.monotonic()
            while not self._done():
                now = time.monotonic()
                if now >= due:
                    self._count(now - last)
                    self._tell()
                    last, due = now, now + (0.2 if self.struck or self.ending else self.tick)
                self._listen(due - now)
                self._act()
        finally:
            if self.final and self.files is not None:  # the thread may have written one more beat after close()
                self.files.remove(self.rank)
            if self.mail is not None:
                self.mail.close()

    def _done(self) -> bool:
        """Whether this rank has left and, on rank 0, no other rank still sends beats."""
        if not self.final or self.hub is None:
            return bool(self.final)
        return all(beat.left or age > self.silent for beat, age in self.hub.seen().values())

    def _count(self, elapsed: float) -> None:
        """Add the time since the last tick to the current waits, unless some rank is exempt.

        If this process was suspended meanwhile, at most two ticks count.
        """
        now, elapsed = time.monotonic(), 0.0 if self._excused() else min(elapsed, 2 * self.tick)
        self.counted = {wait: self.counted.get(wait, 0.0) + min(elapsed, now - wait.since) for wait in self.place.waits()}
        if self.final or self.struck or max(self.counted.values(), default=0.0) < self.timeout:
            return
        if self.files is not None and self._any_exempt(self.files.seen()):
            self.counted = {}
        else:
            self.struck = now

    def _excused(self) -> bool:
        """Whether some rank is in an exempt phase. A rank's last beat is valid until it is older than the timeout."""
        if self.place.phase():
            return True
        if self.hub is not None:
            return self._any_exempt(self.hub.seen())
        if self.line is None or self.line.answer is None or time.monotonic() - self.line.answered >= self.timeout:
            return False
        return self.line.answer.excused

    def _any_exempt(self, seen: dict[int, LastBeat]) -> bool:
        return any(beat.state == EXEMPT and age < self.timeout for beat, age in seen.values())

    def _lost(self) -> bool:
        """Whether heartbeats do not reach rank 0, or its answers do not arrive."""
        if self.rank == 0:
            return self.hub is None
        return self.line is None or time.monotonic() - self.line.answered > self.silent

    def _tell(self) -> None:
        """Send a heartbeat, also as a file if datagrams do not get through."""
        beat = self._beat()
        if self.hub is not None:
            self.hub.put(beat)
        elif self.line is not None:
            self.line.send(beat)
        if self.files is not None and self._lost() and not self.final:
            self.files.put(beat)

    def _beat(self) -> Beat:
        self.number += 1
        waits, phases = self.place.waits(), self.place.phases[:1]
        state, where, seconds = RUNS, "", 0.0
        if self.final:
            state = self.final
        elif waits:
            state, seconds = WAITS, time.monotonic() - waits[0].since
            where = waits[0].call + "".join(f" while {phase}" for phase in phases)
        elif phases:
            state, where = EXEMPT, phases[0]
        else:
            where = self.place.line()
        return Beat(
            self.rank, self.number, self.place.steps, state, where, seconds, socket.gethostname(), self.pid,
            struck=self.struck > 0, reported=self.reported,
        )  # fmt: skip

    def _listen(self, seconds: float) -> None:
        if self.hub is not None:
            self.hub.listen(seconds, self._answer())
        elif self.line is not None:
            self.line.listen(seconds)
        else:
            self.left.wait(max(0.0, seconds))

    def _answer(self) -> Answer:
        assert self.hub is not None
        return Answer(self._excused(), self.ending > 0, self.hub.newest[0][0])

    # The end

    def _act(self) -> None:
        """Report, and end the job, when a rank has timed out."""
        now = time.monotonic()
        if self.hub is not None:
            seen = self.hub.seen()
            if not self.ending and any(beat.struck for beat, _ in seen.values()):
                self.ending = now
                self.hub.tell_all(self._answer())
            late = [beat for beat, age in seen.values() if age <= self.silent and not (beat.left or beat.reported)]
            if self.ending and self.reported and (not late or now - self.ending > self.grace):
                self._end({**(self.files.seen() if self.files is not None else {}), **seen}, "")
        ending = self.line is not None and self.line.answer is not None and self.line.answer.ending
        if (self.struck or self.ending or ending) and not self.reported:
            self.reported = True
            if not self.final:
                print_lines(self.rank, own_report(self.place))
            self._tell()
        if self.struck and self.hub is None and now - self.struck > 2 * self.grace:
            self._end_alone()

    def _end_alone(self) -> None:
        """End the job without rank 0."""
        seen = self.files.seen() if self.files is not None else {}
        seen[self.rank] = LastBeat(self._beat(), 0.0)
        lost = "datagrams to rank 0 do not get through"
        if self.line is not None and self.line.answer is not None:
            seen[0] = LastBeat(self.line.answer.beat, time.monotonic() - self.line.answered)
            lost = "rank 0, which collects heartbeats, does not answer"
        way = f"these are from {self.files.directory}" if self.files is not None else "there is no run directory for files"
        self._end(seen, f"{lost}; {way}; an exempt phase of another rank may not be known here")

    def _end(self, seen: dict[int, LastBeat], remark: str) -> None:
        """Print where each rank was last, and end the job."""
        print_lines(
            self.rank,
            [
                f"watchdog: a rank has waited in an exchange for more than {self.timeout:g} s; where the ranks were last:",
                *rank_table(seen, self.size, self.silent),
                *([remark] if remark else []),
                f"watchdog: ending all ranks with exit code {HUNG}; see docs/howto/sharp-bits.md",
            ],
        )
        self.end_job(HUNG)


def _end_job(comm: Transport, code: int) -> None:
    """End all ranks; if that fails, end at least this process."""
    resort = threading.Timer(LAST_RESORT, os._exit, (code,))
    resort.daemon = True
    with contextlib.suppress(RuntimeError):  # the interpreter starts no threads while it exits
        resort.start()
    time.sleep(0.5)  # let mpirun forward the output first
    comm.end_job(code)


_LIVE: weakref.WeakSet[Watchdog] = weakref.WeakSet()


def announce_exit() -> None:
    """Report that this process ends; local."""
    for watchdog in list(_LIVE):
        watchdog.close(EXITS)


@atexit.register
def _leave() -> None:
    """Report the interpreter's exit. Rank 0, which MPI_Finalize would block, first answers the others until they leave."""
    announce_exit()
    for watchdog in list(_LIVE):
        if watchdog.hub is not None:
            watchdog.thread.join()
