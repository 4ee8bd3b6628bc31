"""Deliveries in flight: a thread carries them over the network while the next steps are computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

Outgoing = TypeVar("Outgoing")
Arrived = TypeVar("Arrived")


class InFlight(Generic[Outgoing, Arrived]):
    """What was sent, and what came of it, in the order of the steps. One thread carries one at a time.

    threaded: False carries each when it is sent, where MPI allows no threads: the same results without the overlap.
    """

    def __init__(self, carry: Callable[[Outgoing], Arrived], staleness: int, *, threaded: bool) -> None:
        self.carry = carry
        self.staleness = staleness
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="mpisparse-exchange") if threaded else None
        self.waiting: deque[Future[Arrived]] = deque()

    def __len__(self) -> int:
        return len(self.waiting)

    def send(self, outgoing: Outgoing) -> None:
        """Start a delivery."""
        if self.thread is not None:
            self.waiting.append(self.thread.submit(self.carry, outgoing))
        else:
            self.waiting.append(_done(self.carry(outgoing)))

    def due(self) -> Arrived | None:
        """Wait for the result that is due before the next is sent, however early it arrived; None in the first steps."""
        return self.waiting.popleft().result() if len(self.waiting) >= self.staleness else None

    def oldest(self) -> Arrived | None:
        """Wait for the next result, due or not; None when nothing is in flight."""
        return self.waiting.popleft().result() if self.waiting else None

    def results(self) -> list[Arrived]:
        """Wait for all results in flight; they stay in flight."""
        return [future.result() for future in self.waiting]

    def replace(self, results: Sequence[Arrived]) -> None:
        """Have only these in flight. Waits for the others first, because other ranks are in them too."""
        wait(self.waiting)
        self.waiting = deque(map(_done, results))

    def close(self) -> None:
        """Wait for what is in flight and end the thread; collective."""
        if self.thread is not None:
            self.thread.shutdown(wait=True)
        self.waiting.clear()


def _done(result: Arrived) -> Future[Arrived]:
    future: Future[Arrived] = Future()
    future.set_result(result)
    return future
