"""A copy of what each rank has not sent, on the next rank: if a rank dies, the next one goes on with the copy.

The copy is refreshed in the background, a part of it with each step, so that all of it is new within `every` steps. What was
delivered since is zero in it: the others have that already. So what is lost with a rank is what it was given in the
last `every` steps, and what its codec has left of what was delivered.
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
    from mpisparse.select.scorers import Scorer


class Mirror:
    """Keeps the copy of the rank before this one. copy: of a vector of n elements. nbytes: received since settled()."""

    def __init__(self, exchange: Exchange, scorer: Scorer, n: int, every: int) -> None:
        self.exchange = exchange
        self.scorer = scorer
        self.every = every
        self.copy: Floats = np.zeros(n, dtype=np.float32)
        self.nbytes = 0
        self.steps = 0
        self._flight: InFlight[Floats, Floats] = InFlight(self._carry, 0, threaded=True)
        self._parts: deque[tuple[int, int] | None] = deque()  # which parts are on their way; None: no longer wanted

    def _carry(self, row: Floats) -> Floats:
        return shift(self.exchange, row)

    def refresh(self, *, whole: bool = False) -> None:
        """Begin to send a part of what this rank has not sent, or all of it, and to receive as much; local, on all ranks."""
        if self.exchange.size == 1:
            return
        n, part = len(self.copy), self.steps % self.every
        self.steps += not whole
        lo, hi = (0, n) if whole else (part * n // self.every, (part + 1) * n // self.every)
        self._parts.append((lo, hi))
        self._flight.send(np.array(self.scorer.owing(lo, hi), dtype=np.float32))

    def arrive(self) -> None:
        """Wait for what is on its way, before anything more is delivered; collective."""
        while (row := self._flight.oldest()) is not None:
            part = self._parts.popleft()
            self.nbytes += row.nbytes
            if part is not None:
                self.copy[slice(*part)] = row

    def delivered(self, union: Any) -> None:
        """All ranks have received these elements: an ascending index, a Subset, or the range of all; local."""
        if isinstance(union, range):
            self.copy[:] = 0.0
        else:
            self.copy[union if isinstance(union, np.ndarray) else union.index(0, len(union))] = 0.0

    def settled(self) -> int:
        """The bytes received since the last call; local. As many were sent."""
        nbytes, self.nbytes = self.nbytes, 0
        return nbytes

    def restart(self) -> None:
        """All ranks have changed what they have not sent: copy it anew. Local, on all ranks."""
        self._parts = deque([None] * len(self._parts))
        self.copy[:] = 0.0
        self.refresh(whole=True)

    # After a death

    def kept(self, living: Sequence[int], rank: int, size: int) -> float:
        """The norm of the copies of dead ranks that the others have; collective.

        living: which ranks of before live. rank, size: of this rank, before.
        """
        held = 0.0 if (rank - 1) % size in living else float(np.linalg.norm(self.copy))
        norms = self.exchange.allgather(np.array([held], dtype=np.float64).view(np.int64))
        return float(np.linalg.norm(norms.view(np.float64)))

    def regroup(self, living: Sequence[int], rank: int, size: int) -> None:
        """Go on with the copy of a dead rank as one's own; copy everything anew among the living. Local, on all ranks.

        The arguments are those of kept().
        """
        self._flight.replace([])
        self._parts.clear()
        if (rank - 1) % size not in living:
            self.scorer.take_over(self.copy)
        self.restart()

    def close(self) -> None:
        """End the thread."""
        self._flight.close()
