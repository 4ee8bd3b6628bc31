"""What goes wrong, in words: what was expected, what came, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigurationError(ValueError):
    """An option has a value it cannot have, or the ranks were given different ones.

    `repeated`: rank 0 raises the same, and says it for all. `exit_code`: what a command that ends with it returns.
    """

    repeated = False
    exit_code = 2


class LockError(ConfigurationError):
    """Another run has the directory; raised on all ranks together."""

    exit_code = 75  # EX_TEMPFAIL: the same command may succeed later


class GradientError(RuntimeError):
    """The gradients of a step cannot be exchanged; raised on all ranks together."""


class NonFiniteGradientError(GradientError, FloatingPointError):
    """A gradient, or a sum with it, is infinite or not a number; raised on all ranks together."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; raised on all ranks together."""


def suggest(name: str, known: Iterable[str], fitting: Iterable[str] | None = None) -> str:
    """Say which known name was probably meant, of those that fit if these are given, then list them all."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names if fitting is None else sorted(fitting), n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}choose from: {', '.join(names)}"


def check_choice(what: str, value: object, known: Iterable[str]) -> None:
    """Raise unless value is one of the known names."""
    names = list(known)
    if value not in names:
        raise ConfigurationError(
            f"unknown {what} {value!r}; {suggest(str(value), names, None if isinstance(value, str) else ())}"
        )
