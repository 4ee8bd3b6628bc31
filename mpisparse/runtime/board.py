"""TensorBoard events of a run; a full disk costs some of them and not the run. Only rank 0 writes."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from pathlib import Path
from typing import Any

ROOM_NBYTES = 1 << 20  # free before a new file of events is begun


class Board:
    """Writes scalars; after an error what comes is dropped, with one warning, until there is room for a new file."""

    def __init__(self, directory: Path) -> None:
        """Raises ImportError without TensorBoard."""
        from torch.utils.tensorboard import SummaryWriter

        self._make: Any = SummaryWriter
        self._directory = directory
        self._warned = False
        self._writer: Any = self._make(str(directory))

    def add(self, values: dict[str, float], step: int) -> None:
        """Add scalars of a step."""
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
        """Flush and close; what finds no room is lost."""
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()
        self._writer = None
