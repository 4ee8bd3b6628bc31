"""Checkpoints of a run: written at once or in the background. One that fails does not end the run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from mpisparse import checkpoint
from mpisparse.comm.survival import together
from mpisparse.errors import CheckpointError, LockError
from mpisparse.runtime.journal import Journal
from mpisparse.runtime.lock import RunLock
from mpisparse.runtime.parts import RunParts
from mpisparse.runtime.run_state import RunState
from mpisparse.runtime.workloads.split import split_of


class RunCheckpoints:
    """Writes checkpoints into a run's directory, as long as the run holds its lock."""

    def __init__(self, parts: RunParts, journal: Journal, lock: RunLock | None) -> None:
        """`lock`: that of the run's directory, on the rank that holds it."""
        self.parts, self.journal, self.lock = parts, journal, lock
        self.failed = False  # whether the last checkpoint could not be written
        self._saving: checkpoint.Saving | None = None
        self._saved: checkpoint.Saving | None = None
        self._path = Path()  # of the last one

    @property
    def written(self) -> bool:
        """Whether this rank has nothing left to write. Local."""
        return self._saving is None or self._saving.written

    def save(self, state: RunState, changes: list[str], *, wait: bool) -> None:
        """Begin a checkpoint; finish it too, unless it may be written in the background. Collective."""
        self.finish()
        self.check_lock()
        settings, sync = self.parts.settings, self.parts.sync
        extra: dict[str, Any] = state.to_extra()
        extra |= {"settings": dataclasses.asdict(settings), "changes": changes}
        extra["split"] = split_of(self.parts.data, settings.seed)
        background = settings.background and not wait

        def attempt() -> None:
            self._saving = checkpoint.begin_save(
                Path(settings.out) / "checkpoints", step=state.step, model=self.parts.model,
                optimizer=self.parts.optimizer, sync=sync, extra=extra, keep=settings.keep, background=background,
                last=self._saved, driver=settings.driver,
            )  # fmt: skip
            if not background:
                self._complete()

        try:
            together(sync._exchange, attempt)
        except CheckpointError as error:
            self._fail(error)
            return
        if not background:
            self._done()

    def finish(self) -> None:
        """Complete the checkpoint that is being written, if any. Collective."""
        if self._saving is None:
            return
        try:
            self._complete()
        except CheckpointError as error:
            self._fail(error)
            return
        self._done()

    def _complete(self) -> None:
        """Complete a checkpoint if the run still holds its lock. Collective."""
        self.check_lock()
        assert self._saving is not None
        self._saved, self._saving = self._saving, None
        self._path = self._saved.finish()

    def _done(self) -> None:
        self.failed = False
        self.journal.event("checkpoint", str(self._path))

    def _fail(self, error: CheckpointError) -> None:
        self.failed = True
        self.journal.event("checkpoint failed", str(error))

    def check_lock(self) -> None:
        """Raise LockError on all ranks if another run has taken over the directory. Collective."""
        exchange = self.parts.sync._exchange
        together(exchange, lambda: exchange.raise_together(self.lock.loss() if self.lock is not None else None, LockError))

    def abandon(self) -> None:
        """Give up the checkpoint that is being written, after an error. Local."""
        if self._saving is not None:
            self._saving.abandon()
