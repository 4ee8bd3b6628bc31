"""Records as an aligned table or as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def show(records: Sequence[dict[str, Any]], columns: dict[str, str], *, as_json: bool) -> None:
    """Print records: one JSON object a line, or a table whose columns are {key: format}; None is left blank."""
    if as_json:
        for record in records:
            print(json.dumps(record), flush=True)
        return
    rows = [[_cell(record.get(key), form) for key, form in columns.items()] for record in records]
    heads = [key.replace("_", " ") for key in columns]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        first, rest = row[0].ljust(widths[0]), [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join([first, *rest]).rstrip(), flush=True)


def _cell(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)
