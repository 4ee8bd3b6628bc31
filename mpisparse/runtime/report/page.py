"""The page of runs: summary and settings in tables, then the charts, in one self-contained HTML file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from importlib.resources import files

from mpisparse.runtime.report import overlays, partitions, phases, summary
from mpisparse.runtime.report.chart import QUIET, Sheet, run_classes
from mpisparse.runtime.report.read import Event, Run
from mpisparse.runtime.report.units import number, seconds
from mpisparse.version import __version__

CROWD = 4  # with more runs, bands are fainter
LISTED = 40  # events per run that are listed


def page(runs: Sequence[Run]) -> str:
    """Return the page of these runs as HTML."""
    sheet = Sheet(runs)
    title = f"{runs[0].name if len(runs) == 1 else f'{len(runs)} runs'} · mpisparse"
    body = [
        _head(runs),
        _legend(runs),
        '<main class="crowd">' if len(runs) > CROWD else "<main>",
        _tables(runs),
        _section("Loss", "loss", overlays.loss(sheet)),
        _section("Metric", "metric", overlays.metrics(sheet)),
        _section("Density and threshold", "density", overlays.density(sheet)),
        _section("Traffic and balance", "traffic", overlays.traffic(sheet)),
        *(_section("Speculation", "speculation", figures) for figures in [overlays.speculation(sheet)] if figures),
        *(_section("Details of schemes", "details", figures) for figures in [overlays.details(sheet)] if figures),
        _section("Time", "time", phases.overview(sheet)),
        _each(sheet),
        _events(runs),
        "</main>",
        f"<footer>Written by mpisparse {__version__} on {datetime.now():%Y-%m-%d at %H:%M}.</footer>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        '<meta name="color-scheme" content="light dark"/>'
        f"<title>{escape(title)}</title>\n<style>\n{asset('page.css')}{_hiding(len(runs))}</style></head>\n"
        f"<body>\n{''.join(body)}\n<script>//<![CDATA[\n{asset('page.js')}//]]></script></body></html>\n"
    )


def _head(runs: Sequence[Run]) -> str:
    what = " on ".join(_shared(runs, name) for name in ("model", "data") if _shared(runs, name))
    count = "" if len(runs) == 1 else f"{len(runs)} runs"
    title = runs[0].name if len(runs) == 1 else " · ".join(run.name for run in runs) if len(runs) <= 3 else count
    under = " of ".join(part for part in (count, what) if part and part != title)
    subtitle = f"<p>{escape(under)}</p>" if under else ""
    return f"<header><h1>{escape(title)}</h1>{subtitle}</header>\n"


def _shared(runs: Sequence[Run], name: str) -> str:
    value = runs[0].settings.get(name)
    return "" if value is None or summary.differs(runs, name) else str(value)


def _legend(runs: Sequence[Run]) -> str:
    """List the runs with their colours; a checkbox hides a run, by CSS alone."""
    keys = "".join(
        f'<label class="{run_classes(i)}" title="{escape(run.name)}">'
        f'<input type="checkbox" id="show-{i}" checked="checked"/>'
        f'<svg class="key" viewBox="0 0 20 8" aria-hidden="true"><path class="line {run_classes(i)}" d="M2 4H18"/></svg>'
        f"<span>{escape(run.name)}</span></label>"
        for i, run in enumerate(runs)
    )
    return f'<nav class="legend" aria-label="Runs">{keys}</nav>\n' if len(runs) > 1 else ""


def _hiding(count: int) -> str:
    return "".join(f":root:has(#show-{i}:not(:checked)) main .r{i} {{ display: none }}\n" for i in range(count))


def _tables(runs: Sequence[Run]) -> str:
    rows = [(label, [_data(cell) for cell in cells], False) for label, cells in summary.headline(runs)]
    first, rest = summary.settings(runs)
    tables = [("Summary", "summary", _table(runs, rows))]
    if first or rest:
        more = f"<details><summary>All settings</summary>{_table(runs, _settings(runs, rest))}</details>" if rest else ""
        tables.append(("Settings", "settings", _table(runs, _settings(runs, first)) + more))
    parts = [
        f'<section id="{mark}"><h2>{title}</h2><div class="card">{body}</div></section>' for title, mark, body in tables
    ]
    return f'<div class="tables{" many" if len(runs) > 2 else ""}">{"".join(parts)}</div>\n'


def _data(cell: summary.Cell) -> str:
    note = f" <small>{escape(cell.note)}</small>" if cell.note else ""
    if math.isnan(cell.value):
        return escape(cell.text) + note
    return f'<data value="{cell.value!r}">{escape(cell.text)}</data>{note}'


def _settings(runs: Sequence[Run], names: Iterable[str]) -> list[tuple[str, list[str], bool]]:
    return [
        (name, [escape(_shown(run.settings.get(name))) for run in runs], len(runs) > 1 and summary.differs(runs, name))
        for name in names
    ]


def _shown(value: object) -> str:
    if value is None:
        return "–"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _table(runs: Sequence[Run], rows: Iterable[tuple[str, list[str], bool]]) -> str:
    """Make a table with a column per run; marked rows stand out."""
    heads = "".join(f'<th scope="col" class="{run_classes(i)}">{_name(run)}</th>' for i, run in enumerate(runs))
    lines = []
    for label, cells, marked in rows:
        values = "".join(f'<td class="r{i}">{cell}</td>' for i, cell in enumerate(cells))
        row = '<tr class="differs">' if marked else "<tr>"
        lines.append(f'{row}<th scope="row">{escape(label)}</th>{values}</tr>')
    head = f"<thead><tr><td></td>{heads}</tr></thead>" if len(runs) > 1 else ""
    return f'<div class="wide"><table>{head}<tbody>{"".join(lines)}</tbody></table></div>'


def _name(run: Run) -> str:
    return f'<span title="{escape(run.name)}">{escape(run.name)}</span>'


def _section(title: str, mark: str, figures: Sequence[str]) -> str:
    body = f'<div class="charts">\n{"".join(figures)}</div>' if figures else "<p>Nothing was evaluated.</p>"
    return f'<section id="{mark}"><h2>{title}</h2>{body}</section>\n'


def _each(sheet: Sheet) -> str:
    """Draw phases, borders and workloads, one row of charts per run."""
    keys = "".join(map(phases.key, phases.all_phases(sheet)))
    rows = []
    for i, run in enumerate(sheet.runs):
        name = f'<h3 class="{run_classes(i)}">{escape(run.name)}</h3>' if len(sheet.runs) > 1 else ""
        figures = phases.stacked(sheet, i) + partitions.borders(sheet, i) + partitions.workloads(sheet, i)
        rows.append(f'<div class="run r{i}">{name}<div class="charts">\n{figures}</div></div>')
    return f'<section id="partitions"><h2>Phases and partitions</h2><p class="phases">{keys}</p>{"".join(rows)}</section>\n'


def _events(runs: Sequence[Run]) -> str:
    lists = "".join(_event_list(i, run) for i, run in enumerate(runs) if run.events)
    note = "Short ticks at the bottom of a chart are starts, checkpoints and ends; vertical lines are all other events."
    return f'<section id="events"><h2>Events</h2><p>{note}</p>{lists}</section>\n' if lists else ""


def _event_list(index: int, run: Run) -> str:
    counts = ", ".join(
        escape(kind) + (f" ×{number(n)}" if n > 1 else "")
        for kind, n in Counter(event.kind for event in run.events).most_common()
    )
    listed = _listed(run.events)
    rows = "".join(
        f"<tr><td>{number(event.step)}</td><td>{seconds(event.time)}</td><td>{escape(event.kind)}</td><td>{escape(event.text)}</td></tr>"
        for event in listed
    )
    left = f"<p>{number(len(run.events) - len(listed))} more are not listed.</p>" if len(listed) < len(run.events) else ""
    head = "<thead><tr><th>step</th><th>time</th><th>event</th><th></th></tr></thead>"
    name = f'<b class="{run_classes(index)}">{escape(run.name)}</b>: {counts}'
    table = f'<div class="wide"><table class="events">{head}<tbody>{rows}</tbody></table></div>'
    return f'<details class="card r{index}"><summary>{name}</summary>{table}{left}</details>'


def _listed(events: Sequence[Event]) -> list[Event]:
    """Choose the events to list: all if they are few, else the rare kinds, else the first and last of these."""
    if len(events) <= LISTED:
        return list(events)
    rare = [event for event in events if event.kind not in QUIET]
    return rare if len(rare) <= LISTED else [*rare[: LISTED // 2], *rare[-LISTED // 2 :]]


def asset(name: str) -> str:
    """Read a file from this package's directory."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
