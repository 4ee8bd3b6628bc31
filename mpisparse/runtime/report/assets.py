"""The files beside this module: our own styles and scripts, and uPlot, which draws the charts of runs."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

STYLES = ("vendor/uplot/uPlot.min.css", "colours.css", "page.css")
SCRIPTS = (
    "vendor/uplot/uPlot.iife.min.js",
    *("numbers.js", "lines.js", "draw.js", "tips.js", "plots.js", "tables.js", "page.js", "live.js"),
)


def asset(name: str) -> str:
    """Read a file from this package's directory."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def style() -> str:
    """Return the style of a page of runs."""
    return "".join(map(asset, STYLES))


def script() -> str:
    """Return the script of a page of runs: uPlot with its licence, then ours, one file after the other."""
    return "\n".join([f"/* uPlot:\n{asset('vendor/uplot/LICENSE')}*/", *map(asset, SCRIPTS)])


def policy(script: str) -> str:
    """Return a content security policy: only this script may run, and the page may load nothing but itself."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'"
    )
