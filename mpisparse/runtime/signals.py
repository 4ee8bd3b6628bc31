"""Signals that ask a run to stop: the first sets a flag that ranks agree on at the next step; the second kills."""

from __future__ import annotations

import os
import signal
from types import FrameType

from mpisparse.errors import ConfigurationError

INTERRUPTED = 85  # exit code: stopped by a signal after a checkpoint; the same command continues
SIGNALS = ("USR1", "TERM")


def _number(name: str) -> signal.Signals:
    try:
        return signal.Signals[f"SIG{name.upper().removeprefix('SIG')}"]
    except KeyError:
        raise ConfigurationError(f"MPISPARSE_SIGNALS: {name!r} is no signal; expected names like USR1,TERM") from None


class StopRequest:
    """Whether this rank was asked to stop, by one of the signals in MPISPARSE_SIGNALS (default USR1,TERM)."""

    def __init__(self) -> None:
        self.asked = False
        names = os.environ.get("MPISPARSE_SIGNALS", ",".join(SIGNALS)).split(",")
        self.numbers = [_number(name.strip()) for name in names if name.strip()]
        self.previous = {number: signal.signal(number, self._note) for number in self.numbers}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.asked = True

    def restore(self) -> None:
        """Restore the earlier signal handlers."""
        for number, handler in self.previous.items():
            signal.signal(number, handler)


def ignore() -> None:
    """Ignore the signals, so that this process exits with its own code."""
    for name in SIGNALS:
        signal.signal(_number(name), signal.SIG_IGN)
