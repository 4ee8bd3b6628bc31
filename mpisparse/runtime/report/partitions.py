"""Partitions of a run: their borders over time, and how many elements are selected in each."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from mpisparse.arrays import Bytes, Doubles
from mpisparse.runtime.report import svg
from mpisparse.runtime.report.chart import STEPS_X, Sheet, event_marks, figure, x_axis
from mpisparse.runtime.report.read import Run
from mpisparse.runtime.report.scale import Axis, fit
from mpisparse.runtime.report.svg import Frame, Look
from mpisparse.runtime.report.thin import Thinned, thin
from mpisparse.runtime.report.units import number, percent

COLUMNS, LINES, BORDERS, CELLS = 110, 16, 32, 128
ABOVE, BELOW = (222, 107, 20), (37, 110, 214)  # colours above and below the mean, readable on light and dark
Stretch = tuple[Doubles, Doubles]  # steps, and a matrix with a row per step


def borders(sheet: Sheet, index: int) -> str:
    """Draw a run's partitions as bands between their borders."""
    run, title = sheet.runs[index], "Partition borders"
    stretches = _stretches(run, run.borders)
    along = x_axis(STEPS_X, [run.steps["step"]])
    if not stretches or along is None:
        return figure(title, "elements", svg.nothing(title, "no partitions"))
    most = max(matrix.shape[1] - 1 for _, matrix in stretches)
    frame = Frame(along, Axis(0.0, max(float(matrix.max()) for _, matrix in stretches) or 1.0, kind="count"))
    drawn = []
    for steps, matrix in stretches:
        count = matrix.shape[1] - 1
        shown = matrix[:, _chosen(count)] if count > LINES else matrix
        drawn += _bands(frame, thin(along.fraction(steps), shown, shown, shown, COLUMNS), lined=count <= LINES)
    drawn.append(event_marks(sheet, run, frame, STEPS_X, Look("ink")))
    note = f"first element of each of {most} partitions"
    if most > LINES:
        note += f"; {len(_chosen(most)) - 1} bands of {math.ceil(most / BORDERS)}" if most > BORDERS else ""
    last = stretches[-1][1][-1]
    described = f"{note}. At the last step: {', '.join(number(v) for v in last[:64].tolist())}."
    return figure(title, note, svg.picture(f"{title}: {run.name}", described, frame, drawn))


def workloads(sheet: Sheet, index: int) -> str:
    """Draw the selected elements of each partition relative to their mean: as lines, or as a heat map if there are many."""
    run, title = sheet.runs[index], "Workload of each partition"
    stretches = [(steps, _relative_to_mean(matrix)) for steps, matrix in _stretches(run, run.workloads)]
    along = x_axis(STEPS_X, [run.steps["step"]])
    values = [matrix[np.isfinite(matrix)] for _, matrix in stretches]
    if along is None or not any(len(part) for part in values):
        return figure(title, "selected elements", svg.nothing(title, "no partitions"))
    least, greatest = min(float(v.min()) for v in values if len(v)), max(float(v.max()) for v in values if len(v))
    described = f"Between {percent(least)} and {percent(greatest)} of the mean."
    most = max(matrix.shape[1] for _, matrix in stretches)
    if most > LINES:
        limit = max(0.1, float(np.percentile(np.abs(np.concatenate(values) - 1), 99)))
        frame = Frame(along, Axis(0.0, float(most), kind="count"))
        drawn = [_heat(frame, along.fraction(steps), matrix, limit) for steps, matrix in stretches]
        note = f"orange above, blue below the mean of {most}; full colour at {percent(limit)}"
    else:
        axis = fit([np.array([1.0]), *values], pad=0.05) or Axis(0.0, 2.0)
        frame = Frame(along, replace(axis, kind="percent"))
        drawn = [_lines(frame, along.fraction(steps), matrix) for steps, matrix in stretches]
        note = "selected, relative to the mean; grey: range" + ("; first partition blue, last red" if most > 1 else "")
    drawn.append(event_marks(sheet, run, frame, STEPS_X, Look("ink")))
    return figure(title, note, svg.picture(f"{title}: {run.name}", f"{note}. {described}", frame, drawn))


