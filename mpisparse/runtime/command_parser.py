"""A parser of commands whose errors say what was probably meant, with the usage of the command. No torch, no MPI."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


class CommandParser(argparse.ArgumentParser):
    """Prints examples as they are written, and suggests flags, commands and choices for mistyped ones."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})  # a flag that is added later would change its meaning
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        self._words: Sequence[str] = ()
        self.epilog = "\n  ".join(["examples:", *examples]) if examples else None

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse all arguments; an unknown one is an error of the command that it was given to."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._command_of(parsed)._refuse(unknown)
        return parsed

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, also for a command within another; remember the words."""
        self._words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def _command_of(self, parsed: argparse.Namespace) -> CommandParser:
        """Return the parser of the command that was chosen, or of the command within it."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                chosen = action.choices.get(getattr(parsed, action.dest, ""))
                if isinstance(chosen, CommandParser):
                    return chosen._command_of(parsed)
        return self

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hints(unknown)}")

    def _hints(self, words: Sequence[str]) -> str:
        """What was probably meant by flags that this command does not have."""
        hints, known = "", self._option_string_actions
        for flag in (word.partition("=")[0] for word in words):
            near = difflib.get_close_matches(flag, known, n=1) if flag.startswith("-") and flag not in known else []
            hints += f"; instead of {flag}, did you mean {near[0]}?" if near else ""
        return hints

    def error(self, message: str) -> NoReturn:
        """Print the usage and what is wrong, with a suggestion for a mistyped choice; exit with code 2."""
        if message.startswith("the following arguments are required"):
            message += self._hints(self._words)  # which argparse has not come to
        wrong = CHOICE.search(message)
        if wrong is not None:
            near = difflib.get_close_matches(wrong[1], [choice.strip("'") for choice in wrong[2].split(", ")], n=1)
            message += f"; did you mean {near[0]!r}?" if near else ""
        super().error(message)
