"""Every rank sends a row to the next one, from a thread, while it does other work."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from mpisparse.comm.transport import BYTE
from mpisparse.errors import CollectiveError

if TYPE_CHECKING:
    from mpisparse.arrays import Floats
    from mpisparse.comm.exchange import Exchange

TAG = 17
SHORTEST, LONGEST = 5e-5, 2e-3  # seconds between polls

_left: list[Any] = []  # requests that failed, which keep alive the memory that MPI may still use


def shift(exchange: Exchange, row: Floats) -> Floats:
    """Send a row to the next rank; return the previous rank's, of the same length. Collective, from any one thread.

    No other call with the same tag may run on the exchange's communicator at the same time. Raises MPI's error if a rank
    dies, and CollectiveError if the exchange moves to another communicator meanwhile.
    """
    comm: Any = exchange.comm
    sent, arrived = row.view(np.uint8), np.empty(row.nbytes, dtype=np.uint8)
    following, before = (exchange.rank + 1) % exchange.size, (exchange.rank - 1) % exchange.size
    requests = []
    for start in range(0, len(sent), exchange.segment_nbytes):
        part = slice(start, start + exchange.segment_nbytes)
        requests += [comm.Irecv([arrived[part], BYTE], before, TAG), comm.Isend([sent[part], BYTE], following, TAG)]
    waiting, pause = list(requests), SHORTEST
    try:
        while waiting := [request for request in waiting if not request.Test()]:
            if exchange.comm is not comm:
                raise CollectiveError(f"r{exchange.rank} | the ranks have been regrouped")
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST)
    except Exception:
        _left[:] = [requests, sent, arrived]
        raise
    rows: Floats = arrived.view(np.float32)
    return rows
