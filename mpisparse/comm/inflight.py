"""Deliveries in flight: a thread carries them out while the next steps are computed."""

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
    """A thread that the end of the program does not wait for."""

    def __init__(self) -> None:
        self.tasks: SimpleQueue[tuple[Callable[[Outgoing], Arrived], Outgoing, Future[Arrived]] | None] = SimpleQueue()
        self.thread = Thread(target=self._work, name=THREAD, daemon=True)
        self.thread.start()

    def submit(self, carry: Callable[[Outgoing], Arrived], outgoing: Outgoing) -> Future[Arrived]:
        """Queue a delivery."""
        future: Future[Arrived] = Future()
        self.tasks.put((carry, outgoing, future))
        return future

    def shutdown(self, *, wait: bool) -> None:
        """End the thread when the queue is empty."""
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
    """Deliveries in flight and their results, in the order of the steps. One thread carries out one at a time.

    threaded: False, if MPI allows no threads, carries out each delivery when it is sent: the same results without overlap.
    leaves: the end of the program does not wait for deliveries in flight, because other ranks may not have sent theirs.
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
        """Wait for the result to apply before the next delivery, however early it arrived; None in the first steps."""
        return self.waiting.popleft().result() if len(self.waiting) >= self.staleness else None

    def oldest(self) -> Arrived | None:
        """Wait for the next result, due or not; None when nothing is in flight."""
        return self.waiting.popleft().result() if self.waiting else None

    def results(self) -> list[Arrived]:
        """Wait for all results in flight; they stay in flight."""
        return [future.result() for future in self.waiting]

    def replace(self, results: Sequence[Arrived]) -> None:
        """Replace the deliveries in flight by these results. Waits for the old ones first: other ranks take part in them."""
        wait(self.waiting)
        self.waiting = deque(map(_done, results))

    def quiet(self) -> None:
        """Wait until the thread is idle, whether deliveries succeeded or not."""
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
