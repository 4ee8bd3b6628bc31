"""The documentation builds strictly and without a network, and its reference has every public name, option and flag."""

from __future__ import annotations

import argparse
import dataclasses
import html
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpisparse
from mpisparse.names import SCHEMES
from mpisparse.runtime.cli import parser

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "docs" / "site" / "mkdocs.yml"
TIMEOUT = 1800.0  # seconds, for what takes ten
LOADED = re.compile(
    r"<(?:script|img|iframe)\b[^>]*\bsrc=\"?([^\"\s>]+)|<link\b(?![^>]*\brel=\"?canonical)[^>]*\bhref=\"?([^\"\s>]+)"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(CONFIG), "--site-dir", str(target)]
    done = subprocess.run(
        command, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def sections(page: Path) -> dict[str, str]:
    """Return the parts of a page by their headings of the second level."""
    parts = re.split(r"(?=<h2)", page.read_text())[1:]
    return {plain(part.partition("</h2>")[0]).rstrip("¶"): part for part in parts}


def rows(part: str) -> list[list[str]]:
    """Return the cells of all tables."""
    lines = re.findall(r"<tr>(.*?)</tr>", part, re.DOTALL)
    return [[plain(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", line, re.DOTALL)] for line in lines]


def plain(text: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", text)).strip()


def public() -> Iterator[str]:
    """Yield every public name: of the package, of its public modules, of its integrations."""
    modules = {name: getattr(mpisparse, name) for name in mpisparse.__all__ if inspect.ismodule(getattr(mpisparse, name))}
    yield from (name for name in mpisparse.__all__ if name not in modules and not name.startswith("__"))
    if importlib.util.find_spec("mpisparse.integrations") is not None:
        package = importlib.import_module("mpisparse.integrations")
        for info in pkgutil.iter_modules(package.__path__):
            if not info.name.startswith("_"):
                name = f"integrations.{info.name}"
                modules[name] = importlib.import_module(f"mpisparse.{name}")
    for module, found in modules.items():
        for name in getattr(found, "__all__", ()):
            if getattr(mpisparse, name, None) is not getattr(found, name):
                yield f"{module}.{name}"


def every_flag(top: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Yield every command with each of its flags."""
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from every_flag(below)
        elif action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction | argparse._VersionAction):
            yield from ((top.prog, flag) for flag in action.option_strings)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the frameworks that integrations import
def test_the_reference_has_every_public_name_option_and_flag(site: Path) -> None:
    page = (site / "reference" / "api.html").read_text()
    anchors = set(re.findall(r'id="?([\w.]+)', page))
    assert [name for name in public() if f"mpisparse.{name}" not in anchors] == []
    assert "GradientSync" in set(public())  # the comparison compares something

    options = sections(site / "reference" / "options.html")
    for name in SCHEMES:
        told = {row[0]: row[-1] for row in rows(options["All schemes"] + options[name]) if row}
        for field in dataclasses.fields(SCHEMES[name]):
            assert told.get(field.name), f"{name}: nothing says what {field.name} means"

    commands = sections(site / "reference" / "flags.html")
    for command, flag in every_flag(parser()):
        told = {word.rstrip(","): row[-1] for row in rows(commands[command]) if row for word in row[0].split()}
        assert told.get(flag), f"{command} {flag} is not in the reference"


def test_every_page_is_in_the_site_and_loads_nothing_from_other_hosts(site: Path) -> None:
    for page in sorted((ROOT / "docs").rglob("*.md")):
        assert (site / page.relative_to(ROOT / "docs")).with_suffix(".html").is_file(), page
    pages = list(site.rglob("*.html"))
    assert len(pages) > 10
    for page in pages:
        for pair in LOADED.findall(page.read_text()):
            assert "//" not in "".join(pair), f"{page.relative_to(site)} loads {pair}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//|@import", sheet.read_text()), sheet
