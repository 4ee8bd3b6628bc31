"""Hooks of MkDocs: the generated parts of the reference; README as the first page; links out of docs/."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from reference import GENERATED  # MkDocs has the directory of a hook on its path while it loads it

SITE = Path(__file__).resolve().parent
DOCS, ROOT = SITE.parent, SITE.parents[1]
OUTSIDE = {
    "index.md": ROOT / "README.md",
    "CONTRIBUTING.md": ROOT / "CONTRIBUTING.md",
    "CHANGELOG.md": ROOT / "CHANGELOG.md",
}
MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie at the top of the repository."""
    for uri, path in OUTSIDE.items():
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in what is generated, and point links at pages of the site or at copies of files of the repository."""
    origin = OUTSIDE.get(page.file.src_uri, DOCS / page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        picture, label, target, anchor = found[1], found[2], found[3], found[4] or ""
        if "://" in target:
            return found[0]
        uri = place_of((origin.parent / target).resolve(), config, files)
        if uri is None:
            return label
        return f"{picture}[{label}]({os.path.relpath(uri, Path(page.file.src_uri).parent)}{anchor})"

    parts = FENCED.split(text)
    parts[::2] = [LINK.sub(link, part) for part in parts[::2]]
    return MARK.sub(lambda found: GENERATED[found[1]](), "".join(parts))


def place_of(path: Path, config: MkDocsConfig, files: Files) -> str | None:
    """Return where a file of the repository is in the site; copy it there as a text if it is not one of docs/."""
    for uri, outside in OUTSIDE.items():
        if path == outside:
            return uri
    if path.is_relative_to(DOCS) and path.is_file():
        return str(path.relative_to(DOCS))
    if not path.is_file():
        return None
    uri = f"source/{path.relative_to(ROOT)}.txt"
    if files.get_file_from_path(uri) is None:
        files.append(File.generated(config, uri, content=path.read_bytes()))
    return uri


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """Say where to look."""
    print(f"docs: {Path(config.site_dir) / 'index.html'}")
