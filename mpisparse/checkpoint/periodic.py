"""Checkpoints of a user's own training loop: at intervals, and when the job must stop; resumed when it starts again."""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpisparse.comm.agreement import on_all
from mpisparse.comm.exchange import Exchange
from mpisparse.comm.stop_together import STOP_BEFORE, agree, listen
from mpisparse.errors import CheckpointError, ConfigurationError
from mpisparse.stopping import INTERRUPTED, StopRequest, ignore

Save = Callable[..., Path]
Load = Callable[..., int | None]


class Periodic:
    """Counts the steps of a loop and checkpoints; made by mpisparse.checkpoint.every().

    step: how many steps are done, in this start of the job and earlier ones. extra: this rank's own values, restored from
    the checkpoint; what you put into it is saved with the next one.
    """

    def __init__(
        self, save: Save, load: Load, directory: Path, sync: Any, *, steps: int | None, seconds: float | None,
        stop_before: float,
    ) -> None:  # fmt: skip
        self._save, self._directory = save, directory
        self._exchange: Exchange = sync._exchange if sync is not None else Exchange()
        self._owned = sync is None
        self._every, self._seconds, self._stop_before = steps, seconds, stop_before
        try:
            self._check()
        except ConfigurationError:
            if self._owned:
                self._exchange.close()
            raise
        self._listener = listen()
        self._last = time.monotonic()
        self.extra: dict[str, Any] = {}
        found = load(directory, extra=self.extra)
        self.step = self._saved = found or 0
        if found is not None:
            self._say(f"continues from step {found}, {directory}")

    def _check(self) -> None:
        """Raise on all ranks if the intervals make no sense on one, or differ. Collective."""

        def check() -> None:
            check_intervals(self._every, self._seconds, self._stop_before)
            StopRequest.check_thread()

        on_all(self._exchange, check)
        texts = self._exchange.gather_texts(f"steps={self._every!r}, seconds={self._seconds!r}, directory={self._directory}")
        other = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
        if other is not None:
            raise ConfigurationError(
                f"r{self._exchange.rank} | the ranks differ: rank 0 has {texts[0]}, rank {other} has {texts[other]}"
            )

    def step_done(self) -> None:
        """Count a step; checkpoint if one is due. Collective, call it on every rank after each optimizer step.

        If a signal or the time limit of the Slurm job asks any rank to stop, all ranks checkpoint and leave with exit
        code 85. Costs one small message. A checkpoint that cannot be written warns, and training goes on, unless
        it is the last one.
        """
        self.step += 1
        late = self._seconds is not None and self._exchange.rank == 0 and time.monotonic() - self._last >= self._seconds
        stop, late = agree(self._exchange, [self._listener.asked(self._exchange.rank, self._stop_before), late])
        if stop:
            self._stop()
        if late or (self._every is not None and self.step % self._every == 0):
            try:
                self.save()
            except CheckpointError as error:
                self._last = time.monotonic()  # a full disk is not written to in every step
                if self._exchange.rank == 0:
                    warnings.warn(str(error), stacklevel=2)

    def save(self) -> Path:
        """Write a checkpoint now; collective. Raises CheckpointError on all ranks if any cannot write."""
        path = self._save(self._directory, step=self.step, extra=self.extra)
        self._saved, self._last = self.step, time.monotonic()
        return path

    def finish(self) -> None:
        """Write the last checkpoint, unless the last step has one; collective. Call it after the loop."""
        if self._saved != self.step:
            self.save()
        if self._owned:
            self._exchange.close()

    def _stop(self) -> None:
        path = self.save()
        self._say(f"{self._listener.why}; start the same command again to continue from step {self.step}, {path}")
        ignore()  # srun and mpirun end all ranks when the first one leaves; let each leave with its own code
        sys.exit(INTERRUPTED)

    def _say(self, text: str) -> None:
        if self._exchange.rank == 0:
            with contextlib.suppress(OSError):  # the reader of the output may be gone
                print(f"mpisparse: {text}", file=sys.stderr, flush=True)


def check_intervals(steps: Any, seconds: Any, stop_before: Any) -> None:
    """Raise ConfigurationError unless intervals make sense."""
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise ConfigurationError(f"steps must be a whole number >= 1, or None, got {steps!r}")
    for name, value, least in (("seconds", seconds, "above 0"), ("stop_before", stop_before, "0 or more")):
        if value is None and name == "seconds":
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not (value > 0 or (value == 0 and name == "stop_before")):
            raise ConfigurationError(f"{name} must be a number {least}, got {value!r}")


__all__ = ["STOP_BEFORE", "Periodic", "check_intervals"]
