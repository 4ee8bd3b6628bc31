"""Work beside the training loop: one thread, jobs in the order in which they come, within a share of the cores.

When a result is taken is the caller's affair, and so what comes of it does not depend on how fast the thread is.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from mpisparse.errors import ConfigurationError

Job = TypeVar("Job")
Result = TypeVar("Result")


class PredictorError(ConfigurationError):
    """What ended the thread; a checkpoint and load_state_dict() share errors of this kind with all ranks."""


class Background(Generic[Job, Result]):
    """Runs work(job) for every job; then rests so long that it uses `cores` on average, unless somebody waits for it."""

    def __init__(self, work: Callable[[Job], Result], cores: float) -> None:
        self.seconds = 0.0  # of CPU time used
        self.failure: BaseException | None = None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Result | None] = queue.SimpleQueue()
        self._hurry = threading.Event()
        self._work = work
        self._cores = cores
        self._thread: threading.Thread | None = None
        self._ended = False

    def submit(self, job: Job) -> None:
        """Give the thread a job; it is started with the first."""
        if self._thread is None:
            # The thread knows this object only weakly: when nobody else knows it any more, the thread is told to end.
            args = (weakref.ref(self), self._work, self._jobs, self._results, self._hurry, self._cores)
            self._thread = threading.Thread(target=_run, args=args, name="mpisparse-predictor", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        self._jobs.put(job)

    def take(self) -> Result:
        """The next result, in the order of the jobs; waits for it. Raises PredictorError if the thread has ended."""
        result = None
        if not self._ended:
            self._hurry.set()
            result = self._results.get()
            self._hurry.clear()
        if result is None:
            self._ended = True
            raise PredictorError(self.trouble) from self.failure
        return result

    @property
    def trouble(self) -> str | None:
        """What ended the thread, in words; None if nothing did."""
        return None if self.failure is None else f"the predictor failed: {type(self.failure).__name__}: {self.failure}"

    def close(self) -> None:
        """End the thread when it has done its jobs."""
        if self._thread is not None and self._thread.is_alive():
            self._hurry.set()
            self._jobs.put(None)
            self._thread.join()
            self._hurry.clear()
        self._thread = None


def _run(
    owner: weakref.ref[Background[Any, Any]],
    work: Callable[[Any], Any],
    jobs: queue.SimpleQueue[Any],
    results: queue.SimpleQueue[Any],
    hurry: threading.Event,
    cores: float,
) -> None:
    while (job := jobs.get()) is not None:
        wall, cpu = time.perf_counter(), time.thread_time()
        result, failure = None, None
        try:
            result = work(job)
        except BaseException as error:  # whatever it is, the training loop must hear of it
            failure = error
        used = time.thread_time() - cpu
        known = owner()
        if known is None:
            return
        known.seconds += used
        known.failure = failure
        del known
        results.put(result)
        if failure is not None:
            return
        hurry.wait(max(0.0, used / cores - (time.perf_counter() - wall)))
