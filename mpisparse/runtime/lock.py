"""One run at a time in a directory: a lock that names its owner and ends with it.

`RUN/lock` is a JSON record of the owner. It is written under another name and linked into place, which succeeds for one
process only, on network file systems too. The owner increments a number in it, its heartbeat. Another host watches
whether the file changes to see whether the owner is alive, so no two clocks are compared. A process must hold the
claim on a lock to remove it, so nobody removes the lock of a process that came in between.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
import time
from pathlib import Path

from mpisparse.comm.exchange import Exchange
from mpisparse.errors import ConfigurationError, LockError
from mpisparse.owner import Owner, this_process
from mpisparse.runtime.lock_file import READ_NBYTES, LockRecord, lock_text, read_lock, write_new
from mpisparse.stopping import INTERRUPTED, StopRequest

NAME = "lock"
BEAT_SECONDS = 5.0
GRACE_SECONDS = 60.0  # an owner on another host is dead if its lock has not changed for this long
POLL_SECONDS = 0.5
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)  # of file systems without hard links


class StoppedWaitingError(LockError):
    """A signal arrived while the run waited for another one to end; nothing has begun, so the command can be repeated."""

    exit_code = INTERRUPTED


class RunLock:
    """The lock of a run's directory, as one process sees it. Local."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        self.me, self.token = this_process(), secrets.token_hex(8)
        self.since = time.strftime("%Y-%m-%d %H:%M:%S")
        self.owner: Owner | None = None  # of the lock, if that is another process
        self.owner_name = ""
        self.alive = False  # whether the owner is known to be alive
        self.taken_from = ""  # name of the dead owner whose lock this process took over
        self.lost = False  # whether another process took this lock over
        self._seen: LockRecord | None = None
        self._unchanged_since = 0.0
        self._claimed, self._claimed_since = "", 0.0
        self._file, self._beats, self._made_directory = -1, 0, False
        self._busy, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, name="mpisparse-lock", daemon=True)

    # Taking the lock

    def attempt(self) -> bool:
        """Take the lock if it is free or its owner is dead. Call it repeatedly, to notice when a heartbeat stops."""
        if not self.path.parent.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._made_directory = True
        found = read_lock(self.path)
        if found is not None:
            if not self._looks_dead(found) or not self._remove(found):
                return False
            self.taken_from = self.owner_name
        if not self._create():
            return False
        self._thread.start()
        return True

    def inherit(self, token: str) -> None:
        """Hold the lock that a process of the same run has held, which is dead. It is lost if another run was faster."""
        self.token = token
        with contextlib.suppress(OSError):
            if self._open():
                os.ftruncate(self._file, os.pwrite(self._file, self._text(), 0))
        self._thread.start()
        self.loss()

    def _looks_dead(self, found: LockRecord) -> bool:
        """Return whether the owner is gone: its process does not exist, or its heartbeat stopped while we watched."""
        now = time.monotonic()
        self.owner, self.owner_name = found.owner()
        if found != self._seen:
            self.alive = self._seen is not None and found.identity == self._seen.identity
            self._seen, self._unchanged_since = found, now
        runs = self.owner.runs() if self.owner is not None else None
        if runs is not None:
            self.alive = runs
            return not runs
        return now - self._unchanged_since > GRACE_SECONDS

    def _create(self) -> bool:
        """Create the lock, never visible half-written, unless another process did; return whether it is ours."""
        draft = self.path.with_name(f".{NAME}-{self.token}")
        try:
            write_new(draft, self._text())
            try:
                os.link(draft, self.path)
            except OSError as error:
                if error.errno in NO_LINKS:
                    write_new(self.path, self._text())
                elif error.errno != errno.EEXIST:  # a lost reply of the file server may report our own link as existing
                    raise
        except (FileExistsError, FileNotFoundError):  # another process was faster, and removed our draft
            pass
        finally:
            draft.unlink(missing_ok=True)
        return self._open()

    def _open(self) -> bool:
        """Keep a handle on the lock if it is ours; return whether it is."""
        try:
            file = os.open(self.path, os.O_RDWR)
        except FileNotFoundError:
            return False
        if LockRecord(os.pread(file, READ_NBYTES, 0), 0).identity != self.token:
            os.close(file)
            return False
        self._close()
        self._file = file
        for leftover in self.path.parent.glob(f".{NAME}-*"):  # of processes that were killed while taking the lock
            leftover.unlink(missing_ok=True)
        return True

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _remove(self, found: LockRecord, *, ours: bool = False) -> bool:
        """Remove a lock if it has not changed since it was read, holding the claim on it; return whether it was removed."""
        claim = self.path.with_name(f".{NAME}-claim-{found.identity}")
        try:
            os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        except FileExistsError:
            self._break_claim(claim)
            return False
        try:
            now = read_lock(self.path)
            if now is None or (now.identity != found.identity if ours else now != found):
                return False
            self.path.unlink()
            return True
        finally:
            claim.unlink(missing_ok=True)

    def _break_claim(self, claim: Path) -> None:
        """Remove a claim whose holder must have been killed, as claims are held only for moments."""
        now = time.monotonic()
        if self._claimed != claim.name:
            self._claimed, self._claimed_since = claim.name, now
        elif now - self._claimed_since > GRACE_SECONDS:
            self._claimed = ""
            claim.unlink(missing_ok=True)

    # Holding the lock

    def _text(self) -> bytes:
        return lock_text(self.me, self.since, self.token, self._beats)

    def _keep_beating(self) -> None:
        """Write heartbeats through our own handle, so that they never reach a lock that replaced ours."""
        while not self._ended.wait(BEAT_SECONDS) and not self.lost:
            with self._busy:
                self._beats += 1
                try:
                    os.pwrite(self._file, self._text(), 0)
                    os.fsync(self._file)
                except OSError:
                    with contextlib.suppress(OSError):
                        os.utime(self._file)  # a full disk may refuse even to overwrite
            self.loss()

    def loss(self) -> LockError | None:
        """Return an error if another run has taken over the directory. A lock that was removed by hand is created again."""
        with self._busy, contextlib.suppress(OSError):
            found = read_lock(self.path)
            if found is None and not self.lost and not self._ended.is_set():
                self._create()
                found = read_lock(self.path)
            if found is not None and found.identity != self.token:
                self.lost, (self.owner, self.owner_name) = True, found.owner()
        if not self.lost:
            return None
        return LockError(
            f"{self.path.parent} was taken over by {self.owner_name}, because this run showed no sign of life "
            f"for {GRACE_SECONDS:g} s; it ends and writes nothing more. Start it again after the other run has ended"
        )

    def release(self) -> None:
        """Stop the heartbeat; remove the lock if it is still ours, and the directory if we made it and it is empty."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(BEAT_SECONDS)
        with self._busy, contextlib.suppress(OSError):
            self._close()
            found = read_lock(self.path)
            if found is not None and found.identity == self.token:
                self._remove(found, ours=True)
        self.leave()

    def leave(self) -> None:
        """Remove the directory if we made it and it is empty."""
        if self._made_directory:
            with contextlib.suppress(OSError):
                self.path.parent.rmdir()


def take(directory: Path, exchange: Exchange, stop: StopRequest, *, wait: bool) -> RunLock | None:
    """Take a directory's lock on rank 0; return it there, None on the other ranks. Collective.

    If another run holds it, `wait` for that to end, or raise LockError on all ranks. An earlier start of the same
    requeued job is always waited for.
    """
    lock = RunLock(directory) if exchange.rank == 0 else None
    announced = False
    while True:
        error: ConfigurationError | None = None
        state = "stop" if stop.asked else "wait"
        if lock is not None:
            try:
                if lock.attempt():
                    state = "taken"
            except OSError as caught:
                error = ConfigurationError(f"cannot write to {directory}: {caught.strerror}")
                lock.leave()
            patient = wait or (lock.owner is not None and lock.owner.precedes(lock.me))
            if state == "wait" and lock.alive and not patient:
                state = "refused"
            if state == "wait" and lock.owner_name and not announced:
                announced = True
                doing = "waiting for it to end" if patient else "checking whether that process still runs"
                print(f"r0 | {directory} is in use by {lock.owner_name}; {doing}", flush=True)
        exchange.raise_together(error)
        states = exchange.gather_texts(state)
        if states[0] == "taken":
            return lock
        if states[0] == "refused" or "stop" in states:
            kind = LockError if states[0] == "refused" else StoppedWaitingError
            exchange.raise_together(_refusal(lock, kind) if lock is not None else None, kind)
        time.sleep(POLL_SECONDS)


def inherit(directory: Path, token: str) -> RunLock:
    """Return the lock of this run, which a process of it has held that is dead; see RunLock.loss(). Local."""
    lock = RunLock(directory)
    lock.inherit(token)
    return lock


def _refusal(lock: RunLock, kind: type[LockError]) -> LockError:
    in_use = f"{lock.path.parent} is in use by {lock.owner_name}"
    if kind is StoppedWaitingError:
        return kind(f"{in_use}, and this run was asked to stop while it waited; start the same command again to continue")
    return kind(f"{in_use}; wait for it with --wait-for-lock, or choose another --out")
