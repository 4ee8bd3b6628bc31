"""How long the parts of each step took, by the clock of this rank."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import numpy as np

from mpisparse.arrays import Doubles


class Times:
    """Of each step: seconds of computation, of waiting for other ranks, and of the exchange.

    A step that does not follow another one at once has none: its computation is not known. Where not every step exchanges,
    they are of the mean step from one exchange to the next.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[float, float, float]] = []
        self._computing = self._ended = self._called = self._agreed = self._before = self._waited = 0.0

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """What is done inside belongs to the exchange, though this rank computes on after it."""
        began = time.perf_counter()
        yield
        self._before += time.perf_counter() - began

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, this rank waits for others, though it computes on after it."""
        began = time.perf_counter()
        yield
        self._waited += time.perf_counter() - began

    def called(self) -> None:
        """This rank has computed, and waits for the others."""
        self._called = time.perf_counter()
        self._computing = self._called - self._ended - self._before - self._waited if self._ended else 0.0
        self._ended = 0.0

    def agreed(self) -> None:
        """All ranks are in the step."""
        self._agreed = time.perf_counter()

    def exchanged(self, steps: int) -> None:
        """The exchange of so many steps is done."""
        if self._computing and self._agreed:
            waiting = self._agreed - self._called + self._waited
            moving = time.perf_counter() - self._agreed + self._before
            self._rows.append((self._computing / steps, waiting / steps, moving / steps))
        self._agreed = self._before = self._waited = 0.0

    def __len__(self) -> int:
        """The number of exchanges since the last clear()."""
        return len(self._rows)

    def ended(self) -> None:
        """From now on this rank computes."""
        self._ended = time.perf_counter()

    def interrupted(self) -> None:
        """What comes before the next step is more than computation."""
        self._ended = 0.0

    def medians(self) -> Doubles:
        """The medians of the steps since the last clear(); zeros if there was none."""
        return np.asarray(np.median(self._rows or [(0.0, 0.0, 0.0)], axis=0))

    def clear(self) -> None:
        """Forget the steps."""
        self._rows.clear()
