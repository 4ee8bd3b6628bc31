"""Where a run of mpisparse train is, by what it adds to its checkpoints."""

from __future__ import annotations

import math
from typing import Any

TRAINED = {"seconds", "received", "dense", "epoch", "offset", "metric"}


def check_place(extra: dict[str, Any]) -> None:
    """Raise ValueError unless the numbers that train adds to a checkpoint, if it did, are ones that it could have."""
    if not extra.keys() >= TRAINED:
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
