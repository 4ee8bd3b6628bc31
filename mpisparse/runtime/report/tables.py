"""The page's tables: summary, settings and events of each run, as HTML."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape

from mpisparse.runtime.report import summary
from mpisparse.runtime.report.data import QUIET
from mpisparse.runtime.report.groups import Group
from mpisparse.runtime.report.run import Event, Run
from mpisparse.runtime.report.units import number, seconds

LISTED = 40  # events per run that are listed
Row = tuple[str, list[str], bool]  # label, cells, and whether it stands out


def tables(runs: Sequence[Run], groups: Sequence[Group]) -> str:
    """Return the tables of summary and settings, and of means over seeds if there are several."""
    rows = [(label, [_data(cell) for cell in cells], False) for label, cells in summary.headline(runs)]
    first, rest = summary.settings(runs)
    shown = [("Summary", "summary", _table(_run_heads(runs), rows))]
    if any(len(group.runs) > 1 for group in groups):
        means = [(label, [_data(c) for c in cells], False) for label, cells in summary.over_seeds(runs, groups)]
        shown.insert(
            0, ("Means over seeds", "seeds", _table([(f"r{group.runs[0]}", group.name) for group in groups], means))
        )
    if first or rest:
        heads = _run_heads(runs)
        more = f"<details><summary>All settings</summary>{_table(heads, _settings(runs, rest))}</details>" if rest else ""
        shown.append(("Settings", "settings", _table(heads, _settings(runs, first)) + more))
    parts = [f'<section id="{mark}"><h2>{title}</h2><div class="card">{body}</div></section>' for title, mark, body in shown]
    return f'<div class="tables{" many" if len(runs) > 2 else ""}">{"".join(parts)}</div>\n'


def events(runs: Sequence[Run]) -> str:
    """Return the lists of events; empty if there are none."""
    lists = "".join(_event_list(i, run) for i, run in enumerate(runs) if run.events)
    note = "Short ticks at the bottom of a chart are starts, checkpoints and ends; vertical lines are all other events."
    return f'<section id="events"><h2>Events</h2><p>{note}</p>{lists}</section>\n' if lists else ""


def _data(cell: summary.Cell) -> str:
    note = f" <small>{escape(cell.note)}</small>" if cell.note else ""
    if math.isnan(cell.value):
        return escape(cell.text) + note
    return f'<data value="{cell.value!r}">{escape(cell.text)}</data>{note}'


def _settings(runs: Sequence[Run], names: Iterable[str]) -> list[Row]:
    return [
        (name, [escape(_shown(run.settings.get(name))) for run in runs], len(runs) > 1 and summary.differs(runs, name))
        for name in names
    ]


def _shown(value: object) -> str:
    if value is None:
        return "–"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _run_heads(runs: Sequence[Run]) -> list[tuple[str, str]]:
    return [(f"r{i}", run.name if len(runs) > 1 else "") for i, run in enumerate(runs)]


def _table(heads: Sequence[tuple[str, str]], rows: Iterable[Row]) -> str:
    """Make a table with a column per run or group, each with a class and a name; marked rows stand out."""
    columns = "".join(
        f'<th scope="col" class="{mark}"><span title="{escape(name)}">{escape(name)}</span></th>' for mark, name in heads
    )
    lines = []
    for label, cells, marked in rows:
        values = "".join(f'<td class="{mark}">{cell}</td>' for (mark, _), cell in zip(heads, cells, strict=True))
        row = '<tr class="differs">' if marked else "<tr>"
        lines.append(f'{row}<th scope="row">{escape(label)}</th>{values}</tr>')
    head = f"<thead><tr><td></td>{columns}</tr></thead>" if heads[0][1] else ""
    return f'<div class="wide"><table>{head}<tbody>{"".join(lines)}</tbody></table></div>'


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
    name = f'<b class="r{index}">{escape(run.name)}</b>: {counts}'
    table = f'<div class="wide"><table class="events">{head}<tbody>{rows}</tbody></table></div>'
    return f'<details class="card r{index}"><summary>{name}</summary>{table}{left}</details>'


def _listed(found: Sequence[Event]) -> list[Event]:
    """Choose the events to list: all if they are few, else the rare kinds, else the first and last of these."""
    if len(found) <= LISTED:
        return list(found)
    rare = [event for event in found if event.kind not in QUIET]
    return rare if len(rare) <= LISTED else [*rare[: LISTED // 2], *rare[-LISTED // 2 :]]
