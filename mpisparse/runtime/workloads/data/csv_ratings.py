"""Ratings from a CSV file: user, item, and if you like rating and timestamp; with or without a header."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from mpisparse.errors import ConfigurationError
from mpisparse.runtime.workloads.data.ratings import rating_data
from mpisparse.runtime.workloads.records import Data

_EXPECTED = "user,item[,rating[,timestamp]]"


def load_ratings(path: Path) -> Data:
    """Load pairs of a user and an item; each user's last by time, or in the file, is for testing.

    Any rating counts as an encounter. Of pairs that come twice, the last one is kept.
    """
    numbers: tuple[dict[str, int], dict[str, int]] = ({}, {})
    columns: tuple[list[int], list[int], list[float]] = ([], [], [])
    for line, row in _rows(path):
        user, item = row[0].strip(), row[1].strip() if len(row) > 1 else ""
        if not user or not item or len(row) > 4:
            raise ConfigurationError(f"{path}, line {line}: expected {_EXPECTED}, got {','.join(row)!r}")
        columns[0].append(numbers[0].setdefault(user, len(numbers[0])))
        columns[1].append(numbers[1].setdefault(item, len(numbers[1])))
        columns[2].append(_check_numbers(path, line, row))
    if not columns[0]:
        raise ConfigurationError(f"{path}: expected lines {_EXPECTED}, but the file has none")
    users, items = (np.array(column, np.int64) for column in columns[:2])
    order = np.argsort(np.array(columns[2]), kind="stable")
    users, items = users[order], items[order]
    _, back = np.unique((users * len(numbers[1]) + items)[::-1], return_index=True)
    kept = np.sort(len(users) - 1 - back)
    return rating_data(str(path), users[kept], items[kept], len(numbers[0]), len(numbers[1]))


def _rows(path: Path) -> list[tuple[int, list[str]]]:
    """Read the rows with their line numbers, without empty lines and the header."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            rows = [(reader.line_num, row) for row in reader if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(f"{path}: could not be read as CSV: {error}") from error
    if not rows or not _is_header(rows):
        return rows
    names = [name.strip().lower() for name in rows[0][1]]
    if len(names) > 1 and names[1].startswith("user"):
        raise ConfigurationError(
            f"{path}: expected columns {_EXPECTED}, but the header says {','.join(names)}; reorder them"
        )
    return rows[1:]


def _is_header(rows: list[tuple[int, list[str]]]) -> bool:
    """Tell by a first line in words: it speaks of users, or numbers follow below it."""
    first = rows[0][1]
    if any(map(_is_number, first)):
        return False
    return any("user" in name.lower() for name in first) or (len(rows) > 1 and any(map(_is_number, rows[1][1])))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _check_numbers(path: Path, line: int, row: list[str]) -> float:
    """Check rating and timestamp; give the timestamp, or 0."""
    for name, text in zip(("rating", "timestamp"), row[2:], strict=False):
        if not _is_number(text):
            raise ConfigurationError(f"{path}, line {line}: the {name} must be a number, got {text!r}")
    return float(row[3]) if len(row) > 3 else 0.0
