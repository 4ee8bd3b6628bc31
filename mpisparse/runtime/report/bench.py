"""Pages and pictures from records of benchmarks: JSON lines written by `mpisparse bench ... --out FILE.jsonl`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from mpisparse.arrays import Doubles
from mpisparse.errors import ConfigurationError
from mpisparse.runtime.report import svg
from mpisparse.runtime.report.assets import asset
from mpisparse.runtime.report.bench_figures import FIGURES, Bars, BenchRecord, Plot, Scatter
from mpisparse.runtime.report.chart import figure
from mpisparse.runtime.report.scale import fit
from mpisparse.runtime.report.scatter import draw_scatter
from mpisparse.runtime.report.svg import HEIGHT, RIGHT, WIDTH, Frame, Look, run_classes
from mpisparse.runtime.report.thin import Columns
from mpisparse.runtime.report.units import number, say
from mpisparse.version import __version__

COLUMNS = 220
BAR, NAMED, NAME_LETTER = 17.0, 200.0, 6.6  # height of a bar, maximum width of its name, width of a letter
LONGEST = 28  # letters of a name, before it is shortened
LEGEND_LINE, LEGEND_LETTER = 15.0, 6.1
HIDDEN = ("bench", "elements", "rounds", "ms_by_phase")


@dataclass(frozen=True)
class Series:
    """One line of a plot."""

    name: str
    x: Doubles
    y: Doubles


def read_records(path: Path) -> list[BenchRecord]:
    """Read the records of a file; raise ConfigurationError if a line is not a record."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the records in {path}: {error}") from error
    records = []
    for at, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            known = record["bench"] in FIGURES
        except (ValueError, TypeError, LookupError, RecursionError):
            known = False
        if not known:
            raise ConfigurationError(
                f"expected a record of mpisparse bench in line {at} of {path}, got {line[:60]!r}; pass what its --out wrote"
            )
        records.append(record)
    if not records:
        raise ConfigurationError(f"expected records of mpisparse bench in {path}, got an empty file")
    return records


def figures(records: Sequence[BenchRecord]) -> list[tuple[str, str, str]]:
    """Return the pictures of the records as (title, note, SVG), without those that would be empty."""
    drawn = []
    for bench in dict.fromkeys(record["bench"] for record in records):
        mine = [record for record in records if record["bench"] == bench]
        for shape in FIGURES[bench]:
            chosen = [r for r in mine if shape.only(r) and r.get(shape.y) is not None]
            picture = _draw(shape, chosen)
            if picture:
                drawn.append((shape.title, shape.note, picture))
    return drawn


def bench_page(records: Sequence[BenchRecord]) -> str:
    """Return a page of pictures and tables."""
    style = "".join(map(asset, ("colours.css", "page.css", "svg.css")))
    benches = list(dict.fromkeys(record["bench"] for record in records))
    body = [f"<header><h1>bench {escape(', '.join(benches))}</h1></header><main>"]
    shown = "".join(figure(title, note, picture) for title, note, picture in figures(records))
    body.append(f'<section><div class="charts">\n{shown}</div></section>')
    body += [_table(bench, [r for r in records if r["bench"] == bench]) for bench in benches]
    body.append(f"</main><footer>Written by mpisparse {__version__}.</footer>")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><meta name="color-scheme" content="light dark"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>bench {escape(', '.join(benches))} · mpisparse</title>\n<style>\n{style}</style></head>\n"
        f"<body>\n{''.join(body)}\n</body></html>\n"
    )


def standalone(picture: str) -> str:
    """Make a picture a file of its own: add its style and a background."""
    opening, rest = picture.split(">", 1)
    ground = '<rect width="100%" height="100%" rx="8" style="fill:var(--card)"/>'
    style = asset("colours.css") + asset("svg.css") + "svg { font-family: system-ui, sans-serif }"
    return f"{opening}><style>{escape(style, quote=False)}</style>{ground}{rest}\n"


def _draw(shape: Plot | Bars | Scatter, records: Sequence[BenchRecord]) -> str:
    """Draw a picture of the records; empty if there is nothing to draw."""
    if isinstance(shape, Scatter):
        return draw_scatter(shape, records)
    return _bars(shape, records) if isinstance(shape, Bars) else _lines(shape, records)


def _values(record: BenchRecord, shape: Plot | Bars) -> Any:
    """Return the values of a record to draw, in the base unit of the axis."""
    factor = {"ms": 1e-3, "MB": 1e6}.get(shape.kind, 1.0)
    return np.asarray(record[shape.y], dtype=np.float64) * factor


def _kind(shape: Plot | Bars) -> str:
    return {"ms": "seconds", "MB": "bytes"}.get(shape.kind, shape.kind)


def _series(plot: Plot, records: Sequence[BenchRecord]) -> list[Series]:
    if not plot.by_ranks:
        made = [(plot.name(r), _steps(plot, r), _values(r, plot)) for r in records]
        return [Series(name, x, y) for name, x, y in made if y.ndim == 1 and len(y)]
    series = []
    for name in dict.fromkeys(map(plot.name, records)):
        mine = sorted((r for r in records if plot.name(r) == name), key=lambda r: int(r["ranks"]))
        x = np.array([r["ranks"] for r in mine], dtype=np.float64)
        series.append(Series(name, x, np.array([_values(r, plot) for r in mine])))
    return series


