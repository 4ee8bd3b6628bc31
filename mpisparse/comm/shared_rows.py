"""Memory shared by the ranks of a host: one row of float32 per rank, which all may read and write.

It consists of files in /dev/shm, unlinked as soon as all ranks have mapped them, so that none is left behind.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mpisparse.arrays import Floats

if TYPE_CHECKING:
    from mpisparse.comm.exchange import Exchange

PLACE = Path("/dev/shm")


def shared_rows(exchange: Exchange, count: int, owners: Sequence[int] = ()) -> Sequence[Floats]:
    """Map a row of `count` elements for each of some ranks of an exchange (default: all), in their order; collective.

    Returns nothing on all ranks if any cannot map all rows, because they are on several hosts or there is no room.
    """
    owners = owners or range(exchange.size)
    path, file = _made(4 * count) if exchange.rank in owners else ("", -1)
    rows = []
    with contextlib.ExitStack() as files:
        if path:
            files.callback(os.close, file)
            files.callback(os.unlink, path)
        paths = exchange.gather_texts(path)
        for owner in owners:
            with contextlib.suppress(OSError, ValueError):
                rows.append(_mapped(paths[owner], 4 * count))
        complete = bool((exchange.allgather(np.array([len(rows)], dtype=np.int64)) == len(owners)).all())
    return rows if complete else []


def _made(nbytes: int) -> tuple[str, int]:
    """Make a file of nbytes; returns its path, empty if there is no room, and its descriptor."""
    try:
        file, path = tempfile.mkstemp(prefix="mpisparse-", dir=PLACE)
    except OSError:
        return "", -1
    try:
        os.posix_fallocate(file, 0, max(1, nbytes))  # otherwise a write beyond the available memory ends the process
    except OSError:
        os.close(file)
        os.unlink(path)
        return "", -1
    return path, file


def _mapped(path: str, nbytes: int) -> Floats:
    """Map a file as float32."""
    if not path:
        raise ValueError("no file")
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), max(1, nbytes))
    row: Floats = np.frombuffer(memory, dtype=np.float32, count=nbytes // 4)
    return row
