"""Settings as flags of a command. No torch, no MPI."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from mpisparse.errors import ConfigurationError
from mpisparse.names import CODECS, SCHEMES
from mpisparse.runtime.settings import OPTIMIZERS, SCHEDULES, STEERING, Settings
from mpisparse.runtime.settings_file import TYPES, element_type, plain_type, read_file
from mpisparse.runtime.workloads.catalogue import MODELS

GROUPS = {  # every setting, by what it is about
    "model and data": ("model", "data", "batch_size", "accumulation", "seed", "bf16", "device", "imports"),
    "length of the run": ("epochs", "steps", "target"),
    "optimizer": (
        "optimizer", "lr", "momentum", "beta2", "weight_decay", "schedule", "warmup", "drop_at", "clip",
    ),
    "exchange": (
        "scheme", "density", "density_from", "density_warmup", "codec", "options", "timeout", "on_failure", "mirror",
    ),
    "evaluation": ("validation", "evaluate_on", "eval_every"),
    "output": ("out", "log_every", "log_ranks", "tensorboard", "record_gradients"),
    "checkpoints": ("checkpoint_every", "keep", "background", "driver", "resume", "wait_for_lock", "stop_before"),
}  # fmt: skip
CHOICES: dict[str, Callable[[], Iterable[str]]] = {
    "model": lambda: MODELS,
    "optimizer": lambda: OPTIMIZERS,
    "schedule": lambda: SCHEDULES,
    "device": lambda: ("cpu", "cuda"),
    "scheme": lambda: SCHEMES,
    "codec": lambda: CODECS,
    "evaluate_on": lambda: STEERING,
}


def add_arguments(
    command: argparse.ArgumentParser, leave_out: Sequence[str] = (), keep: Sequence[str] | None = None
) -> None:
    """Add a flag for every setting, or for those to keep. Flags have no defaults, so that values from the file remain."""
    command.add_argument("--config", type=Path, metavar="FILE.toml", help="read settings from a file; flags override it")
    fields = {entry.name: entry for entry in dataclasses.fields(Settings)}
    for title, names in GROUPS.items():
        kept = [name for name in names if name not in leave_out and (keep is None or name in keep)]
        group = command.add_argument_group(title) if kept else command
        for name in kept:
            _add_flag(group, fields[name])


def _add_flag(group: Any, entry: dataclasses.Field[Any]) -> None:
    """Add the flag of one setting."""
    flag, text = f"--{entry.name.replace('_', '-')}", entry.metadata["help"]
    kind, choices = plain_type(TYPES[entry.name]), choices_of(entry.name)
    if choices:
        text += f": {', '.join(choices)}"
    if kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
    elif kind is dict:
        group.add_argument(
            "--option", dest="options", action="append", default=argparse.SUPPRESS, metavar="NAME=VALUE", help=text
        )
    elif kind is tuple:
        add_list(group, entry.name, text)
    else:
        default = "" if entry.default is None else f" (default {entry.default})"
        action = group.add_argument(
            flag, type=kind, default=argparse.SUPPRESS, help=text + default, metavar=kind.__name__.upper()
        )
        action.completer = lambda **_: choices  # for argcomplete; the settings check the value, and suggest


def choices_of(name: str) -> list[str]:
    """Return the names to choose from, for a setting that has such."""
    return sorted(CHOICES[name]()) if name in CHOICES else []


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
