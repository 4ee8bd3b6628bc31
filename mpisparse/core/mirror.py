"""A copy of each rank's residual on the next rank: if a rank dies, the next one goes on with the copy.

The copy is refreshed in the background, a part of it in each step, so that all of it is renewed within `every` steps.
Elements delivered since are set to zero in it, because the other ranks have received them. So a death loses what the
rank accumulated in the last `every` steps, and its codec's error on what was delivered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpisparse.comm.inflight import InFlight
from mpisparse.comm.shift import shift

if TYPE_CHECKING:
    from mpisparse.arrays import Floats
    from mpisparse.comm.exchange import Exchange
    from mpisparse.core.records import Works


class Mirror:
    """Keeps a copy of the previous rank's residual, on the host. nbytes: bytes received since settled()."""

    def __init__(self, exchange: Exchange, works: Works, every: int) -> None:
        self.exchange = exchange
        self.scorer, self.backend = works.scorer, works.backend
        self.every = every
        self.copy: Floats = np.zeros(len(works.acc), dtype=np.float32)
        self.nbytes = 0
        self.steps = 0
        self._flight: InFlight[Floats, Floats] = InFlight(self._carry, 0, threaded=True)
        self._parts: deque[tuple[int, int] | None] = deque()  # the parts in flight; None: no longer wanted

    def _carry(self, row: Floats) -> Floats:
        return shift(self.exchange, row)

    def refresh(self, *, whole: bool = False) -> None:
        """Start to send a part of this rank's residual, or all of it, and to receive as much; local, on all ranks."""
        if self.exchange.size == 1:
            return
        n, part = len(self.copy), self.steps % self.every
        self.steps += not whole
        lo, hi = (0, n) if whole else (part * n // self.every, (part + 1) * n // self.every)
        self._parts.append((lo, hi))
        self._flight.send(np.array(self.backend.to_host(self.scorer.owing(lo, hi)), dtype=np.float32))

    def arrive(self) -> None:
        """Wait for the parts in flight, before anything more is delivered; collective."""
        while (row := self._flight.oldest()) is not None:
            part = self._parts.popleft()
            self.nbytes += row.nbytes
            if part is not None:
                self.copy[slice(*part)] = row

    def delivered(self, union: Any) -> None:
        """Clear the elements that all ranks have received: an ascending index, a Subset, or the range of all. Local."""
        union = self.backend.to_host(union)
        if isinstance(union, range):
            self.copy[:] = 0.0
        else:
            self.copy[union if isinstance(union, np.ndarray) else union.index(0, len(union))] = 0.0

    def settled(self) -> int:
        """The bytes received since the last call; local. As many were sent."""
        nbytes, self.nbytes = self.nbytes, 0
        return nbytes

    def restart(self) -> None:
        """Copy everything anew, because all ranks have changed their residuals. Local, on all ranks."""
        self._parts = deque([None] * len(self._parts))
        self.copy[:] = 0.0
        self.refresh(whole=True)

    # After a death

    def kept(self, living: Sequence[int], rank: int, size: int) -> float:
        """The norm of the copies that living ranks hold of dead ones; collective.

        living: the former ranks that live. rank, size: this rank and the number of ranks before the death.
        """
        held = 0.0 if (rank - 1) % size in living else float(np.linalg.norm(self.copy))
        norms = self.exchange.allgather(np.array([held], dtype=np.float64).view(np.int64))
        return float(np.linalg.norm(norms.view(np.float64)))

    def regroup(self, living: Sequence[int], rank: int, size: int) -> None:
        """Take over the copy of a dead rank, and copy everything anew among the living. Local, on all ranks.

        The arguments are those of kept().
        """
        self._flight.replace([])
        self._parts.clear()
        if (rank - 1) % size not in living:
            self.scorer.take_over(self.backend, self.copy)
        self.restart()

    def close(self) -> None:
        """End the thread."""
        self._flight.close()
