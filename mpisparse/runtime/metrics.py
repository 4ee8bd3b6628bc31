"""metrics.jsonl: one JSON object per line, null for non-finite numbers. Only rank 0 writes it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mpisparse.arrays import Doubles
from mpisparse.measures import in_order

BYTES = ("bytes_sent", "bytes_received", "index_bytes", "control_bytes")
OF_RANKS = ("step", "seconds", *BYTES)  # fields of Stats that the line has in another form


class MetricsFile:
    """Appends complete lines; first removes a partial line that a killed run left.

    A line that cannot be written, for example on a full disk, is dropped with one warning. As soon as writing works
    again, an event says how many lines are missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        content = path.read_bytes()
        self._end = content.rfind(b"\n") + 1  # of the last complete line
        self._torn = self._end < len(content)
        self._dropped = 0
        self._why = ""

    def write(self, kind: str, **fields: Any) -> None:
        """Append one line, or drop it."""
        lines: list[dict[str, Any]] = [{"kind": kind, **fields}]
        if self._dropped:
            when: dict[str, Any] = {key: fields[key] for key in ("step", "time") if key in fields}
            lines.insert(0, {"kind": "event", **when, "event": "metrics dropped", "text": f"{self._dropped}: {self._why}"})
        text = "".join(json.dumps(finite(line), allow_nan=False) + "\n" for line in lines)
        try:
            self._append(text.encode())
            self._dropped = 0
        except OSError as error:
            if not self._why:
                self._why = error.strerror or str(error)
                warnings.warn(f"{self._path}: {self._why}; metrics are dropped until they can be written", stacklevel=2)
            self._dropped += 1

    def _append(self, text: bytes) -> None:
        """Write the whole text, or leave the file as it was."""
        if self._torn:
            self._cut()
        self._torn, begin = True, os.fstat(self._file.fileno()).st_size
        self._end = begin
        try:
            view = memoryview(text)
            while view:
                view = view[self._file.write(view) :]
            self._torn = False
        except OSError:
            with contextlib.suppress(OSError):
                self._cut()
            raise

    def _cut(self) -> None:
        """Remove a partial line."""
        os.ftruncate(self._file.fileno(), self._end)
        self._torn = False

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._file.close()


def write_whole(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees the old text or the new one."""
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def finite(value: Any) -> Any:
    """Replace non-finite numbers by None, and NumPy scalars by Python ones, for JSON."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def spread(values: Doubles) -> dict[str, float]:
    """Return minimum, mean and maximum over ranks."""
    return {"min": float(values.min()), "mean": float(values.mean()), "max": float(values.max())}


class StepRows:
    """Gathers numbers of a step from all ranks, and the seconds of every phase that any rank has measured.

    Phases are not known in advance. A rank that measures a new one announces it in its row, and all ranks add it together.
    """

    def __init__(self, gather: Callable[[Doubles], Doubles], gather_texts: Callable[[str], list[str]]) -> None:
        self._gather = gather
        self._gather_texts = gather_texts
        self.phases: list[str] = []

    def gather(self, numbers: list[float], seconds: dict[str, float]) -> Doubles:
        """Return one row per rank: the numbers, then the seconds in the order of `phases`. Collective."""
        new = set(seconds) - set(self.phases)
        rows = self._gather_row(len(new), numbers, seconds)
        if rows[:, 0].any():
            announced = self._gather_texts(json.dumps(sorted(new)))
            self.phases = in_order([*self.phases, *(name for text in announced for name in json.loads(text))])
            rows = self._gather_row(0, numbers, seconds)
        return rows[:, 1:]

    def _gather_row(self, new: int, numbers: list[float], seconds: dict[str, float]) -> Doubles:
        row = [new, *numbers, *(seconds.get(phase, 0.0) for phase in self.phases)]
        return self._gather(np.array(row, dtype=np.float64))


def step_fields(stats: Any, phases: list[str], by_rank: Doubles) -> dict[str, Any]:
    """Return a step's fields: its stats, and per-rank numbers as minimum, mean and maximum.

    by_rank[r] has rank r's loss, the BYTES, and seconds per phase.
    """
    record = {key: value for key, value in dataclasses.asdict(stats).items() if key not in OF_RANKS and value is not None}
    return {
        **record,
        "loss": spread(by_rank[:, 0]),
        **{name: spread(by_rank[:, 1 + i]) for i, name in enumerate(BYTES)},
        "seconds": {phase: spread(by_rank[:, 1 + len(BYTES) + i]) for i, phase in enumerate(phases)},
    }
