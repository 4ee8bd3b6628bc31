"""Deliveries in flight: a thread carries them over the network while the next steps are computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from threading import Thread
from typing import Generic, TypeVar

Outgoing = TypeVar("Outgoing")
Arrived = TypeVar("Arrived")


THREAD = "mpisparse-exchange"
ONE_THREAD = "the ranks' transport serves one thread only (with MPI: its thread level is below MPI_THREAD_MULTIPLE)"


class Leaving(Generic[Outgoing, Arrived]):
    """One thread that the end of the program does not wait for."""

    def __init__(self) -> None:
        self.tasks: SimpleQueue[tuple[Callable[[Outgoing], Arrived], Outgoing, Future[Arrived]] | None] = SimpleQueue()
        self.thread = Thread(target=self._work, name=THREAD, daemon=True)
        self.thread.start()

    def submit(self, carry: Callable[[Outgoing], Arrived], outgoing: Outgoing) -> Future[Arrived]:
        """Carry one after those before it."""
        future: Future[Arrived] = Future()
        self.tasks.put((carry, outgoing, future))
        return future

    def shutdown(self, *, wait: bool) -> None:
        """End the thread when all is carried."""
        self.tasks.put(None)
        if wait:
            self.thread.join()

    def _work(self) -> None:
        while (task := self.tasks.get()) is not None:
            carry, outgoing, future = task
            try:
                future.set_result(carry(outgoing))
            except BaseException as error:
                future.set_exception(error)
            del task, carry, outgoing, future


class InFlight(Generic[Outgoing, Arrived]):
    """What was sent, and what came of it, in the order of the steps. One thread carries one at a time.

    threaded: False carries each when it is sent, where MPI allows no threads: the same results without the overlap.
    leaves: the end of the program waits for nothing that is in flight, because other ranks may not have sent theirs.
    """

    def __init__(
        self, carry: Callable[[Outgoing], Arrived], staleness: int, *, threaded: bool, leaves: bool = False
    ) -> None:
        self.carry = carry
        self.staleness = staleness
        self.thread: Leaving[Outgoing, Arrived] | ThreadPoolExecutor | None = None
        if threaded:
            self.thread = Leaving() if leaves else ThreadPoolExecutor(1, thread_name_prefix=THREAD)
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

    def quiet(self) -> None:
        """Wait until the thread carries nothing, whatever came of it."""
        wait(self.waiting)

    def close(self) -> None:
        """Wait for what is in flight and end the thread; collective."""
        if self.thread is not None:
            self.thread.shutdown(wait=True)
        self.waiting.clear()


def _done(result: Arrived) -> Future[Arrived]:
    future: Future[Arrived] = Future()
    future.set_result(result)
    return future
