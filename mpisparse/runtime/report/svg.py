"""Draw lines, bands, areas and marks in a frame of two axes, as SVG text.

Every picture has the same width in its own units; the page scales it. Colours are CSS classes, set by the page's style.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np

from mpisparse.arrays import Bools, Doubles
from mpisparse.runtime.report.scale import Axis
from mpisparse.runtime.report.thin import Thinned

WIDTH, HEIGHT = 360.0, 226.0
LEFT, RIGHT, TOP, BOTTOM = 54.0, 12.0, 9.0, 36.0
LETTER = 6.3  # approximate width of a letter
SLIVER = 0.03  # half the width of an area that has one column
DOTTED = 40  # up to this many points are also drawn as dots


@dataclass(frozen=True)
class Frame:
    """Two axes, and the rectangle between them."""

    x: Axis
    y: Axis
    height: float = HEIGHT

    @property
    def bottom(self) -> float:
        return self.height - BOTTOM

    def across(self, fractions: Doubles) -> Doubles:
        """Convert fractions of the x axis to the picture's units."""
        return LEFT + np.clip(fractions, -9.0, 9.0) * (WIDTH - LEFT - RIGHT)

    def up(self, values: Doubles) -> Doubles:
        """Convert values on the y axis to the picture's units; what a log axis cannot show is below the picture."""
        fractions = np.nan_to_num(self.y.fraction(values), nan=-9.0)
        return self.bottom - np.clip(fractions, -9.0, 9.0) * (self.bottom - TOP)


@dataclass(frozen=True)
class Look:
    """How something is drawn: CSS classes, the name of what it shows, and a colour if the classes set none."""

    classes: str
    name: str = ""
    colour: str = ""

    def attributes(self, kind: str) -> str:
        name = f' data-name="{escape(self.name)}"' if self.name else ""
        colour = f' style="--c:{self.colour}"' if self.colour else ""
        return f'class="{kind} {self.classes}"{name}{colour}'


def draw_line(frame: Frame, thinned: Thinned, look: Look, series: int = 0) -> str:
    """Draw the means of a series as a line, broken where values are missing; few points also as dots."""
    if not len(thinned.fractions):
        return ""
    across, up = frame.across(thinned.fractions), frame.up(thinned.mean[:, series])
    spans = _spans(thinned.starts)
    lines = "".join(_path(across[a:b], up[a:b]) if b - a > 1 else _path(across[a:b], up[a:b]) + "h0" for a, b in spans)
    dots = "".join(f"M{_short(x)} {_short(y)}h0" for x, y in zip(across, up, strict=True)) if len(across) <= DOTTED else ""
    dotted = f'<path class="dots {look.classes}"{_style(look)} d="{dots}"/>' if dots else ""
    return f'<path {look.attributes("line")} d="{lines}"/>{dotted}'


def draw_band(frame: Frame, thinned: Thinned, look: Look, series: int = 0) -> str:
    """Fill between the minima and maxima of a series, unless they coincide."""
    low, high = frame.up(thinned.low[:, series]), frame.up(thinned.high[:, series])
    if not len(low) or float((low - high).max()) < 0.5:
        return ""
    across = frame.across(thinned.fractions)
    areas = "".join(_area(across[a:b], high[a:b], low[a:b]) for a, b in _spans(thinned.starts))
    return f'<path {look.attributes("band")} d="{areas}"/>'


def draw_area(frame: Frame, fractions: Doubles, edges: tuple[Doubles, Doubles], look: Look) -> str:
    """Fill between two series of values, lower and upper."""
    lower, upper = edges
    if len(fractions) == 1:
        fractions = np.array([fractions[0] - SLIVER, fractions[0] + SLIVER])
        lower, upper = np.repeat(lower, 2), np.repeat(upper, 2)
    return f'<path {look.attributes("area")} d="{_area(frame.across(fractions), frame.up(upper), frame.up(lower))}"/>'


def draw_level(frame: Frame, value: float, look: Look) -> str:
    """Draw a horizontal line at a value, labelled at its right end."""
    up = _short(float(frame.up(np.array([value]))[0]))
    named = f'<text class="level {look.classes}" x="{WIDTH - RIGHT - 3:g}" y="{up}" dy="-3">{escape(look.name)}</text>'
    return f'<path class="level {look.classes}" d="M{LEFT:g} {up}H{WIDTH - RIGHT:g}"/>{named if look.name else ""}'


