"""One run at a time in a directory: a lock that names its owner, beats while the owner lives, and outlives no dead one.

`RUN/lock` is a JSON record of the owner, made whole under another name and linked into place, which succeeds for one
process only, on network file systems too. The owner counts up a number in it. Whether an owner on another host lives is
judged by whether the file changes while one looks, so that no two clocks are compared. Only the holder of the claim on
a record may remove it, so that nobody removes the lock of whoever came in between.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import stat
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from mpisparse.comm.exchange import Exchange
from mpisparse.errors import ConfigurationError, LockError
from mpisparse.owner import Owner, this_process
from mpisparse.runtime.signals import INTERRUPTED, StopRequest

NAME = "lock"
BEAT_SECONDS = 5.0
GRACE_SECONDS = 60.0  # an owner on another host whose lock stands still for so long is taken for dead
POLL_SECONDS = 0.5
TOKEN = re.compile("[0-9a-f]{16}")
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)  # of file systems without hard links


class StoppedWaitingError(LockError):
    """A signal came while the run waited for another one to end; nothing was begun, so the same command may come again."""

    exit_code = INTERRUPTED


class Record(NamedTuple):
    """A lock as it was read: what it says, and when the file server last saw it change."""

    text: bytes
    changed: int

    @property
    def identity(self) -> str:
        """What stays the same while its owner beats, and can be part of a file's name."""
        token = self._said().get("token")
        return token if isinstance(token, str) and TOKEN.fullmatch(token) else hashlib.sha256(self.text).hexdigest()

    def owner(self) -> tuple[Owner | None, str]:
        """Who wrote it, and the owner's name for people."""
        said = self._said()
        kinds = get_type_hints(Owner)
        given = said.get("owner")
        if isinstance(given, dict) and {key: type(value) for key, value in given.items()} == kinds:
            owner = Owner(**given)
            return owner, f"{owner} (since {said.get('since')})"
        return None, "a process that left no name"

    def _said(self) -> dict[str, Any]:
        with contextlib.suppress(ValueError, RecursionError):
            said = json.loads(self.text)
            return said if isinstance(said, dict) else {}
        return {}


