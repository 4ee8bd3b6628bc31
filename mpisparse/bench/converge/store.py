"""The directory of bench converge: a file for each finished run, written whole or not at all, and the common settings."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpisparse.bench.converge.plan import ConvergePlan, Record, Run
from mpisparse.errors import ConfigurationError

SETTINGS, RUNS = "settings.json", "runs"
NEEDED = ("case", "definition", "lr", "seed", "diverged")  # of the record of a run


class Store:
    """Results on disk. A run that was killed leaves nothing."""

    def __init__(self, plan: ConvergePlan) -> None:
        self.plan = plan
        self.runs = plan.out / RUNS
        try:
            self.runs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"cannot write to {plan.out}: {error.strerror}; choose another --out") from error
        self._check_settings(json.loads(json.dumps(plan.common())))

    def _check_settings(self, now: dict[str, Any]) -> None:
        file = self.plan.out / SETTINGS
        if not file.exists():
            write_whole(file, json.dumps(now, indent=1) + "\n")
            return
        before = _read(file)
        for name in {**before, **now}:
            if before.get(name) != now.get(name):
                raise ConfigurationError(
                    f"{self.plan.out} has results with {name} {before.get(name)!r}, this bench has {now.get(name)!r}; "
                    "choose another --out, or the same settings"
                )

    def read(self) -> dict[tuple[str, float, int], Record]:
        """Return the finished runs of the plan's cases; refuse those of a case that has other options now."""
        cases = {case.name: json.loads(json.dumps(case.definition())) for case in self.plan.cases}
        done = {}
        for file in sorted(self.runs.glob("*.json")):
            record = _read(file, NEEDED)
            name = record["case"]
            if name not in cases:
                continue
            if record["definition"] != cases[name]:
                raise ConfigurationError(
                    f"{file} is a result of case {name!r} with {record['definition']}, which now has {cases[name]}; "
                    "give the new case another name, or choose another --out"
                )
            done[name, record["lr"], record["seed"]] = record
        return done

    def add(self, run: Run, record: Record) -> None:
        """Write the result of a run."""
        case, lr, seed = run.key
        label = "".join(c if c.isalnum() or c in "-_." else f"%{ord(c):x}" for c in case)
        write_whole(self.runs / f"{label}-lr-{lr:g}-seed-{seed}.json", json.dumps(record) + "\n")


def _read(file: Path, needed: Sequence[str] = ()) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found, dict) and not set(needed) - found.keys():
            return found
        why = f"it has no {min(set(needed) - found.keys())!r}" if isinstance(found, dict) else "no JSON object"
    except (OSError, ValueError) as error:
        why = str(error)
    raise ConfigurationError(f"expected what bench converge wrote in {file}: {why}; remove it, or choose another --out")


def write_whole(file: Path, text: str) -> None:
    """Write a file atomically."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise ConfigurationError(f"expected a file that can be written, got {file} ({error.strerror})") from error
