"""Draw lines and levels in a frame of two axes, as SVG text: static pictures, for documents.

Every picture has the same width in its own units; the page scales it. Colours are CSS classes, set by svg.css.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

import numpy as np

from mpisparse.arrays import Bools, Doubles
from mpisparse.runtime.report.scale import Axis

WIDTH, HEIGHT = 360.0, 226.0
LEFT, RIGHT, TOP, BOTTOM = 54.0, 12.0, 9.0, 36.0
LETTER = 6.3  # approximate width of a letter
COLOURS = 8  # further lines repeat them, broken
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
    """How something is drawn: CSS classes, and the name of what it shows."""

    classes: str
    name: str = ""

    def attributes(self, kind: str) -> str:
        name = f' data-name="{escape(self.name)}"' if self.name else ""
        return f'class="{kind} {self.classes}"{name}'


def draw_line(frame: Frame, x: Doubles, y: Doubles, look: Look) -> str:
    """Draw a line, broken where values are not finite; few points also as dots."""
    good = np.isfinite(y)
    across, up = frame.across(frame.x.fraction(x)), frame.up(y)
    spans = [(int(a), int(b)) for a, b in _spans(good)]
    lines = "".join(_path(across[a:b], up[a:b]) + "h0" * (b - a == 1) for a, b in spans)
    if not lines:
        return ""
    places = zip(across[good].tolist(), up[good].tolist(), strict=True)
    dots = "".join(f"M{_short(x)} {_short(y)}h0" for x, y in places) if np.count_nonzero(good) <= DOTTED else ""
    dotted = f'<path class="dots {look.classes}" d="{dots}"/>' if dots else ""
    return f'<path {look.attributes("line")} d="{lines}"/>{dotted}'


def draw_level(frame: Frame, value: float, look: Look) -> str:
    """Draw a horizontal line at a value, labelled at its right end."""
    up = _short(float(frame.up(np.array([value]))[0]))
    named = f'<text class="level {look.classes}" x="{WIDTH - RIGHT - 3:g}" y="{up}" dy="-3">{escape(look.name)}</text>'
    return f'<path class="level {look.classes}" d="M{LEFT:g} {up}H{WIDTH - RIGHT:g}"/>{named if look.name else ""}'


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
    return blank(title, description, draw_axes(frame) + inner, height=frame.height)


def blank(title: str, description: str, body: str, *, height: float = HEIGHT) -> str:
    """Return a picture with a title, a description and any content."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" role="img">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>{body}</svg>"
    )


def run_classes(index: int) -> str:
    """Return the CSS classes of a line: its colour, and how it is broken once the colours are used up."""
    return f"c{index % COLOURS}" + (f" b{index // COLOURS % 4}" if index >= COLOURS else "")


def _spans(good: Bools) -> Iterable[tuple[int, int]]:
    """Return where values are finite, as pairs of begin and end."""
    edges = np.flatnonzero(np.diff(good.astype(np.int8), prepend=0, append=0))
    return zip(edges[::2], edges[1::2], strict=True)


def _path(across: Doubles, up: Doubles) -> str:
    return "M" + "L".join(f"{_short(x)} {_short(y)}" for x, y in zip(across.tolist(), up.tolist(), strict=True))


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
