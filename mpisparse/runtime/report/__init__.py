"""mpisparse report: one self-contained HTML page of charts, from runs or from records of benchmarks.

Charts of runs are drawn in the browser by uPlot (vendor/uplot) and the scripts beside this module; pictures of records are
static SVG, drawn here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from mpisparse.errors import ConfigurationError
from mpisparse.runtime.report.bench import bench_page, figures, read_records, standalone
from mpisparse.runtime.report.bench_figures import BenchRecord
from mpisparse.runtime.report.page import page
from mpisparse.runtime.report.read import read_runs

__all__ = ["write"]


def write(runs: Sequence[Path], out: Path | None = None, pictures: Path | None = None) -> Path:
    """Write the page of these runs, or of these files of records, and return its path.

    The default is RUN/report.html for one run, FILE.html next to one FILE.jsonl, else ./report.html. With `pictures`,
    each chart of records is also written there as an SVG file. Files are written atomically.
    """
    runs = [Path(run) for run in runs]
    try:
        files = [run.is_file() for run in runs]
        text = _page(runs, files, pictures)
    except OSError as error:
        raise ConfigurationError(f"cannot read or write {error.filename}: {error.strerror}") from error
    if out is None:
        alone = runs[0].with_suffix(".html") if files[0] else runs[0] / "report.html"
        out = alone if len(runs) == 1 else Path("report.html")
    _write_whole(out, text)
    return out


def _page(runs: Sequence[Path], files: Sequence[bool], pictures: Path | None) -> str:
    """Return the HTML of the page; write the pictures."""
    if any(files) and not all(files):
        raise ConfigurationError("expected run directories or files of records, got both; make a page for each kind")
    if all(files) and runs:
        records = [record for run in runs for record in read_records(run)]
        text = bench_page(records)
        if pictures is not None:
            _write_pictures(records, pictures)
        return text
    if pictures is not None:
        raise ConfigurationError(
            "--pictures needs files that mpisparse bench --out wrote, got run directories; leave it out"
        )
    return page(read_runs(runs))


def _write_pictures(records: Sequence[BenchRecord], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for bench in dict.fromkeys(record["bench"] for record in records):
        for title, _, picture in figures([record for record in records if record["bench"] == bench]):
            name = "".join(c if c.isalnum() else "-" for c in title.lower().replace(",", ""))
            _write_whole(directory / f"{bench}-{name}.svg", standalone(picture))


def _write_whole(out: Path, text: str) -> None:
    try:
        draft = out.with_name(f".{out.name}.{os.getpid()}")
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(out)
        except OSError:
            with contextlib.suppress(OSError):  # a read-only file system may refuse this too
                draft.unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:  # ValueError: a path without a name
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(
            f"expected a file that can be written, got {str(out)[:200]} ({why}); choose another with --out FILE.html"
        ) from error
