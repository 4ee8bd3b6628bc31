"""Schemes by name: each is a record of options, checked when made, and a few lines that assemble the step's parts.

A scheme's module is imported when the scheme is looked up. Another package may add schemes with `register_scheme`, or
declare them as entry points in the group "mpisparse.schemes".
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from mpisparse import names
from mpisparse.errors import ConfigurationError, check_choice, suggest
from mpisparse.schemes.options import Options

__all__ = ["SCHEMES", "Options", "configure", "find_scheme", "register_scheme", "takes"]

SCHEMES: Mapping[str, type[Options]] = names.SCHEMES


def find_scheme(name: str) -> type[Options]:
    """Return the options class of this name, importing its module if need be."""
    if name not in SCHEMES:
        check_choice("scheme", name, SCHEMES)
    return SCHEMES[name]


def register_scheme(name: str, options: type[Options]) -> None:
    """Add a scheme; refuse a name that is taken, and a class that is not a frozen dataclass of options with `build`.

    Local: call it on all ranks.
    """
    names.SCHEMES.add(name, options)


def configure(scheme: str, **options: Any) -> Options:
    """Make a scheme's options from names and values; None means the scheme's default for density and codec."""
    kind = find_scheme(scheme)
    known = [f.name for f in dataclasses.fields(kind)]
    for name, value in options.items():
        if name in kind.renamed:
            raise ConfigurationError(f'option {name!r} of scheme "{scheme}" is called {kind.renamed[name]!r} now')
        if name not in known and name in kind.refused:
            raise ConfigurationError(f'option {name!r} is not for scheme "{scheme}": {kind.refused[name]}')
        if name not in known:
            fitting = [each for each in known if _fits(kind, each, value, options)]
            raise ConfigurationError(f'unknown option {name!r} for scheme "{scheme}"; {suggest(name, known, fitting)}')
    defaults = {"density", "codec"}
    made = kind(**{name: value for name, value in options.items() if value is not None or name not in defaults})
    for name, why in made.without_effect().items():
        if options.get(name) is not None:
            raise ConfigurationError(f"{name} has no effect: {why}, or leave it out")
    return made


def _fits(kind: type[Options], name: str, value: Any, others: dict[str, Any]) -> bool:
    """Tell whether an option may have a value, and has an effect, with the other known options or by itself."""
    known = {field.name for field in dataclasses.fields(kind)} - {name}
    for given in ({other: each for other, each in others.items() if other in known and each is not None}, {}):
        with contextlib.suppress(ValueError, TypeError):
            made = kind(**{**given, name: value})
            return name not in made.without_effect()
    return False


def takes(scheme: str, option: str) -> bool:
    """Tell whether a scheme has an option."""
    return any(field.name == option for field in dataclasses.fields(SCHEMES[scheme]))
