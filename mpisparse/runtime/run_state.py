"""How far a run of mpisparse train has come, and how that is stored in its checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from mpisparse.runtime.schedule import Position

KEYS = {"seconds", "received", "dense", "epoch", "offset", "metric"}  # of a checkpoint that train wrote


@dataclass
class RunState:
    """Steps done, position in the data, training time, bytes per rank, and the metric of the last evaluation.

    `dense` is what a dense all-reduce would have received by now.
    """

    step: int = 0
    position: Position = field(default_factory=Position)
    seconds: float = 0.0
    received: float = 0.0
    dense: float = 0.0
    metric: float | None = None

    def to_extra(self) -> dict[str, Any]:
        """Return what a checkpoint stores besides the step."""
        return {
            "epoch": self.position.epoch,
            "offset": self.position.offset,
            "seconds": self.seconds,
            "received": self.received,
            "dense": self.dense,
            "metric": self.metric,
        }

    @classmethod
    def from_extra(cls, step: int, extra: dict[str, Any]) -> RunState:
        """Restore the state from a checkpoint's `extra`, which `check_run_state` has accepted."""
        metric = None if extra["metric"] is None else float(extra["metric"])
        position = Position(int(extra["epoch"]), int(extra["offset"]))
        return cls(step, position, float(extra["seconds"]), float(extra["received"]), float(extra["dense"]), metric)


def check_run_state(extra: dict[str, Any]) -> None:
    """Raise ValueError if train wrote this `extra` and one of its values is impossible."""
    if not extra.keys() >= KEYS:
        return
    for name in ("epoch", "offset"):
        if type(extra[name]) is not int or not 0 <= extra[name] < 2**53:
            raise ValueError(f"{name} is {extra[name]!r}, not a whole number of at least 0")
    for name in ("seconds", "received", "dense"):
        if type(extra[name]) not in (int, float) or not 0.0 <= extra[name] < math.inf:
            raise ValueError(f"{name} is {extra[name]!r}, not a number of at least 0")
    for name, kind in (("settings", dict), ("changes", list), ("split", dict)):  # earlier versions wrote none of them
        if extra.get(name) is not None and not isinstance(extra[name], kind):
            raise ValueError(f"{name} is {extra[name]!r}, not a {kind.__name__}")
    if extra["metric"] is not None and type(extra["metric"]) not in (int, float):
        raise ValueError(f"metric is {extra['metric']!r}, not a number")
