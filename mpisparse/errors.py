"""Exceptions. Their messages say what was expected, what was found, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigurationError(ValueError):
    """An option has an invalid value, or the ranks have different ones.

    `repeated`: rank 0 raises the same error and reports it. `exit_code`: of a command that ends with this error.
    """

    repeated = False
    exit_code = 2


class LockError(ConfigurationError):
    """Another run uses the directory; raised on all ranks together."""

    exit_code = 75  # EX_TEMPFAIL: the same command may succeed later


class GradientError(RuntimeError):
    """The gradients of a step cannot be exchanged; raised on all ranks together."""


class NonFiniteGradientError(GradientError, FloatingPointError):
    """A gradient, or a sum with it, is infinite or not a number; raised on all ranks together."""


class CollectiveError(RuntimeError):
    """The ranks are in different collective calls, or one has ended; raised on all ranks together."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; raised on all ranks together."""


def suggest(name: str, known: Iterable[str], fitting: Iterable[str] | None = None) -> str:
    """Suggest the known name that was probably meant, only from `fitting` if given, and list all known names."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names if fitting is None else sorted(fitting), n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}choose from: {', '.join(names)}"


def check_choice(what: str, value: object, known: Iterable[str]) -> None:
    """Raise ConfigurationError unless the value is one of the known names."""
    names = list(known)
    if value not in names:
        raise ConfigurationError(
            f"unknown {what} {value!r}; {suggest(str(value), names, None if isinstance(value, str) else ())}"
        )