def _steps(plot: Plot, record: BenchRecord) -> Doubles:
    """Return the steps of a record's values."""
    return np.asarray(record[plot.steps] if plot.steps else range(1, len(record[plot.y]) + 1), dtype=np.float64)


def _lines(plot: Plot, records: Sequence[BenchRecord]) -> str:
    """Draw lines with a legend below."""
    series = _series(plot, records)
    x, y = fit([s.x for s in series], log=plot.by_ranks), fit([s.y for s in series], log=plot.log, pad=0.05)
    if not series or x is None or y is None:
        return ""
    x = replace(x, kind="count", name="ranks" if plot.by_ranks else "steps")
    legend, height = _legend([s.name for s in series])
    frame = Frame(x, replace(y, kind=_kind(plot)))
    drawn = []
    for i, s in enumerate(series):
        columns = Columns.along(s.x, COLUMNS)
        drawn.append(svg.draw_line(frame, columns.last(s.x), columns.mean(s.y), Look(run_classes(i), s.name)))
    picture = svg.picture(plot.title, _describe(plot, series), frame, drawn)
    size = f"0 0 {WIDTH:g} {HEIGHT:g}"
    return picture.replace(size, f"0 0 {WIDTH:g} {HEIGHT + height:g}").removesuffix("</svg>") + legend + "</svg>"


def _legend(names: Sequence[str]) -> tuple[str, float]:
    """Draw the names with their colours, as many per line as fit; return them and their height."""
    parts, across, down = [], 8.0, HEIGHT + 8
    for i, name in enumerate(names):
        width = 26 + LEGEND_LETTER * len(name)
        if across > 8 and across + width > WIDTH:
            across, down = 8.0, down + LEGEND_LINE
        parts.append(f'<path class="line {run_classes(i)}" d="M{across:g} {down:g}h14"/>')
        parts.append(f'<text x="{across + 18:g}" y="{down + 4:g}">{escape(name)}</text>')
        across += width
    return "".join(parts), down - HEIGHT + 10


def _short(name: str) -> str:
    """Shorten a name in the middle, as names mostly differ at their ends."""
    half = LONGEST // 2
    return name if len(name) <= LONGEST else f"{name[: half - 1]}…{name[-half:]}"


def _bars(bars: Bars, records: Sequence[BenchRecord]) -> str:
    """Draw a bar per record, between its name and its value."""
    values = [float(_values(r, bars)) for r in records]
    most = max((v for v in values if math.isfinite(v)), default=0.0)
    if most <= 0:
        return ""
    names = [_short(bars.name(r)) for r in records]
    named = min(NAMED, 10 + NAME_LETTER * max(map(len, names)))
    room = WIDTH - named - RIGHT - 52
    parts = []
    for i, value in enumerate(values):
        y = 8 + i * (BAR + 4)
        length = max(1.0, room * max(value, 0.0) / most) if math.isfinite(value) else 0.0
        parts.append(f'<text class="y" x="{named - 5:g}" y="{y + BAR / 2:g}">{escape(names[i])}</text>')
        parts.append(
            f'<rect class="bar {run_classes(i % 8)}" x="{named:g}" y="{y:g}" width="{length:.1f}" height="{BAR:g}"/>'
        )
        shown = say(_kind(bars), value) if _kind(bars) != "number" else number(value, 3)
        parts.append(f'<text class="value" x="{named + length + 5:.1f}" y="{y + BAR / 2:g}">{escape(shown)}</text>')
    words = "; ".join(f"{bars.name(r)}: {say(_kind(bars), v)}" for r, v in zip(records, values, strict=True))
    return svg.blank(bars.title, f"{bars.note}. {words}", "".join(parts), height=16 + len(records) * (BAR + 4))


def _describe(plot: Plot, series: Sequence[Series]) -> str:
    parts = [f"{plot.note}." if plot.note else ""]
    for s in series:
        finite = s.y[np.isfinite(s.y)]
        if len(finite):
            parts.append(f"{s.name}: from {say(_kind(plot), float(finite[0]))} to {say(_kind(plot), float(finite[-1]))}.")
    return " ".join(parts)


def _table(bench: str, records: Sequence[BenchRecord]) -> str:
    keys = [k for k in dict.fromkeys(k for r in records for k in r) if k not in HIDDEN and not k.endswith("_by_step")]
    head = "".join(f"<th>{escape(key.replace('_', ' '))}</th>" for key in keys)
    rows = "".join("<tr>" + "".join(f"<td>{_cell(r.get(key))}</td>" for key in keys) + "</tr>" for r in records)
    table = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    return f'<section><h2>bench {escape(bench)}</h2><div class="card">{table}</div></section>'


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{escape(str(key))}: {_cell(each)}" for key, each in value.items())
    return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else escape(str(value))
