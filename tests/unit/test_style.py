"""Pages can be read: short lines, short paragraphs, tables that are introduced, "per rank" and not "a rank"."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"^<!--.*?-->$", re.MULTILINE | re.DOTALL)
SENTENCE = re.compile(r"[.!?:]\**\)?(?=\s+[\"(*`\[]*[A-Z])")  # its end: a colon before a capital ends one, too
MOST_SENTENCES, LONGEST_LINE = 5, 120
UNITS = "rank|step|element|parameter|index|value|row|group|tile|block|thread|hop|copy|worker|second|GPU|token|host"
THINGS = r"bytes?|bits?|ms|MB|kB|GB|MiB|seconds|examples|registers|files?|counts?|launches|elements|times"
PER = re.compile(rf"\b(?:{THINGS}) an? (?:{UNITS})\b")


def prose(page: Path) -> str:
    """Return a page without its code and comments."""
    return COMMENT.sub("", FENCED.sub("\n", page.read_text()))


def blocks(page: Path) -> list[str]:
    """Return paragraphs, items of lists, tables and headings, in their order."""
    items = re.sub(r"\n(?=\s*(?:[-*]|\d+\.) )", "\n\n", prose(page))
    return [
        block.strip()
        for block in re.split(r"\n\s*\n", re.sub(r"^(#+ .*)$", r"\n\1\n", items, flags=re.MULTILINE))
        if block.strip()
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_easy_to_read(page: Path) -> None:
    wrong = [f"longer than {LONGEST_LINE}: {line}" for line in page.read_text().splitlines() if too_long(line)]
    before = ""
    for block in blocks(page):
        table = block.startswith("|")
        if table and (before.startswith(("#", "|")) or not before):
            wrong.append(f"no sentence before the table: {block.splitlines()[0]}")
        if not table and len(SENTENCE.findall(plain(block))) + 1 > MOST_SENTENCES:
            wrong.append(f"more than {MOST_SENTENCES} sentences: {block[:90]}")
        wrong += [f'"per", not "a": {found}' for found in PER.findall(block)]
        before = block
    assert not wrong, "\n".join(wrong)


def too_long(line: str) -> bool:
    return len(line) > LONGEST_LINE and not line.startswith(("|", "!["))


def plain(block: str) -> str:
    """Return a block without code and without the points of abbreviations and lists of numbers."""
    return re.sub(r"`[^`]*`", "code", re.sub(r"\.\.\.|e\.g\.|i\.e\.", "", " ".join(block.split())))
