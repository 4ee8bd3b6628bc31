"""The file of a run's lock: what it contains, and reading and creating it on any file system."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

from mpisparse.owner import Owner

TOKEN = re.compile("[0-9a-f]{16}")
READ_NBYTES = 1 << 16


@dataclass(frozen=True)
class LockRecord:
    """A lock as it was read: its text, and when the file server last saw it change."""

    text: bytes
    changed_ns: int

    @property
    def identity(self) -> str:
        """What does not change with the owner's heartbeat; usable in a file name."""
        token = self._fields().get("token")
        return token if isinstance(token, str) and TOKEN.fullmatch(token) else hashlib.sha256(self.text).hexdigest()

    def owner(self) -> tuple[Owner | None, str]:
        """Return who wrote it, and the owner's name for people."""
        fields = self._fields()
        owner = fields.get("owner")
        if isinstance(owner, dict) and {key: type(value) for key, value in owner.items()} == get_type_hints(Owner):
            return Owner(**owner), f"{Owner(**owner)} (since {fields.get('since')})"
        return None, "an unknown process"

    def _fields(self) -> dict[str, Any]:
        with contextlib.suppress(ValueError, RecursionError):
            fields = json.loads(self.text)
            return fields if isinstance(fields, dict) else {}
        return {}


def lock_text(owner: Owner, since: str, token: str, beat: int) -> bytes:
    """Format a lock's text; its length does not depend on the beat, so it can be overwritten in place."""
    fields = {"owner": asdict(owner), "since": since, "token": token, "beat": f"{beat:020d}"}
    return json.dumps(fields).encode() + b"\n"


def write_new(path: Path, text: bytes) -> None:
    """Write a file that must not exist yet; remove it again if it cannot be written completely."""
    with open(path, "xb", buffering=0) as file:
        try:
            if file.write(text) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
        except OSError:
            path.unlink(missing_ok=True)
            raise


def read_lock(path: Path) -> LockRecord | None:
    """Read a lock, or None if there is none; opens the file anew, as network file systems refresh it only then."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # opening a FIFO would block otherwise
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _not_regular(path) if error.errno == errno.ELOOP else error from None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise _not_regular(path)
        return LockRecord(os.read(handle, READ_NBYTES), status.st_mtime_ns)
    finally:
        os.close(handle)


def _not_regular(path: Path) -> OSError:
    return OSError(errno.EINVAL, f"{path.name} is not a regular file; remove it")
