"""Runs what a planted bug may make crash or hang, in a process of its own."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable

PATIENCE = 600  # seconds


def survives(run: Callable[[], None]) -> bool:
    """Tell whether a function returns; it may also fail, write anywhere or never end."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        signal.alarm(PATIENCE)
        try:
            run()
        except BaseException:  # whatever a damaged heap raises: nothing may leave this copy of the test's process
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return status == 0