class RunLock:
    """The lock of a run's directory as one process sees it; local."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        self.me, self.token = this_process(), secrets.token_hex(8)
        self.since = time.strftime("%Y-%m-%d %H:%M:%S")
        self.owner: Owner | None = None  # who has it, if another process does
        self.owner_name = ""
        self.alive = False  # whether that one is known to live
        self.taken_from = ""  # the dead one whose lock this was
        self.lost = False  # whether another process took it over
        self._seen: Record | None = None
        self._unchanged_since = 0.0
        self._claimed, self._claimed_since = "", 0.0
        self._file, self._count, self._made = -1, 0, False
        self._busy, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, name="mpisparse-lock", daemon=True)

    # Taking it

    def attempt(self) -> bool:
        """Take the lock if it is free or its owner is dead, which shows when asked again and again."""
        if not self.path.parent.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._made = True
        found = _read(self.path)
        if found is not None:
            if not self._looks_dead(found) or not self._remove(found):
                return False
            self.taken_from = self.owner_name
        if not self._create():
            return False
        self._thread.start()
        return True

    def _looks_dead(self, found: Record) -> bool:
        """Tell whether a lock's owner is gone: not among the processes, or its record stood still while we looked."""
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
        """Make the lock, whole from the first moment, unless another process has; tells whether it is ours."""
        draft = self.path.with_name(f".{NAME}-{self.token}")
        try:
            _write_new(draft, self._record())
            try:
                os.link(draft, self.path)
            except OSError as error:
                if error.errno in NO_LINKS:
                    _write_new(self.path, self._record())
                elif error.errno != errno.EEXIST:  # which is said of our own link too, if the network lost the answer
                    raise
        except (FileExistsError, FileNotFoundError):  # another process was faster, and cleared our draft away
            pass
        finally:
            draft.unlink(missing_ok=True)
        return self._open()

    def _open(self) -> bool:
        """Keep a handle on the lock if it is ours."""
        try:
            file = os.open(self.path, os.O_RDWR)
        except FileNotFoundError:
            return False
        if Record(os.pread(file, 1 << 16, 0), 0).identity != self.token:
            os.close(file)
            return False
        self._close()
        self._file = file
        for left in self.path.parent.glob(f".{NAME}-*"):  # of processes that were killed on their way
            left.unlink(missing_ok=True)
        return True

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _remove(self, found: Record, *, ours: bool = False) -> bool:
        """Remove a lock that is still what was found, holding the claim on it; tells whether it was done."""
        claim = self.path.with_name(f".{NAME}-claim-{found.identity}")
        try:
            os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        except FileExistsError:
            self._break_claim(claim)
            return False
        try:
            now = _read(self.path)
            if now is None or (now.identity != found.identity if ours else now != found):
                return False
            self.path.unlink()
            return True
        finally:
            claim.unlink(missing_ok=True)

    def _break_claim(self, claim: Path) -> None:
        """Remove a claim, which is held for moments, when its holder must have been killed."""
        now = time.monotonic()
        if self._claimed != claim.name:
            self._claimed, self._claimed_since = claim.name, now
        elif now - self._claimed_since > GRACE_SECONDS:
            self._claimed = ""
            claim.unlink(missing_ok=True)

    # Holding it

    def _record(self) -> bytes:
        """What the lock says; always of the same length, so that it can be written over."""
        body = {"owner": asdict(self.me), "since": self.since, "token": self.token, "beat": f"{self._count:020d}"}
        return json.dumps(body).encode() + b"\n"

    def _keep_beating(self) -> None:
        """Count up the number in our record, through our own handle on it: never in a record that took its place."""
        while not self._ended.wait(BEAT_SECONDS) and not self.lost:
            with self._busy:
                self._count += 1
                try:
                    os.pwrite(self._file, self._record(), 0)
                    os.fsync(self._file)
                except OSError:
                    with contextlib.suppress(OSError):
                        os.utime(self._file)  # a full disk may have no room even for a changed record
            self.loss()

    def loss(self) -> LockError | None:
        """Why this run must write no more: another one has its directory. A lock that was removed by hand is made again."""
        with self._busy, contextlib.suppress(OSError):
            found = _read(self.path)
            if found is None and not self.lost and not self._ended.is_set():
                self._create()
                found = _read(self.path)
            if found is not None and found.identity != self.token:
                self.lost, (self.owner, self.owner_name) = True, found.owner()
        if not self.lost:
            return None
        return LockError(
            f"{self.path.parent} was taken over by {self.owner_name}, because this run stood still for "
            f"{GRACE_SECONDS:g} s; it ends without writing more. To go on, start it again when the other has ended"
        )

    def release(self) -> None:
        """Stop beating and remove the lock if it is still ours, and its directory if that is new and empty."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(BEAT_SECONDS)
        with self._busy, contextlib.suppress(OSError):
            self._close()
            found = _read(self.path)
            if found is not None and found.identity == self.token:
                self._remove(found, ours=True)
        self.leave()

    def leave(self) -> None:
        """Remove the directory if it is new and empty."""
        if self._made:
            with contextlib.suppress(OSError):
                self.path.parent.rmdir()


def _write_new(path: Path, text: bytes) -> None:
    """Write a file that must not be there yet; one that cannot be written whole is removed."""
    with open(path, "xb", buffering=0) as file:
        try:
            if file.write(text) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
        except OSError:
            path.unlink(missing_ok=True)
            raise


def _read(path: Path) -> Record | None:
    """A lock as it is now, or None; opened each time, because network file systems look again only then."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a FIFO would be waited for
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _strange(path) if error.errno == errno.ELOOP else error from None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise _strange(path)
        return Record(os.read(handle, 1 << 16), status.st_mtime_ns)
    finally:
        os.close(handle)


def _strange(path: Path) -> OSError:
    return OSError(errno.EINVAL, f"{path.name} is no plain file; remove it")


def take(directory: Path, exchange: Exchange, stop: StopRequest, *, wait: bool) -> RunLock | None:
    """Take a directory's lock on rank 0, waiting for its owner to end if asked to; collective. None on the other ranks.

    Raises LockError on all ranks if another run has it. An earlier start of the same requeued job is always waited for.
    """
    lock = RunLock(directory) if exchange.rank == 0 else None
    said = False
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
            if state == "wait" and lock.owner_name and not said:
                said = True
                doing = "waiting for it to end" if patient else "looking whether that one still runs"
                print(f"r0 | {directory} is in use by {lock.owner_name}; {doing}", flush=True)
        exchange.raise_together(error)
        states = exchange.gather_texts(state)
        if states[0] == "taken":
            return lock
        if states[0] == "refused" or "stop" in states:
            kind = LockError if states[0] == "refused" else StoppedWaitingError
            exchange.raise_together(_refusal(lock, kind) if lock is not None else None, kind)
        time.sleep(POLL_SECONDS)


def _refusal(lock: RunLock, kind: type[LockError]) -> LockError:
    where = f"{lock.path.parent} is in use by {lock.owner_name}"
    if kind is StoppedWaitingError:
        return kind(f"{where}, and this run was asked to stop while it waited; start the same command again to go on")
    return kind(f"{where}; wait for it with --wait-for-lock, or choose another --out")
