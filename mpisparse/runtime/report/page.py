"""The page of runs: tables as HTML, charts as a JSON block that the page's script draws, in one self-contained file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from html import escape

from mpisparse.measures import in_order, phase
from mpisparse.runtime.report import assets, overlays, partitions, phases, summary
from mpisparse.runtime.report.chart import Chart, describe, figure
from mpisparse.runtime.report.data import Block
from mpisparse.runtime.report.groups import seed_groups
from mpisparse.runtime.report.run import Run
from mpisparse.runtime.report.tables import events, tables
from mpisparse.version import __version__

Maker = Callable[[Sequence[Run]], list[Chart]]
SECTIONS: tuple[tuple[str, str, tuple[Maker, ...]], ...] = (
    ("Loss", "loss", (overlays.loss,)),
    ("Metric", "metric", (overlays.metrics,)),
    ("Density and threshold", "density", (overlays.density,)),
    ("Traffic and balance", "traffic", (overlays.traffic,)),
    ("Speculation", "speculation", (overlays.speculation,)),
    ("Details of schemes", "details", (overlays.details,)),
    ("Time", "time", (phases.totals, overlays.rates)),
)


def page(runs: Sequence[Run], *, live: float | None = None, waiting: Sequence[str] = ()) -> str:
    """Return the page of these runs as HTML.

    live: seconds after which the page asks its server for a newer one. waiting: names of runs without a step.
    """
    title = f"{runs[0].name if len(runs) == 1 else f'{len(runs)} runs'}" if runs else "waiting for the first step"
    groups = seed_groups(runs)
    block = Block(runs, groups)
    body = [_waiting(waiting)]
    if runs:
        sections = (_section(block, *each) for each in SECTIONS)
        body += [tables(runs, groups), *sections, _each(block), events(runs)]
    data = block.text(phases=phases.means(runs), live=live)
    script = "\n" + assets.script()
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        '<meta name="color-scheme" content="light dark"/>'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(assets.policy(script))}"/>'
        f"<title>{escape(title)} · mpisparse</title>\n<style>\n{assets.style()}</style></head>\n<body>\n"
        f'{_head(runs)}<div id="bar"></div>\n<main>\n{"".join(body)}</main>\n'
        f"<footer>Written by mpisparse {__version__} on {datetime.now():%Y-%m-%d at %H:%M}; drawn by uPlot.</footer>\n"
        "<noscript><p>Charts need JavaScript; tables do not.</p></noscript>\n"
        f'<script type="application/json" id="data">{data}</script>\n<script>{script}</script></body></html>\n'
    )


def _head(runs: Sequence[Run]) -> str:
    if not runs:
        return "<header><h1>mpisparse</h1></header>\n"
    what = " on ".join(_shared(runs, name) for name in ("model", "data") if _shared(runs, name))
    count = "" if len(runs) == 1 else f"{len(runs)} runs"
    title = runs[0].name if len(runs) == 1 else " · ".join(run.name for run in runs) if len(runs) <= 3 else count
    under = " of ".join(part for part in (count, what) if part and part != title)
    subtitle = f"<p>{escape(under)}</p>" if under else ""
    return f"<header><h1>{escape(title)}</h1>{subtitle}</header>\n"


def _shared(runs: Sequence[Run], name: str) -> str:
    value = runs[0].settings.get(name)
    return "" if value is None or summary.differs(runs, name) else str(value)


def _waiting(names: Sequence[str]) -> str:
    return f'<p class="card">Waiting for the first step of {escape(", ".join(names))}.</p>\n' if names else ""


def _section(block: Block, title: str, mark: str, makers: Sequence[Maker]) -> str:
    """Return a section of the charts that have something to show; empty if none has."""
    charts = [chart for maker in makers for chart in maker(block.runs)]
    figures = "".join(_figure(chart) for chart in charts if block.add(chart))
    if mark == "time" and (said := phases.in_words(block.runs)):
        figures = _bars(said) + figures
    return f'<section id="{mark}"><h2>{title}</h2><div class="charts">\n{figures}</div></section>\n' if figures else ""


def _figure(chart: Chart) -> str:
    """Return a figure that the script fills; its description is for those who do not see it."""
    plot = f'<div class="plot" role="img" aria-label="{escape(chart.title)}"></div>'
    said = f'<p class="described">{escape(describe(chart))}</p>'
    return figure(chart.title, chart.note, plot + said, f' data-chart="{escape(chart.mark)}"')


def _bars(said: str) -> str:
    body = f'<div class="plot free"></div><p class="described">{escape(said)}</p>'
    return figure("Mean time of each phase", "per step, over all steps and ranks", body, ' data-chart="phases"')


def _each(block: Block) -> str:
    """Return phases, borders and workloads, one row of charts per run."""
    runs = block.runs
    rows, used = [], set()
    for i, run in enumerate(runs):
        name = f'<h3 class="r{i}">{escape(run.name)}</h3>' if len(runs) > 1 else ""
        charts = [maker(runs, i) for maker in (phases.stacked, partitions.borders, partitions.workloads)]
        used |= {trace.name for trace in charts[0].traces}
        figures = "".join(_figure(chart) for chart in charts if block.add(chart))
        if figures:
            rows.append(f'<div class="run r{i}">{name}<div class="charts">\n{figures}</div></div>')
    keys, title = "".join(map(_key, in_order(used))), "<h2>Phases and partitions</h2>"
    return f'<section id="partitions">{title}<p class="phases">{keys}</p>{"".join(rows)}</section>\n' if rows else ""


def _key(name: str) -> str:
    """Return the legend entry of a phase: its name in its colour, with its meaning as a tooltip."""
    about = phase(name)
    swatch = f'<i class="swatch" style="--c:{escape(about.colour)}"></i>'
    return f'<span title="{escape(about.meaning or name)}">{swatch}{escape(name)}</span>'
