"""Parts of the reference that are made from the code: public names, options of schemes, flags of commands."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

from mpisparse.names import CODECS, SCHEMES
from mpisparse.runtime.cli import parser
from mpisparse.schemes.options import Options

PACKAGE = griffe.load("mpisparse", search_paths=[Path(__file__).parents[2]], resolve_aliases=True)
NAMES = re.compile(r"(?<![\w`\"])((?:\w+, )*(?:\w+ and )?\w+): ")  # of options, in docstrings


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"


# Public names


def public_names() -> dict[str, list[str]]:
    """Return the public names: those of the package itself under "mpisparse", then those of each public module."""
    package = PACKAGE
    modules = {f"mpisparse.{name}": package.members[name] for name in exported(package) if package.members[name].is_module}
    integrations = package.members.get("integrations")
    inner = {} if integrations is None else integrations.members
    modules |= {each.path: each for name, each in inner.items() if not each.is_alias and each.is_module and name[0] != "_"}
    found = {"mpisparse": [f"mpisparse.{name}" for name in exported(package) if not package.members[name].is_module]}
    known = {package.members[name.removeprefix("mpisparse.")].canonical_path for name in found["mpisparse"]}
    for path, module in modules.items():
        found[path] = [f"{path}.{name}" for name in exported(module) if module.members[name].canonical_path not in known]
    return {module: names for module, names in found.items() if names}


def exported(module: Any) -> list[str]:
    """Return the names that a module gives out: its __all__, or the functions and classes that it defines."""
    if module.is_alias:
        module = module.final_target
    if module.exports is not None:
        return [str(name) for name in module.exports if not str(name).startswith("__")]
    members = module.members.values()
    return [each.name for each in members if not each.is_alias and each.is_public and (each.is_function or each.is_class)]


def api() -> str:
    """Return directives that document every public name, module by module."""
    parts = []
    for module, names in public_names().items():
        parts.append(f"## {module}\n")
        docstring = PACKAGE[module.removeprefix("mpisparse.")].docstring if module != "mpisparse" else PACKAGE.docstring
        parts.append(f"{docstring.value}\n")
        parts += [f"::: {name}\n" for name in names]
    return "\n".join(parts)


# Options of schemes


def described(kind: type[Options]) -> dict[str, str]:
    """Return what docstrings say of options: "name: text" from one name to the next; a subclass says it first."""
    known = {field.name for field in dataclasses.fields(kind)}
    texts: dict[str, str] = {}
    for parent in kind.__mro__:
        if not dataclasses.is_dataclass(parent) or parent.__doc__ is None:
            continue
        words = " ".join(inspect.cleandoc(parent.__doc__).replace("\n\n", " ¶ ").split())
        marks = [each for each in NAMES.finditer(words) if mentioned(each, known)]
        ends = [*(each.start() for each in marks[1:]), len(words)]
        for mark, end in zip(marks, ends, strict=False):
            text = words[mark.end() : end].partition("¶")[0].strip()
            for name in mentioned(mark, known):
                texts.setdefault(name, text)
    return texts


def summary(kind: type[Options]) -> str:
    """Return what the docstring of a scheme says before it comes to options."""
    paragraphs = [" ".join(each.split()) for each in inspect.cleandoc(kind.__doc__ or "").split("\n\n")]
    known = {field.name for field in dataclasses.fields(kind)}
    return "\n\n".join(each for each in paragraphs if not mentioned(NAMES.match(each), known))


def mentioned(mark: re.Match[str] | None, known: set[str]) -> list[str]:
    """Return the options that a text names before a colon; none if any of them is unknown."""
    names = [] if mark is None else re.split(r", | and ", mark[1])
    return names if set(names) <= known else []


def rows_of(kind: type[Options], names: list[str]) -> list[list[str]]:
    """Return a row for each option: name, type, default, meaning."""
    fields, texts = {field.name: field for field in dataclasses.fields(kind)}, described(kind)
    rows = []
    for name in names:
        default = fields[name].default
        shown = f'"{default}"' if isinstance(default, str) else f"{default:.6g}" if isinstance(default, float) else default
        rows.append([f"`{name}`", f"`{fields[name].type}`", f"`{shown}`", texts.get(name, "")])
    return rows


def options() -> str:
    """Return a table of the options that all schemes have, then one per scheme of what it adds or changes."""
    head = ["option", "type", "default", "meaning"]
    common = {field.name: field.default for field in dataclasses.fields(Options)}
    parts = ["## All schemes\n", "Every scheme has these, with these defaults unless its own table says otherwise.\n"]
    parts.append(table(head, rows_of(Options, list(common))))
    parts.append(f"Codecs: {', '.join(f'`{name}`' for name in CODECS)}.\n")
    for name in SCHEMES:
        kind = SCHEMES[name]
        own = [f.name for f in dataclasses.fields(kind) if f.name not in common or f.default != common[f.name]]
        parts.append(f"## {name}\n\n{summary(kind)}\n")
        parts.append(table(head, rows_of(kind, own)) if own else "It has the options of all schemes and no others.\n")
    return "\n".join(parts)


# Flags of commands


def commands(top: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    """Yield every command that runs, however deep: its name, its parser and its line of help."""
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, below in action.choices.items():
                if any(isinstance(each, argparse._SubParsersAction) for each in below._actions):
                    yield from commands(below)
                else:
                    yield below.prog, below, helps.get(name, "")


def flag_row(command: argparse.ArgumentParser, action: argparse.Action) -> list[str]:
    """Return a row for a flag or an argument: how it is written, and what it means."""
    formatter = command._get_formatter()
    written = ", ".join(action.option_strings) or formatter._metavar_formatter(action, action.dest)(1)[0]
    if action.option_strings and action.nargs != 0:
        written += " " + formatter._format_args(action, action.dest.upper())
    return [f"`{written}`", formatter._expand_help(action) if action.help else ""]


def flags() -> str:
    """Return a section per command with a table for each group of its flags."""
    parts = []
    for name, command, text in commands(parser()):
        about = command.description or f"{text[:1].upper()}{text[1:]}."
        parts.append(f"## {name}\n\n{about}\n")
        for group in command._action_groups:
            shown = [
                a for a in group._group_actions if a.help != argparse.SUPPRESS and not isinstance(a, argparse._HelpAction)
            ]
            if shown:
                titled = group.title not in (None, "options", "optional arguments", "positional arguments")
                parts.append(f"**{group.title}**\n" if titled else "")
                parts.append(table(["flag", "meaning"], [flag_row(command, action) for action in shown]))
        if command.epilog:
            parts.append(f"```text\n{inspect.cleandoc(command.epilog)}\n```\n")
    return "\n".join(parts)


GENERATED = {"api": api, "options": options, "flags": flags}
