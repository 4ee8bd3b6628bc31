"""Checks of a scheme from outside this package."""

from __future__ import annotations

import dataclasses
from typing import Any

from mpisparse.errors import ConfigurationError
from mpisparse.schemes.options import Options


def check_scheme(name: str, kind: Any) -> None:
    """Raise ConfigurationError unless `kind` is a frozen dataclass of options that builds a step with its defaults."""
    expected = f"scheme {name!r} must be a frozen dataclass derived from mpisparse.schemes.Options"
    if not isinstance(kind, type) or not issubclass(kind, Options):
        raise ConfigurationError(f"{expected}, got {kind!r}")
    if "__dataclass_params__" not in vars(kind) or not vars(kind)["__dataclass_params__"].frozen:
        raise ConfigurationError(f"{expected}, got {kind!r}; decorate it with @dataclass(frozen=True)")
    if kind.build is Options.build:
        raise ConfigurationError(f"{expected} with a method build(parts), got {kind!r} without one")
    needed = [field.name for field in dataclasses.fields(kind) if _has_no_default(field)]
    if needed:
        raise ConfigurationError(f"every option of scheme {name!r} needs a default; {', '.join(needed)} has none")


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
