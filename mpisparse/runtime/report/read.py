"""Read run directories: config.toml, and metrics.jsonl as tables of numbers."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from mpisparse.errors import ConfigurationError
from mpisparse.runtime.report.run import Run


class RunFiles:
    """The files of a run. Metrics are read once: a second reading continues where the last one ended."""

    def __init__(self, path: Path, name: str) -> None:
        if not path.is_dir():
            what = "a file" if path.exists() else "nothing that exists"
            raise ConfigurationError(
                f"expected a run directory, got {path}, which is {what}; name the --out directory of mpisparse train"
            )
        self.path, self.metrics = path, path / "metrics.jsonl"
        self.run = Run(path, name, {})
        self._start_over()

    def state(self) -> tuple[object, ...]:
        """Return what changes whenever the files do."""
        found = [path.stat() if path.is_file() else None for path in (self.metrics, self.path / "config.toml")]
        return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) if stat else None for stat in found)

    def read(self, *, live: bool = False) -> Run:
        """Read what is new. live: the run goes on, so leave a line without an end for the next time."""
        if not self.metrics.is_file():
            raise ConfigurationError(
                f"expected {self.metrics}, which mpisparse train writes, got no such file; name a directory that holds a run"
            )
        with self.metrics.open("rb") as lines:
            if self._replaced(lines):
                self._start_over()
            lines.seek(self._at)
            self._read_lines(lines, live)
        self.run.settings = _settings(self.path / "config.toml")
        return self.run

    def _start_over(self) -> None:
        self.run = Run(self.path, self.run.name, {})
        self._at, self._count, self._first = 0, 0, b""  # bytes and lines that have been read; the first line

    def _replaced(self, lines: BinaryIO) -> bool:
        """Return whether this is another file than the one that was read: shorter, or with another beginning."""
        return lines.read(len(self._first)) != self._first or lines.seek(0, 2) < self._at

    def _read_lines(self, lines: BinaryIO, live: bool) -> None:
        """Add every line to the run. The last one may be incomplete, as the run may be active or killed."""
        broken: ConfigurationError | None = None
        for number, line in enumerate(lines, self._count + 1):
            if line.strip():
                if broken:
                    raise broken
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    broken = _damage(self.metrics, number, line)
                    continue
                if live and not line.endswith(b"\n"):
                    return
                try:
                    _add(record, self.run)
                except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
                    raise _damage(self.metrics, number, line) from error
            if not broken:
                self._first = self._first or line
                self._at, self._count = self._at + len(line), number


def open_runs(paths: Sequence[Path]) -> list[RunFiles]:
    """Find runs and give each a unique name."""
    if not paths:
        raise ConfigurationError(
            "expected at least one run directory, got none; name the --out directory of mpisparse train"
        )
    return [RunFiles(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read runs; each must have a step."""
    runs = []
    for files in open_runs(paths):
        run = files.read()
        if not len(run.steps):
            raise ConfigurationError(
                f"expected at least one step in {files.metrics}, got none; wait for the first step, leave the run out, "
                "or watch it with --serve"
            )
        runs.append(run)
    return runs


def _damage(path: Path, number: int, line: bytes) -> ConfigurationError:
    shown = line[:60].decode(errors="replace").strip()
    return ConfigurationError(
        f"expected a JSON object of a step, an eval or an event in line {number} of {path}, got {shown!r}; "
        "remove that line to see the others"
    )


def _add(record: Any, run: Run) -> None:
    kind = record["kind"]
    if kind in ("step", "eval") and not math.isfinite(record["step"]):
        raise ValueError("a step must have a number")
    match kind:
        case "step":
            run.add_step(record)
        case "eval":
            run.add_eval(record)
        case "event":
            run.add_event(record)


def _settings(path: Path) -> dict[str, object]:
    """Read the settings, nested tables by dotted names; empty if there is no file."""
    if not path.is_file():
        return {}
    try:
        return _flat(tomllib.loads(path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"expected TOML in {path}, got something else ({error}); repair or remove the file"
        ) from error


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _names(paths: Sequence[Path]) -> list[str]:
    """Name runs by the shortest ends of their paths that distinguish them; number repeated paths."""
    full = [path.resolve() for path in paths]
    deepest = max(len(path.parts) for path in full)
    for depth in range(1, deepest + 1):
        names = ["/".join(path.parts[-depth:]) for path in full]
        if len(set(names)) == len(set(full)):
            break
    return [f"{name} ({names[: i + 1].count(name)})" if names.count(name) > 1 else name for i, name in enumerate(names)]
