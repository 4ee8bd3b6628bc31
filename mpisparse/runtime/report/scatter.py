"""Named dots against a value on a log scale, with the frontier: those that none beats in both values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import NamedTuple

import numpy as np

from mpisparse.runtime.report import svg
from mpisparse.runtime.report.bench_figures import BenchRecord, Scatter
from mpisparse.runtime.report.scale import fit
from mpisparse.runtime.report.svg import LEFT, RIGHT, TOP, WIDTH, Frame, Look, run_classes
from mpisparse.runtime.report.units import number

PAD = 0.12  # of the axes, so that names fit
LINE, LETTER, GAP = 11.0, 5.6, 5.0  # height of a name, width of a letter, distance from its dot


class Dot(NamedTuple):
    """A record's place in the picture."""

    name: str
    x: float
    y: float


def draw_scatter(shape: Scatter, records: Sequence[BenchRecord]) -> str:
    """Draw the records that have both values; empty if none has."""
    dots = [Dot(shape.name(r), float(r[shape.x]), float(r[shape.y])) for r in records if r.get(shape.x) is not None]
    dots = [dot for dot in dots if math.isfinite(dot.y)]
    shown = [dot for dot in dots if dot.x > 0]
    x = fit([np.array([dot.x for dot in shown])], log=True, pad=PAD)
    y = fit([np.array([dot.y for dot in dots])], pad=PAD)
    if x is None or y is None:
        return ""
    frame = Frame(replace(x, name=shape.along), y)
    drawn = [svg.draw_level(frame, dot.y, Look("", dot.name)) for dot in dots if dot.name in shape.levels]
    drawn.append(_frontier(frame, shown))
    drawn += [_dot(frame, dot, i) for i, dot in enumerate(shown)]
    drawn += _names(frame, [dot for dot in shown if dot.name not in shape.levels])
    words = "; ".join(f"{dot.name}: {number(dot.y)} at {number(dot.x)}" for dot in dots)
    return svg.picture(shape.title, f"{shape.note}. {words}", frame, drawn)


def frontier(dots: Sequence[Dot]) -> list[Dot]:
    """Return the dots with a lower y than all those of smaller x, in the order of x."""
    best: list[Dot] = []
    for dot in sorted(dots, key=lambda dot: (dot.x, dot.y)):
        if not best or dot.y < best[-1].y:
            best.append(dot)
    return best


def _place(frame: Frame, dot: Dot) -> tuple[float, float]:
    across = frame.across(frame.x.fraction(np.array([dot.x])))
    return float(across[0]), float(frame.up(np.array([dot.y]))[0])


def _frontier(frame: Frame, dots: Sequence[Dot]) -> str:
    places = [_place(frame, dot) for dot in frontier(dots)]
    return f'<path class="line thin ink" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in places)}"/>'


def _dot(frame: Frame, dot: Dot, number: int) -> str:
    x, y = _place(frame, dot)
    return f'<path class="dots {run_classes(number % 8)}" data-name="{escape(dot.name)}" d="M{x:.1f} {y:.1f}h0"/>'


def _names(frame: Frame, dots: Sequence[Dot]) -> list[str]:
    """Write each name beside its dot, on the other side near the right edge, and lower where another name is in the way."""
    parts: list[str] = []
    taken: list[tuple[float, float, float]] = []
    for dot in sorted(dots, key=lambda dot: -dot.y):
        x, y = _place(frame, dot)
        width = LETTER * len(dot.name)
        left = x + GAP if x + GAP + width < WIDTH - RIGHT else max(LEFT, x - GAP - width)
        while any(a < left + width and left < b and abs(y - up) < LINE for a, b, up in taken):
            y += LINE / 2
        y = max(y, TOP + LINE)
        taken.append((left, left + width, y))
        parts.append(f'<text x="{left:.1f}" y="{y + 3.5:.1f}">{escape(dot.name)}</text>')
    return parts
