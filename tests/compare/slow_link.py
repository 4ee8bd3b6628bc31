"""A transport each of whose collectives takes longer, as over a link with a long way; for any version of mpisparse."""

from __future__ import annotations

import time
from typing import Any

BLOCKING = ("Allgather", "Allgatherv", "Alltoallv", "Allreduce")


class Late:
    """A request that takes longer to complete."""

    def __init__(self, request: Any, link: SlowTransport) -> None:
        self.request, self.link = request, link

    def Wait(self) -> None:  # noqa: N802 - as mpi4py names it
        self.link.wait()
        self.request.Wait()

    def Test(self) -> bool:  # noqa: N802
        return bool(self.request.Test())


class SlowTransport:
    """The transport of an exchange, each of whose collectives takes so many seconds longer. waits: how many did."""

    def __init__(self, transport: Any, delay: float) -> None:
        self.transport, self.delay, self.waits = transport, delay, 0

    def wait(self) -> None:
        """Take longer."""
        self.waits += 1
        time.sleep(self.delay)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.transport, name)
        if name == "Iallgather":
            return lambda *buffers: Late(call(*buffers), self)
        if name not in BLOCKING:
            return call

        def slow(*buffers: Any, **options: Any) -> None:
            self.wait()
            call(*buffers, **options)

        return slow
