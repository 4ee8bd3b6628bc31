"""Choose the reader for a data file."""

from __future__ import annotations

import re
from pathlib import Path

from mpisparse.errors import ConfigurationError
from mpisparse.runtime.workloads.records import Data

KINDS = (
    "a path: images.npz, ratings.csv, text.txt, text.txt.xz or a directory of such texts"
    " (add :words, :characters or :alphabet, then optionally :16 for windows of 16)"
)
_UNIT = re.compile(r"(.+):(words|characters|alphabet)(?::(\d+))?")


def split_unit(data: str) -> tuple[Path, str | None, dict[str, int]]:
    """Split `corpus.txt:words:16` into path, unit (or None) and options of the windows."""
    match = None if Path(data).exists() else _UNIT.fullmatch(data)
    if match is None:
        return Path(data), None, {}
    return Path(match[1]), match[2], {"length": int(match[3])} if match[3] else {}


def load(path: Path, unit: str | None, masked: bool, windows: dict[str, int]) -> Data:
    """Load a file or directory. The default unit of a text is words if masked, else characters."""
    suffix = path.suffix.lower()
    if path.is_dir() or suffix in (".txt", ".xz"):
        from mpisparse.runtime.workloads.data.corpus import load_text

        return load_text(path, unit or ("words" if masked else "characters"), masked, **windows)
    if unit is not None or suffix not in (".npz", ".csv"):
        raise ConfigurationError(f"data: unknown type of file {str(path)!r}; expected {KINDS}")
    if suffix == ".npz":
        from mpisparse.runtime.workloads.data.npz import load_images

        return load_images(path)
    from mpisparse.runtime.workloads.data.csv_ratings import load_ratings

    return load_ratings(path)
