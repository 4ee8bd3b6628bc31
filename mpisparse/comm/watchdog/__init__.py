"""The watchdog: ends a job that hangs, and prints where each rank was last.

A thread of every rank measures how long the rank has been inside one collective call, and reports to rank 0 by heartbeats
outside MPI. The clock stops while any rank is in an exempt phase (saving, evaluating, probing, or one of the user's own).
"""

from __future__ import annotations

import json
import math
import secrets
from pathlib import Path
from typing import Any

from mpisparse.comm.watchdog.transport import open_socket, own_names
from mpisparse.comm.watchdog.watching import Watchdog
from mpisparse.errors import ConfigurationError

TIMEOUT = 600.0  # seconds
DIRECTORY = "heartbeats"  # in the run's directory


def check_timeout(timeout: object) -> float:
    """Return the timeout in seconds; raise ConfigurationError if it is not one."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout < math.inf:
        raise ConfigurationError(f"timeout must be a number of seconds >= 0 (0: no watchdog), got {timeout!r}")
    return float(timeout)


def watch(exchange: Any, timeout: float, directory: Path | None = None) -> Watchdog | None:
    """Start watching an exchange, unless it has one rank, its ranks are virtual, or the timeout is 0; collective.

    `directory` is the run's: heartbeats go there as files if datagrams do not get through. Rank 0's is used.
    """
    if exchange.size == 1 or exchange.virtual or timeout == 0:
        return None
    made = open_socket()
    offer: dict[str, Any] = {}
    if exchange.rank == 0:
        port = made.getsockname()[1] if made is not None else None
        where = None if directory is None else str(Path(directory).absolute() / DIRECTORY)
        offer = {"key": secrets.token_hex(32), "names": own_names(), "port": port, "directory": where}
    agreed = json.loads(exchange.gather_texts(json.dumps(offer))[0])
    return Watchdog(exchange, timeout, made, agreed).start()
