"""Runs that differ only by their seed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mpisparse.runtime.report.run import Run

FREE = ("seed", "out")  # settings that may differ within a group; every run has its own directory
ENDING = re.compile(r"[\W_]*(?:seed|s)?[\W_]*$", re.IGNORECASE)


@dataclass(frozen=True)
class Group:
    """Runs by their place, and a name for all of them."""

    name: str
    runs: tuple[int, ...]


def seed_groups(runs: Sequence[Run]) -> list[Group]:
    """Divide runs into groups of equal settings but for the seed; a run without settings is a group of its own."""
    by_settings: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        others = sorted((name, repr(value)) for name, value in run.settings.items() if name not in FREE)
        by_settings.setdefault(repr(others) if others else f"run {i}", []).append(i)
    names = [_name([runs[i] for i in members]) for members in by_settings.values()]
    return [
        Group(name if names.count(name) == 1 else f"{name} ({i + 1})", tuple(members))
        for i, (name, members) in enumerate(zip(names, by_settings.values(), strict=True))
    ]


def _name(runs: Sequence[Run]) -> str:
    """Name a group by what its runs' names begin with, else by their scheme."""
    if len(runs) == 1:
        return runs[0].name
    first, last = min(run.name for run in runs), max(run.name for run in runs)
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    common = ENDING.sub("", first[:same])
    different = len({repr(run.settings.get("seed")) for run in runs}) == len(runs)
    return f"{common or runs[0].settings.get('scheme', 'runs')}, {len(runs)} {'seeds' if different else 'runs'}"
