"""Print records as an aligned table or as JSON lines, and save them to a file."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpisparse.errors import ConfigurationError


def show(records: Sequence[dict[str, Any]], columns: dict[str, str], *, as_json: bool) -> None:
    """Print records: one JSON object per line, or a table with columns {key: format}, where None is blank."""
    if as_json:
        for record in records:
            print(json.dumps(record), flush=True)
        return
    rows = formatted(records, columns)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, rest = row[0].ljust(widths[0]), [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join([first, *rest]).rstrip(), flush=True)


def formatted(records: Sequence[dict[str, Any]], columns: dict[str, str]) -> list[list[str]]:
    """Return a table's heads, then a row of cells for each record."""
    heads = [key.replace("_", " ") for key in columns]
    return [heads, *([_cell(record.get(key), form) for key, form in columns.items()] for record in records)]


def _cell(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)


def save(bench: str, records: Sequence[dict[str, Any]], out: Path | None) -> None:
    """Write records as JSON lines, each with the name of its benchmark, atomically; nothing if `out` is None."""
    if out is None:
        return
    if not out.name:
        raise ConfigurationError(f"expected a file that can be written, got {str(out)!r}; name one, as in --out bench.jsonl")
    draft = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text("".join(json.dumps({"bench": bench, **record}) + "\n" for record in records), encoding="utf-8")
        draft.replace(out)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise ConfigurationError(f"expected a file that can be written, got {out} ({error.strerror})") from error
    print(f"records: {out}; pictures: mpisparse report {out}", file=sys.stderr)
