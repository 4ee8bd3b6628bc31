"""Results on their way: a thread takes parcels through the ranks while the next steps are computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from mpisparse.schemes.speculative.message import Delivery, Parcel, Result


class InFlight:
    """Parcels and results in the order of their steps. One thread has its own communicator and carries one at a time.

    threaded: False carries each parcel when it is sent, where MPI does not allow threads: the same results, no overlap.
    """

    def __init__(self, delivery: Delivery, staleness: int, *, threaded: bool) -> None:
        self.delivery = delivery
        self.staleness = staleness
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="mpisparse-exchange") if threaded else None
        self.waiting: deque[Future[Result]] = deque()

    def __len__(self) -> int:
        return len(self.waiting)

    def send(self, parcel: Parcel) -> None:
        """Set a parcel on its way."""
        if self.thread is not None:
            self.waiting.append(self.thread.submit(self.delivery.run, parcel))
        else:
            self.waiting.append(_arrived(self.delivery.run(parcel)))

    def due(self) -> Result | None:
        """The result whose time has come, however early it arrived; waits for it if it has not. None in the first steps."""
        return self.waiting.popleft().result() if len(self.waiting) > self.staleness else None

    def oldest(self) -> Result | None:
        """The next result, due or not; None when nothing is on its way."""
        return self.waiting.popleft().result() if self.waiting else None

    def results(self) -> list[Result]:
        """All results on their way, when they have arrived; they stay."""
        return [future.result() for future in self.waiting]

    def replace(self, results: Sequence[Result]) -> None:
        """Have these on the way and no others; what is on its way is waited for first, as the other ranks are in it too."""
        wait(self.waiting)
        self.waiting = deque(map(_arrived, results))

    def close(self) -> None:
        """Wait for what is on its way and end the thread; collective."""
        if self.thread is not None:
            self.thread.shutdown(wait=True)
        self.waiting.clear()


def _arrived(result: Result) -> Future[Result]:
    future: Future[Result] = Future()
    future.set_result(result)
    return future
