"""The cases of bench converge: ways to exchange, each with its options, as a text or in a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpisparse.errors import ConfigurationError, check_choice, suggest
from mpisparse.runtime.flags import parse_options
from mpisparse.runtime.settings import OPTIMIZERS
from mpisparse.schemes import configure, find_scheme, takes

ALONE, DENSE = "alone", "dense"  # always there
ONEBIT = "onebit"  # mpisparse.optim.OneBitAdamW
KEYS = ("name", "options", "optimizer", "optimizer_options", "rates")
OF_OPTIMIZER = "optimizer."  # the prefix of its options in a text
LOOP = ("density_from", "density_warmup")
DEFAULT = "exdyna"  # the scheme that GradientSync has by default


@dataclass(frozen=True)
class Case:
    """A way to exchange: options of GradientSync, and of an optimizer if it is not the workload's.

    rates: learning rates to begin with, instead of the bench's own.
    """

    name: str
    options: dict[str, Any]
    optimizer: str | None = None
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        try:
            self._check()
        except ConfigurationError as error:
            raise ConfigurationError(f"case {self.name!r}: {error}") from error

    def _check(self) -> None:
        if not self.name.strip():
            raise ConfigurationError(
                "expected a name, got none; write NAME: scheme=... as in 'int4: scheme=dense codec=int4'"
            )
        if self.optimizer is not None:
            check_choice("optimizer", self.optimizer, (*OPTIMIZERS, ONEBIT))
        if not all(isinstance(rate, int | float) and 0.0 < rate < float("inf") for rate in self.rates):
            raise ConfigurationError(f"expected learning rates above 0, got {list(self.rates)}")
        for name in ("comm", "timeout", "run_directory"):
            if name in self.options:
                raise ConfigurationError(f"{name} is set by the bench; leave it out")
        find_scheme(self.scheme)
        configure(self.scheme, **{name: value for name, value in self.options.items() if name not in {"scheme", *self.loop}})

    @property
    def scheme(self) -> str:
        return str(self.options.get("scheme", DEFAULT))

    @property
    def loop(self) -> dict[str, Any]:
        """The options that the training loop carries out, because the scheme has none of that name."""
        return {name: self.options[name] for name in LOOP if name in self.options and not takes(self.scheme, name)}

    def definition(self) -> dict[str, Any]:
        """What a result of this case depends on, as plain values; neither the name nor the rates."""
        return {"options": self.options, "optimizer": self.optimizer, "optimizer_options": self.optimizer_options}


def parse_case(text: str) -> Case:
    """Parse `NAME: OPTION=VALUE OPTION=VALUE ...`; optimizer=NAME and optimizer.OPTION=VALUE are the optimizer's."""
    name, colon, rest = text.partition(":")
    if not colon or not name.strip():
        raise ConfigurationError(
            f"--case expects NAME: OPTION=VALUE ..., as in 'int4: scheme=dense codec=int4', got {text!r}"
        )
    values = parse_options(rest.split())
    optimizer = values.pop("optimizer", None)
    own = {key.removeprefix(OF_OPTIMIZER): values.pop(key) for key in list(values) if key.startswith(OF_OPTIMIZER)}
    return Case(name.strip(), values, None if optimizer is None else str(optimizer), own)


def read_cases(path: Path) -> list[Case]:
    """Read cases from a TOML file: tables [[case]] with a name, options, and optionally optimizer and rates."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")).get("case", [])
    except OSError as error:
        raise ConfigurationError(f"cannot read the cases in {path}: {error.strerror}") from error
    except ValueError as error:  # invalid TOML or UTF-8
        raise ConfigurationError(f"{path} is not a TOML file: {error}") from error
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise ConfigurationError(f"{path}: expected tables [[case]], each with a name and options, got none")
    return [_case_of(path, table) for table in tables]


def _case_of(path: Path, table: dict[str, Any]) -> Case:
    for key in table:
        if key not in KEYS:
            raise ConfigurationError(f"{path}: unknown key {key!r} of a case; {suggest(key, KEYS)}")
    kinds = {"name": str, "options": dict, "optimizer": str, "optimizer_options": dict, "rates": list}
    for key, value in table.items():
        if not isinstance(value, kinds[key]):
            raise ConfigurationError(f"{path}: {key} of a case must be of type {kinds[key].__name__}, got {value!r}")
    if not table.get("name"):
        raise ConfigurationError(f"{path}: expected a name in every [[case]], got one without")
    return Case(**{"options": {}, **table, "rates": tuple(table.get("rates", ()))})


def all_cases(texts: Sequence[str], file: Path | None) -> list[Case]:
    """Return one worker alone, dense exchange, then the cases of the texts and of the file; refuse a name given twice."""
    cases = [Case(ALONE, {"scheme": "dense"}), Case(DENSE, {"scheme": "dense"}), *map(parse_case, texts)]
    cases += read_cases(file) if file is not None else []
    names = [case.name for case in cases]
    for name in names:
        if names.count(name) > 1:
            always = ", which is always there" if name in (ALONE, DENSE) else ""
            raise ConfigurationError(f"two cases are called {name!r}{always}; choose another name")
    return cases