def draw_marks(frame: Frame, fractions: Doubles, look: Look, *, tall: bool) -> str:
    """Draw thin vertical marks over the whole height or short ones at the bottom; at most one per unit of width."""
    inside = fractions[(fractions >= -1e-9) & (fractions <= 1 + 1e-9)]
    across = sorted({round(float(x)) for x in frame.across(inside)})
    length = frame.bottom - TOP if tall else 6.0
    d = "".join(f"M{x} {frame.bottom:g}v-{length:g}" for x in across)
    return f'<path {look.attributes("mark")} d="{d}"/>' if d else ""


def draw_crosses(frame: Frame, fractions: Doubles, look: Look) -> str:
    """Draw a cross at the top wherever a value is not finite."""
    d = "".join(f"M{_short(x - 2.5)} {TOP + 2:g}l5 5m0-5l-5 5" for x in frame.across(fractions))
    return f'<path {look.attributes("cross")} d="{d}"/>' if d else ""


def draw_axes(frame: Frame) -> str:
    """Draw the grid, the ticks and their labels."""
    right, bottom = WIDTH - RIGHT, frame.bottom
    parts = []
    for value, label in frame.y.ticks(5):
        y = _short(float(frame.up(np.array([value]))[0]))
        parts.append(
            f'<path class="grid" d="M{LEFT:g} {y}H{right:g}"/><text class="y" x="{LEFT - 5:g}" y="{y}">{label}</text>'
        )
    for value, label in frame.x.ticks(5):
        x = float(frame.across(frame.x.fraction(np.array([value])))[0])
        side = " last" if x + LETTER * len(label) / 2 > WIDTH else ""
        parts.append(f'<path class="tick" d="M{_short(x)} {bottom:g}v3"/>')
        parts.append(f'<text class="x{side}" x="{_short(x)}" y="{bottom + 14:g}">{label}</text>')
    parts.append(f'<path class="axis" d="M{LEFT:g} {bottom:g}H{right:g}"/>')
    parts.append(f'<text class="name" x="{(LEFT + right) / 2:g}" y="{bottom + 30:g}">{escape(frame.x.name)}</text>')
    return f"<g>{''.join(parts)}</g>"


def picture(title: str, description: str, frame: Frame, drawn: Iterable[str]) -> str:
    """Combine axes and drawings, clipped to the frame, into a picture with a title and a description."""
    plot = f"{LEFT - 3:g} {TOP - 3:g} {WIDTH - LEFT - RIGHT + 6:g} {frame.bottom - TOP + 6:g}"
    x, y, width, height = plot.split()
    inner = f'<svg x="{x}" y="{y}" width="{width}" height="{height}" viewBox="{plot}">{"".join(drawn)}</svg>'
    box = f"{LEFT:g} {TOP:g} {WIDTH - RIGHT:g} {frame.bottom:g}"
    data = f' data-box="{box}" data-x="{_axis_data(frame.x)}" data-y="{_axis_data(frame.y)}"'
    return blank(title, description, draw_axes(frame) + inner, data=data, height=frame.height)


def blank(title: str, description: str, body: str, *, data: str = "", height: float = HEIGHT) -> str:
    """Return a picture with a title, a description and any content."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" role="img"{data}>'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>{body}</svg>"
    )


def nothing(title: str, why: str) -> str:
    """Draw an empty picture that says why it is empty."""
    body = f'<text class="nothing" x="{WIDTH / 2:g}" y="{HEIGHT / 2:g}">{escape(why)}</text>'
    return blank(title, why, body)


def _axis_data(axis: Axis) -> str:
    return f"{axis.lo!r} {axis.hi!r} {int(axis.log)} {axis.kind} {escape(axis.name)}"


def _style(look: Look) -> str:
    return f' style="--c:{look.colour}"' if look.colour else ""


def _spans(starts: Bools) -> list[tuple[int, int]]:
    breaks = [0, *(int(i) for i in np.flatnonzero(starts) if i), len(starts)]
    return list(pairwise(breaks))


def _path(across: Doubles, up: Doubles) -> str:
    return "M" + "L".join(f"{_short(x)} {_short(y)}" for x, y in zip(across.tolist(), up.tolist(), strict=True))


def _area(across: Doubles, upper: Doubles, lower: Doubles) -> str:
    return _path(across, upper) + "L" + _path(across[::-1], lower[::-1])[1:] + "z"


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
