"""metrics.jsonl: one JSON object a line, null for what is not finite; only rank 0 writes."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class MetricsFile:
    """Appends lines; a line that a killed run left unfinished is cut off first."""

    def __init__(self, path: Path) -> None:
        if path.exists():
            content = path.read_bytes()
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                with open(path, "r+b") as file:
                    file.truncate(whole)
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - closed by close()

    def write(self, kind: str, **fields: Any) -> None:
        """Append one line."""
        self._file.write(json.dumps(finite({"kind": kind, **fields}), allow_nan=False) + "\n")

    def close(self) -> None:
        """Flush and close."""
        self._file.close()


def finite(value: Any) -> Any:
    """A value as JSON can say it: None in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def spread(values: NDArray[np.float64]) -> dict[str, float]:
    """Least, mean and greatest over ranks."""
    return {"min": float(values.min()), "mean": float(values.mean()), "max": float(values.max())}


def step_fields(stats: Any, phases: list[str], rows: NDArray[np.float64]) -> dict[str, Any]:
    """The fields of a step's line; rows[r] is rank r's loss, bytes sent, bytes received, and seconds by phase."""
    shown = (
        "density",
        "set_density",
        "sent_density",
        "threshold",
        "selected",
        "imbalance",
        "reselected",
        "refined",
        "skipped",
        "workloads",
        "borders",
        "details",
        "speculation",
    )
    record = {key: value for key, value in dataclasses.asdict(stats).items() if key in shown and value is not None}
    return {
        **record,
        "loss": spread(rows[:, 0]),
        "bytes_sent": spread(rows[:, 1]),
        "bytes_received": spread(rows[:, 2]),
        "seconds": {phase: spread(rows[:, 3 + i]) for i, phase in enumerate(phases)},
    }
