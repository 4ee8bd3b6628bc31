"""Links of README and docs lead somewhere, and code names pages that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIRECTORIES = ("mpisparse", "kernels", "bin", "slurm", "tests")
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs make them."""
    heads = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{link}: no such file"
        assert target.is_relative_to(ROOT), f"{link} leads out of the repository"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


def test_pages_that_code_names_exist() -> None:
    files = [path for name in DIRECTORIES for path in (ROOT / name).rglob("*") if path.is_file()]
    for path in files:
        if path.suffix in (".py", ".hpp", ".cu", ".inc", ".cpp", ".sbatch", "") and path != Path(__file__):
            for page in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text()):
                assert (ROOT / page).is_file(), f"{path.relative_to(ROOT)} names {page}"
