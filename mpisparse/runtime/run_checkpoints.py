"""Checkpoints of a run: written at once or in the background. One that fails does not end the run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from mpisparse import checkpoint
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
        try:
            self._saving = checkpoint.begin_save(
                Path(settings.out) / "checkpoints", step=state.step, model=self.parts.model,
                optimizer=self.parts.optimizer, sync=sync, extra=extra, keep=settings.keep, background=background,
                last=self._saved, driver=settings.driver,
            )  # fmt: skip
        except CheckpointError as error:
            self._fail(error)
            return
        if not background:
            self.finish()

    def finish(self) -> None:
        """Complete the checkpoint that is being written, if any. Collective."""
        if self._saving is None:
            return
        self.check_lock()
        saving, self._saving = self._saving, None
        try:
            self.journal.event("checkpoint", str(saving.finish()))
            self.failed, self._saved = False, saving
        except CheckpointError as error:
            self._fail(error)

    def _fail(self, error: CheckpointError) -> None:
        self.failed = True
        self.journal.event("checkpoint failed", str(error))

    def check_lock(self) -> None:
        """Raise LockError on all ranks if another run has taken over the directory. Collective."""
        self.parts.sync._exchange.raise_together(self.lock.loss() if self.lock is not None else None, LockError)

    def abandon(self) -> None:
        """Give up the checkpoint that is being written, after an error. Local."""
        if self._saving is not None:
            self._saving.abandon()
