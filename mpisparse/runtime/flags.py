"""Settings as flags of a command. No torch, no MPI."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpisparse.errors import ConfigurationError
from mpisparse.runtime.settings import Settings
from mpisparse.runtime.settings_file import TYPES, element_type, plain_type, read_file


def add_arguments(
    command: argparse.ArgumentParser, leave_out: Sequence[str] = (), keep: Sequence[str] | None = None
) -> None:
    """Add a flag for every setting, or for those to keep. Flags have no defaults, so that values from the file remain."""
    command.add_argument("--config", type=Path, metavar="FILE.toml", help="read settings from a file; flags override it")
    for entry in dataclasses.fields(Settings):
        if entry.name in leave_out or (keep is not None and entry.name not in keep):
            continue
        flag, text = f"--{entry.name.replace('_', '-')}", entry.metadata["help"]
        kind = plain_type(TYPES[entry.name])
        if kind is bool:
            command.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        elif kind is dict:
            command.add_argument(
                "--option", dest="options", action="append", default=argparse.SUPPRESS, metavar="NAME=VALUE", help=text
            )
        elif kind is tuple:
            add_list(command, entry.name, text)
        else:
            default = "" if entry.default is None else f" (default {entry.default})"
            command.add_argument(
                flag, type=kind, default=argparse.SUPPRESS, help=text + default, metavar=kind.__name__.upper()
            )


def add_list(command: argparse.ArgumentParser, name: str, text: str = "") -> None:
    """Add the flag of a setting that is a list."""
    flag = "--import" if name == "imports" else f"--{name.replace('_', '-')}"
    kind, text = element_type(name), text or Settings.__dataclass_fields__[name].metadata["help"]
    metavar = "MODULE" if name == "imports" else None
    command.add_argument(flag, dest=name, nargs="+", type=kind, default=argparse.SUPPRESS, metavar=metavar, help=text)


def resolve(given: dict[str, Any], **defaults: Any) -> Settings:
    """Combine settings: parsed flags override the file that --config names, which overrides the command's defaults."""
    given = dict(given)
    config = given.pop("config", None)
    values = read_file(config) if config is not None else {}
    flags = {key: value for key, value in given.items() if key in TYPES}
    if "options" in flags:
        flags["options"] = {**values.get("options", {}), **parse_options(flags["options"])}
    if "steps" in flags or "epochs" in flags:
        values.pop("steps", None)
        values.pop("epochs", None)
    flags |= {key: tuple(value) for key, value in flags.items() if plain_type(TYPES[key]) is tuple}
    if "epochs" in values or "epochs" in flags:
        defaults.pop("steps", None)
    return Settings(**{**defaults, **values, **flags})


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """Parse options of a scheme from NAME=VALUE texts."""
    options = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise ConfigurationError(f"--option expects NAME=VALUE, got {pair!r}")
        try:
            options[name] = json.loads(text)
        except RecursionError:
            raise ConfigurationError(f"option {name} is nested too deeply: {text[:40]!r}...") from None
        except ValueError:
            options[name] = text
    return options
