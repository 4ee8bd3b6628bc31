"""Asked to stop: the first signal sets a flag that ranks agree on at the next step; the second leaves at once."""

from __future__ import annotations

import os
import signal
from types import FrameType

from mpisparse.errors import ConfigurationError

INTERRUPTED = 85  # exit code: stopped by a signal, after a checkpoint; start the same command again to go on
SIGNALS = ("USR1", "TERM")


def _number(name: str) -> signal.Signals:
    try:
        return signal.Signals[f"SIG{name.upper().removeprefix('SIG')}"]
    except KeyError:
        raise ConfigurationError(f"MPISPARSE_SIGNALS names no signal {name!r}; expected names like USR1,TERM") from None


class StopRequest:
    """Whether this rank was asked to stop. MPISPARSE_SIGNALS names the signals that ask (default USR1,TERM)."""

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
        """Give the signals their earlier handlers back."""
        for number, handler in self.previous.items():
            signal.signal(number, handler)


def ignore() -> None:
    """Let no signal that asks end this process before it leaves by itself."""
    for name in SIGNALS:
        signal.signal(_number(name), signal.SIG_IGN)
