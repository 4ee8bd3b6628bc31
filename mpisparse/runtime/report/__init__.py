"""report: one self-contained page of pictures from run directories, runs overlaid."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mpisparse.errors import ConfigurationError
from mpisparse.runtime.report.page import page
from mpisparse.runtime.report.read import read_runs

__all__ = ["write"]


def write(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of these runs and return where it is: RUN/report.html for one run, else ./report.html.

    It is written beside and renamed, so that a page is whole or not there.
    """
    text = page(read_runs([Path(run) for run in runs]))
    if out is None:
        out = Path(runs[0]) / "report.html" if len(runs) == 1 else Path("report.html")
    beside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(out)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigurationError(
            f"expected a file that can be written, got {out} ({error.strerror}); choose another with --out FILE.html"
        ) from error
    return out
