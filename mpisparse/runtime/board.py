"""TensorBoard events of a run, written by rank 0. A full disk loses some of them but does not end the run."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from pathlib import Path
from typing import Any

ROOM_NBYTES = 1 << 20  # that must be free before a new event file is opened


class Board:
    """Writes scalars. After an error it warns once and drops them until there is room for a new file."""

    def __init__(self, directory: Path) -> None:
        """Raise ImportError if TensorBoard is not installed."""
        from torch.utils.tensorboard import SummaryWriter

        self._make: Any = SummaryWriter
        self._directory = directory
        self._warned = False
        self._writer: Any = self._make(str(directory))

    def add(self, values: dict[str, float], step: int) -> None:
        """Add the scalars of a step."""
        try:
            if self._writer is None:
                if shutil.disk_usage(self._directory).free < ROOM_NBYTES:
                    return
                self._writer = self._make(str(self._directory))
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        except OSError as error:
            self.close()
            if not self._warned:
                self._warned = True
                warnings.warn(f"{self._directory}: {error.strerror}; events are dropped until there is room", stacklevel=2)

    def close(self) -> None:
        """Flush and close; what the disk has no room for is lost."""
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()
        self._writer = None