def _stretches(run: Run, lists: Sequence[array[float]]) -> list[Stretch]:
    """Split the steps where the number of ranks changes, as after a resume; leave out steps without a list."""
    steps, stretches, at = run.steps["step"], [], 0
    for width, group in groupby(lists, key=len):
        same = list(group)
        if width:
            matrix = np.frombuffer(b"".join(same), dtype=np.float64).reshape(len(same), width)
            stretches.append((steps[at : at + len(same)], matrix))
        at += len(same)
    return stretches


def _relative_to_mean(matrix: Doubles) -> Doubles:
    mean = matrix.mean(axis=1, keepdims=True)
    relative: Doubles = np.divide(matrix, mean, out=np.full(matrix.shape, math.nan), where=mean > 0)
    return relative


def _chosen(count: int) -> list[int]:
    """Choose at most BORDERS borders, evenly spaced, including the first and the last."""
    return [*range(0, count, math.ceil(count / BORDERS)), count]


def _bands(frame: Frame, columns: Thinned, *, lined: bool) -> list[str]:
    count = columns.mean.shape[1] - 1
    drawn = []
    for i in range(count):
        look = Look("even" if i % 2 else "odd", "", _hue(i, count))
        drawn.append(svg.draw_area(frame, columns.fractions, (columns.mean[:, i], columns.mean[:, i + 1]), look))
    for i in range(1, count) if lined else ():
        drawn.append(svg.draw_band(frame, columns, Look("", "", _hue(i, count)), i))
        drawn.append(svg.draw_line(frame, columns, Look("thin", f"border {i}", _hue(i, count)), i))
    return drawn


def _lines(frame: Frame, fractions: Doubles, matrix: Doubles) -> str:
    least, most = matrix.min(axis=1), matrix.max(axis=1)
    around = thin(fractions, (least + most) / 2, least, most, COLUMNS)
    columns = thin(fractions, matrix, matrix, matrix, COLUMNS)
    count = matrix.shape[1]
    drawn = [svg.draw_band(frame, around, Look("ink")), svg.draw_level(frame, 1.0, Look(""))]
    drawn += [svg.draw_line(frame, columns, Look("thin", f"partition {i + 1}", _hue(i, count)), i) for i in range(count)]
    return "".join(drawn)


def _heat(frame: Frame, fractions: Doubles, matrix: Doubles, limit: float) -> str:
    """Draw an image with a row per partition: the colour shows above or below the mean, the opacity how far."""
    cells = _pooled(matrix)
    columns = thin(fractions, cells, cells, cells, COLUMNS)
    if not len(columns.fractions):
        return ""
    apart = columns.mean.T[::-1] - 1
    pixels = np.empty((*apart.shape, 4), dtype=np.uint8)
    pixels[..., :3] = np.where(apart[..., None] > 0, np.array(ABOVE), np.array(BELOW))
    pixels[..., 3] = np.clip(np.abs(apart) / limit, 0, 1) * 235 + 10
    left, right = frame.across(columns.fractions[[0, -1]])
    half = (right - left) / max(1, len(columns.fractions) - 1) / 2 or 3.0
    top = float(frame.up(np.array([float(matrix.shape[1])]))[0])
    return (
        f'<image x="{left - half:.1f}" y="{top:.1f}" width="{right - left + 2 * half:.1f}" '
        f'height="{frame.bottom - top:.1f}" preserveAspectRatio="none" href="data:image/png;base64,{_png(pixels)}"/>'
    )


def _pooled(matrix: Doubles) -> Doubles:
    """Average neighbouring partitions if there are more than CELLS."""
    count = matrix.shape[1]
    firsts = np.linspace(0, count, min(count, CELLS), endpoint=False).astype(np.int64)
    pooled: Doubles = np.add.reduceat(matrix, firsts, axis=1) / np.diff(firsts, append=count)
    return pooled


def _png(pixels: Bytes) -> str:
    """Encode rows of RGBA pixels as a PNG in base64."""
    height, width, _ = pixels.shape
    lines = b"".join(b"\0" + row.tobytes() for row in pixels)
    chunks = (
        (b"IHDR", struct.pack(">2I5B", width, height, 8, 6, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines, 9)),
        (b"IEND", b""),
    )
    body = b"".join(
        struct.pack(">I", len(data)) + tag + data + struct.pack(">I", zlib.crc32(tag + data)) for tag, data in chunks
    )
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + body).decode()


def _hue(i: int, count: int) -> str:
    """Return the colour of a partition, from blue to red."""
    return f"hsl({220 - 215 * i / max(1, count - 1):.0f} 62% 52%)"
