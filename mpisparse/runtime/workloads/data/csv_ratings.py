"""Ratings from a CSV file: user, item, optionally rating and timestamp; with or without a header."""

from __future__ import annotations

import csv
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, count, islice
from pathlib import Path

import numpy as np

from mpisparse.errors import ConfigurationError
from mpisparse.runtime.workloads.data.ratings import rating_data
from mpisparse.runtime.workloads.records import Data

_EXPECTED = "user,item[,rating[,timestamp]]"
_USER = re.compile(r"users?([ _-]?(id|name|key|no))?")  # names of a column; user1 would be a user
Line = tuple[int, list[str]]  # line number and fields


def load_ratings(path: Path) -> Data:
    """Load pairs of a user and an item; each user's last one, by time or in the file, is for testing.

    Any rating counts as an interaction. Of repeated pairs the last one is kept.
    """
    user_numbers: dict[str, int] = defaultdict(count().__next__)
    item_numbers: dict[str, int] = defaultdict(count().__next__)
    columns: tuple[list[int], list[int], list[float]] = ([], [], [])
    for number, fields in _lines(path):
        try:
            user, item, time = _parse(fields)
        except ValueError as error:
            raise ConfigurationError(f"{path}, line {number}: {error}") from None
        columns[0].append(user_numbers[user])
        columns[1].append(item_numbers[item])
        columns[2].append(time)
    if not columns[0]:
        raise ConfigurationError(f"{path}: expected lines {_EXPECTED}, but the file has none")
    users, items = (np.array(column, np.int64) for column in columns[:2])
    order = np.argsort(np.array(columns[2]), kind="stable")
    users, items = users[order], items[order]
    _, back = np.unique((users * len(item_numbers) + items)[::-1], return_index=True)
    kept = np.sort(len(users) - 1 - back)
    return rating_data(str(path), users[kept], items[kept], len(user_numbers), len(item_numbers))


def _parse(fields: list[str]) -> tuple[str, str, float]:
    """Return user, item and time, 0 if there is none; raise ValueError saying what is wrong."""
    if not 2 <= len(fields) <= 4 or not (user := fields[0].strip()) or not (item := fields[1].strip()):
        raise ValueError(f"expected {_EXPECTED}, got {','.join(fields)!r}")
    for name, text in zip(("rating", "timestamp"), fields[2:], strict=False):
        if not _is_number(text):
            raise ValueError(f"the {name} must be a number, got {text!r}")
        if not math.isfinite(float(text)):
            raise ValueError(f"the {name} must be finite, got {text!r}")
    return user, item, float(fields[3]) if len(fields) > 3 else 0.0


def _lines(path: Path) -> Iterator[Line]:
    """Read the lines, without empty ones and the header."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            lines = ((reader.line_num, fields) for fields in reader if fields)
            first = list(islice(lines, 2))
            if first and _is_header(path, first):
                first = first[1:]
            yield from chain(first, lines)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(f"{path}: could not be read as CSV: {error}") from error


def _is_header(path: Path, lines: list[Line]) -> bool:
    """Return whether the first line is a header: no numbers, and it names the user column or numbers follow below."""
    names = [name.strip().lower() for name in lines[0][1]]
    if any(map(_is_number, names)):
        return False
    if any(map(_USER.fullmatch, names[1:])):
        raise ConfigurationError(
            f"{path}: expected columns {_EXPECTED}, but the header says {','.join(names)}; reorder them"
        )
    return _USER.fullmatch(names[0]) is not None or any(_is_number(field) for _, fields in lines[1:] for field in fields)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
