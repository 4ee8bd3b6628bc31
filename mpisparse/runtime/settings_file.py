"""Settings in a TOML file. No torch, no MPI."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from mpisparse.errors import ConfigurationError, suggest
from mpisparse.runtime.settings import AUTO, Settings

TYPES: dict[str, Any] = get_type_hints(Settings)


def element_type(name: str) -> Any:
    """Return the type of the elements of a setting that is a list."""
    return get_args(TYPES[name])[0]


def plain_type(kind: Any) -> Any:
    """Strip `| None` and the parameters of containers from a type."""
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(k for k in get_args(kind) if k is not type(None))
    return get_origin(kind) or kind


def read_file(path: Path) -> dict[str, Any]:
    """Read settings from a TOML file; raise ConfigurationError for unknown names and wrong types."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot read the settings in {path}: {error.strerror}") from error
    except RecursionError:
        raise ConfigurationError(f"{path} is not a settings file: its values are nested too deeply") from None
    except ValueError as error:  # invalid TOML, invalid UTF-8, or a number with thousands of digits
        raise ConfigurationError(f"{path} is not a TOML file: {error}") from error
    for name, value in values.items():
        if name not in TYPES:
            raise ConfigurationError(f"{path}: unknown setting {name!r}; {suggest(name, TYPES)}")
        values[name] = _typed(path, name, value)
    return values


def _typed(path: Path, name: str, value: Any) -> Any:
    kind = plain_type(TYPES[name])
    try:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if kind is tuple and isinstance(value, list):
            element = element_type(name)
            if all(type(each) in ((int, float) if element is float else (element,)) for each in value):
                return tuple(element(each) for each in value)
    except OverflowError as error:
        raise ConfigurationError(f"{path}: {name} is too large: {error}") from error
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        shown = repr(value) if not isinstance(value, dict | list) else f"{type(value).__name__} of {len(value)}"
        raise ConfigurationError(f"{path}: {name} must be of type {kind.__name__}, got {shown}")
    return value


def to_toml(settings: Settings, notes: Sequence[str] = ()) -> str:
    """Return a TOML file that yields the same settings, with notes as comments at its top.

    Scheme auto is a comment where it is the default, so that a flag beside the file means what it means without one.
    """
    lines, tables = [f"# {' '.join(note.split())}" for note in notes], []
    told = ["scheme"] if settings.scheme == settings.default_scheme() == AUTO else []
    for name, value in dataclasses.asdict(settings).items():
        if isinstance(value, dict):
            tables += [f"\n[{name}]", *(f"{_toml(k)} = {_toml(v)}" for k, v in value.items() if v is not None)]
        elif value is not None:
            lines.append(f"{'# ' if name in told else ''}{name} = {_toml(value)}")
    return "\n".join([*lines, *(tables if len(tables) > 1 else []), ""])


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(v) for v in value)}]"
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
