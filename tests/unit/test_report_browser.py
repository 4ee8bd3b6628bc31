"""The report in a real browser: a headless Chromium, installed if it can be. Slow, so in bin/test --all."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromium
import debian
import pytest
from chromium import Tab
from fabricated import by_hand, evaluation, events, make_run, steps, whole_run
from page_of_runs import serving

from mpisparse.runtime import report

pytestmark = pytest.mark.slow
RATES = (("late", 0.3), ("first", 0.1), ("second", 0.2))
TITLE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """Return a tab of Chromium; all tests of this file use the same one."""
    if chromium.find() is None and (reason := debian.install("chromium")):
        pytest.skip(f"no Chromium: {reason}")
    with chromium.open_tab(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def show(tab: Tab, runs: list[Path], *, width: int = 1200, dark: bool = False) -> None:
    """Open the page of some runs."""
    out = runs[0] / "page.html"
    tab.look(width, dark=dark)
    tab.go(report.write(runs, out).as_uri())
    tab.wait("page.plots.size > 0")


def settle(tab: Tab) -> None:
    """Wait until everything that was asked for is drawn."""
    tab.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def plot_box(tab: Tab, mark: str) -> tuple[float, float, float, float]:
    """Scroll to a chart and return where it is: left, top, width, height of its frame."""
    box = tab.run(
        f"(() => {{ const o = page.plots.get('{mark}').u.over; o.scrollIntoView({{block: 'center'}});"
        "const b = o.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
    )
    settle(tab)
    left, top, width, height = box
    return left, top, width, height


def drag(tab: Tab, mark: str, begin: float, end: float) -> None:
    """Drag the mouse over a share of a chart's width."""
    left, top, width, height = plot_box(tab, mark)
    middle = top + height / 2
    tab.mouse("Moved", left + begin * width, middle)
    tab.mouse("Pressed", left + begin * width, middle, button="left", clickCount=1)
    tab.mouse("Moved", left + (begin + end) / 2 * width, middle, button="left")
    tab.mouse("Moved", left + end * width, middle, button="left")
    tab.mouse("Released", left + end * width, middle, button="left", clickCount=1)
    settle(tab)


def downloaded(tab: Tab, button: str) -> list[list[str]]:
    """Press a button that downloads CSV and return its rows."""
    tab.run("window.saved = null; download = (name, text) => { window.saved = text; }")
    tab.run(f"{button}.click()")
    return list(csv.reader(io.StringIO(tab.wait("window.saved"))))


def press(tab: Tab, mark: str, label: str) -> str:
    """Return the expression of a figure's button."""
    return f"[...document.querySelectorAll('[data-chart=\"{mark}\"] button')].find((b) => b.textContent === '{label}')"


def scale(tab: Tab, mark: str, axis: str = "x") -> list[float]:
    found: list[float] = tab.run(f"(({{min, max}}) => [min, max])(page.plots.get('{mark}').u.scales.{axis})")
    return found


def seeds(directory: Path) -> list[Path]:
    """Write two seeds of one run, and another scheme."""
    same = [whole_run(directory / f"ex-seed{i}", 60, seed=i) for i in (1, 2)]
    return [*same, whole_run(directory / "dense", 60, seed=1, density=1.0, scheme="dense")]


def test_zoom_toggles_and_csv(tab: Tab, tmp_path: Path) -> None:
    show(tab, seeds(tmp_path))
    assert scale(tab, "loss-by-steps") == [0, 60]
    drag(tab, "loss-by-steps", 0.25, 0.75)
    low, high = scale(tab, "loss-by-steps")
    assert (low, high) == (pytest.approx(15, abs=1), pytest.approx(45, abs=1))
    assert scale(tab, "imbalance") == [low, high], "charts along the same axis zoom together"
    assert scale(tab, "loss-by-time") == [0, tab.run("page.data.axes.time.range[1]")]

    rows = downloaded(tab, press(tab, "loss-by-steps", "CSV"))
    assert rows[0][:2] == ["steps", "ex, 2 seeds"]
    assert [int(row[0]) for row in rows[1:]] == list(range(math.ceil(low), math.floor(high) + 1))
    texts = [(tmp_path / f"ex-seed{i}" / "metrics.jsonl").read_text() for i in (1, 2)]
    records = [json.loads(line) for text in texts for line in text.splitlines()]
    at_20 = [r["loss"]["mean"] for r in records if r["kind"] == "step" and r["step"] == 20]
    row = next(dict(zip(rows[0], row, strict=True)) for row in rows[1:] if row[0] == "20")
    assert float(row["ex, 2 seeds"]) == pytest.approx(sum(at_20) / 2, rel=1e-4)
    assert float(row["ex, 2 seeds, least"]) == pytest.approx(min(at_20), rel=1e-4)
    assert float(row["ex, 2 seeds, greatest"]) == pytest.approx(max(at_20), rel=1e-4)

    assert tab.run("document.getElementById('whole').disabled") is False
    tab.run("document.getElementById('whole').click()")
    settle(tab)
    assert scale(tab, "loss-by-steps") == [0, 60]
    drag(tab, "loss-by-time", 0.5, 0.9)
    left, top, width, height = plot_box(tab, "loss-by-time")
    for kind in ("Pressed", "Released") * 2:
        tab.mouse(kind, left + width / 2, top + height / 2, button="left", clickCount=2)
    settle(tab)
    assert scale(tab, "loss-by-time")[0] == 0

    assert tab.run("page.plots.get('bytes-per-step').u.scales.y.distr") == 3
    assert tab.run("page.plots.get('accuracy-by-steps').u.scales.y.distr") == 1
    log = press(tab, "accuracy-by-steps", "log")
    tab.run(f"{log}.click()")
    assert tab.run("page.plots.get('accuracy-by-steps').u.scales.y.distr") == 3
    assert tab.run(f"{log}.ariaPressed") == "true"
    tab.run(f"{log}.click()")
    assert tab.run("page.plots.get('accuracy-by-steps').u.scales.y.distr") == 1
    assert tab.complaints == []


def test_smoothing_seeds_and_hiding(tab: Tab, tmp_path: Path) -> None:
    show(tab, seeds(tmp_path))
    names = "page.plots.get('loss-by-steps').lines.filter((l) => l.style === 'run').map((l) => l.name)"
    assert tab.run(names) == ["ex, 2 seeds", "dense"]
    rough = tab.run("page.plots.get('loss-by-steps').lines[0].y")
    tab.run(
        "(() => { const s = document.getElementById('smoothing'); s.value = 0.9; s.dispatchEvent(new Event('input')); })()"
    )
    smooth = tab.run("page.plots.get('loss-by-steps').lines[0].y")
    assert tab.run("page.plots.get('loss-by-steps').lines[0].raw") == rough
    total = weight = 0.0
    for value, shown in zip(rough, smooth, strict=True):
        total, weight = 0.9 * total + 0.1 * value, 0.9 * weight + 0.1
        assert shown == pytest.approx(total / weight)
    header = downloaded(tab, press(tab, "loss-by-steps", "CSV"))[0]
    assert "ex, 2 seeds, not smoothed" in header

    tab.run("document.getElementById('grouped').click()")
    assert tab.run(names) == ["ex-seed1", "ex-seed2", "dense"]
    assert len(set(tab.run("page.plots.get('loss-by-steps').lines.slice(0, 3).map((l) => l.run)"))) == 3
    tab.run(
        "[...document.querySelectorAll('#legend label')].find((l) => l.title === 'ex-seed2').querySelector('input').click()"
    )
    assert tab.run(names) == ["ex-seed1", "dense"]
    assert tab.run("getComputedStyle(document.querySelector('#summary td.r1')).display") == "none"
    whole = downloaded(tab, "[...document.querySelectorAll('#controls button')].find((b) => b.textContent === 'CSV of all')")
    assert whole[0] == ["chart", "run", "axis", "place", "value"]
    assert {row[1] for row in whole if row[0] == "Time per step"} == {"ex-seed1", "ex-seed1, not smoothed", "dense", "dense, not smoothed"}  # fmt: skip  # noqa: E501
    assert not [row for row in whole if row[0].endswith(": ex-seed2")]
    assert [row for row in whole if row[0] == "Mean time of each phase" and row[3] == "reduce"]
    assert tab.complaints == []


def test_cursors_of_all_charts_move_together(tab: Tab, tmp_path: Path) -> None:
    show(tab, seeds(tmp_path))
    left, top, width, height = plot_box(tab, "loss-by-steps")
    tab.mouse("Moved", left + 0.5 * width, top + 0.4 * height)
    settle(tab)
    step = tab.run("page.plots.get('loss-by-steps').u.posToVal(page.plots.get('loss-by-steps').u.cursor.left, 'x')")
    assert step == pytest.approx(30, abs=1)
    places = "[...page.plots.values()].filter((p) => p.chart.along === '{}').map((p) => p.u.posToVal(p.u.cursor.left, 'x'))"
    assert tab.run(places.format("steps")) == pytest.approx([step] * len(tab.run(places.format("steps"))), abs=0.5)
    assert tab.run(places.format("time")) == pytest.approx([step * 0.026] * 2, abs=0.03)
    said = tab.run("page.plots.get('loss-by-steps').tip.textContent")
    assert said.startswith("steps: 30")
    assert "ex, 2 seeds" in said
    assert tab.run("[...page.plots.values()].filter((p) => !p.tip.hidden).length") > 10
    tab.mouse("Moved", 2, 2)
    tab.wait("[...page.plots.values()].every((p) => p.tip.hidden)")
    assert tab.complaints == []


def strange_runs(directory: Path) -> dict[str, list[Path]]:
    """Write runs of all kinds: one step, nothing finite, many ranks, names and texts that look like scripts."""
    lost = {"min": math.nan, "mean": math.nan, "max": math.nan}
    bad = [by_hand(i, loss=lost) if i % 3 else by_hand(i) for i in range(1, 12)]
    ahead = {"updated": 9, "fine": 0.5, "whole": [], "corrected": 4, "drift": 0.02, "drift_after": 0.001}
    script = "</script><script>window.struck = 1</script>"
    record = {"kind": "event", "step": 1, "time": 0.5, "event": TITLE, "text": script}
    named = evaluation(1, 0.5, metric_name=script), evaluation(2, 0.6, metric_name=script)
    told = [by_hand(1, seconds={script: 0.5}, details={TITLE: 1.0}), by_hand(2), record, *named]
    resized = [*steps(10, ranks=40), *steps(30, ranks=2)[10:]]
    return {
        "one": [make_run(directory / "one", [by_hand(0, time=0.0)])],
        "bad": [make_run(directory / "bad", bad), make_run(directory / "nan", [by_hand(1, loss=lost)])],
        "many": [whole_run(directory / f"r{i}", 5 + i, seed=i, density=0.1 + i / 100) for i in range(11)],
        "ranks": [make_run(directory / "ranks", [*resized, *events(resized)])],
        "ahead": [make_run(directory / "ahead", [by_hand(i, speculation=ahead) for i in (1, 2)])],
        "<b>'\"&": [make_run(directory / "<b>'\"&", told, model=script), make_run(directory / "=1+1", [by_hand(1)])],
    }


@pytest.mark.parametrize("width", [500, 1800])
def test_no_errors_whatever_the_run(tab: Tab, tmp_path: Path, width: int) -> None:
    """No complaint in the console, no script from a run's files, nothing wider than the window, in light and dark."""
    for name, runs in strange_runs(tmp_path).items():
        for dark in (False, True):
            show(tab, runs, width=width, dark=dark)
            settle(tab)
            assert tab.run("document.documentElement.scrollWidth") <= width, name
            assert tab.run("window.struck") is None
            assert tab.run("document.querySelectorAll('main img').length") == 0
            plots: list[dict[str, Any]] = tab.run(
                "[...page.plots.values()].map((p) => ({mark: p.mark, drawn: p.u.status === 1 && p.u.bbox.width > 0,"
                "labels: p.u.axes.every((a) => a._values.every((v) => typeof v === 'string'))}))"
            )
            assert [plot["mark"] for plot in plots if not (plot["drawn"] and plot["labels"])] == []
            rows = downloaded(tab, "[...document.querySelectorAll('#controls button')].at(-1)")
            assert len(rows) > 1
            assert not [cell for row in rows for cell in row if cell.startswith("=")]
        drag(tab, next(plot["mark"] for plot in plots), 0.2, 0.8)
        tab.run("document.querySelectorAll('.buttons button').forEach((b) => b.textContent !== 'CSV' && b.click())")
        settle(tab)
    assert tab.complaints == []


def ink(tab: Tab, mark: str) -> list[int]:
    """Count the pixels drawn at the left, right and bottom edges of a chart's canvas: a label that is cut off has some."""
    found: list[int] = tab.run(
        f"(() => {{ const c = page.plots.get('{mark}').u.ctx; const [w, h] = [c.canvas.width, c.canvas.height];"
        "const image = c.getImageData(0, 0, w, h).data; const count = (inside) =>"
        "image.filter((value, i) => i % 4 === 3 && value > 0 && inside((i >> 2) % w, Math.floor((i >> 2) / w))).length;"
        "return [count((x) => x === 0), count((x) => x === w - 1), count((x, y) => y === h - 1)]; })()"
    )
    return found


@pytest.mark.parametrize("width", [1200, 1800])
def test_tables_of_two_runs_are_whole(tab: Tab, tmp_path: Path, width: int) -> None:
    """Nothing must be scrolled to, though some notes are long."""
    much = {"min": 9e6, "mean": 9e6, "max": 9e6}
    more = make_run(tmp_path / "more", [by_hand(i, bytes_received=much) for i in (1, 2)])
    show(tab, [whole_run(tmp_path / "few", 5), more], width=width)
    settle(tab)
    assert "too small" in tab.run("document.querySelector('.tables').innerText")
    hidden = tab.run("[...document.querySelectorAll('.tables .wide')].map((w) => w.scrollWidth - w.clientWidth)")
    assert hidden
    assert not any(hidden)


def test_labels_are_whole(tab: Tab, tmp_path: Path) -> None:
    """Axes make room for their longest label, also for numbers that are long in every unit."""
    near = {"set_density": 0.01, "details": {"large": 2e9, "small": -3e-9}}
    records = [
        by_hand(
            i, loss=1e-7 * (1 + i / 1e4), lr=123456.7 + i / 1e3, imbalance=1e5 + i, density=0.01 + 1e-6 * (i % 7), **near
        )
        for i in range(1, 30)
    ]
    show(tab, [make_run(tmp_path / "run", records)])
    tab.run("page.zoomed('bytes', [0, 25000]); page.zoomed('time', [0, 10])")  # a label at the very end of the axis
    settle(tab)
    for mark in tab.run("[...page.plots.keys()]"):
        assert ink(tab, mark) == [0, 0, 0], mark
        for labels in tab.run(f"page.plots.get('{mark}').u.axes.map((axis) => axis._values)"):
            assert len(labels) == len(set(labels)) > 0, f"{mark}: {labels}"
    assert tab.complaints == []


def test_a_run_that_begins_later_is_listed(tab: Tab, tmp_path: Path) -> None:
    """It comes before others; what was hidden stays hidden."""
    late, *others = (make_run(tmp_path / name, [by_hand(1)] if name != "late" else [], lr=lr) for name, lr in RATES)
    with serving(late, *others) as server:
        tab.look(1200)
        tab.go(server.address)
        listed = "[...document.querySelectorAll('#legend label')].map((l) => [l.title, l.querySelector('input').checked])"
        tab.wait("document.querySelectorAll('#legend label').length === 2")
        tab.run("document.querySelector('#legend label[title=second] input').click()")
        assert tab.run(listed) == [["first", True], ["second", False]]
        (late / "metrics.jsonl").write_text(json.dumps(by_hand(1)) + "\n")
        tab.wait("document.querySelectorAll('#legend label').length === 3")
        assert tab.run(listed) == [["late", True], ["first", True], ["second", False]]
        assert tab.run("page.plots.get('loss-by-steps').lines.map((l) => l.name)") == ["late", "first"]
        assert "Waiting" not in tab.run("document.querySelector('main').textContent")
        tab.go("about:blank#end")
    assert tab.complaints == []


def test_live(tab: Tab, tmp_path: Path) -> None:
    """The page waits for the first step, takes over new steps, keeps what was chosen, and says what is wrong."""
    run = make_run(tmp_path / "run", [])
    lines = run / "metrics.jsonl"

    def append(*records: Any) -> None:
        with lines.open("a") as out:
            out.writelines(json.dumps(record) + "\n" for record in records)

    with serving(run) as server:
        tab.look(1200)
        tab.go(server.address)
        assert "Waiting for the first step of run" in tab.run("document.querySelector('main').textContent")
        append(by_hand(1), by_hand(2))
        tab.wait("page.plots.has('loss-by-steps')")
        assert tab.run("page.plots.get('loss-by-steps').lines[0].x") == [1, 2]
        log = press(tab, "loss-by-steps", "log")
        tab.run(f"{log}.click()")
        tab.run("document.querySelector('#settings details').open = true")
        tab.run("window.kept = page.plots.get('loss-by-steps')")
        append(by_hand(3), evaluation(2, 0.5), by_hand(4), evaluation(4, 0.75))
        tab.wait("page.plots.has('accuracy-by-steps')")
        assert tab.run("page.plots.get('loss-by-steps').lines[0].x") == [1, 2, 3, 4]
        assert tab.run("page.plots.get('loss-by-steps').u.data[0].length") == 4
        assert scale(tab, "loss-by-steps") == [0, 4]
        assert tab.run("window.kept === page.plots.get('loss-by-steps') && window.kept.u.scales.y.distr") == 3
        assert tab.run(f"{log}.ariaPressed") == "true"
        assert tab.run("document.querySelector('#settings details').open") is True
        assert "0.75" in tab.run("document.querySelector('#summary').textContent")
        assert tab.run("document.getElementById('live').textContent").startswith("live")
        tab.run("page.zoomed('steps', [1, 2])")
        append(by_hand(5))
        tab.wait("page.plots.get('loss-by-steps').lines[0].x.length === 5")
        assert scale(tab, "loss-by-steps") == [1, 2], "a zoom stays while steps come"
        assert tab.complaints == []
        append("no record")
        append(by_hand(6))
        tab.wait("document.getElementById('live').textContent.includes('line 8')")
        assert tab.run("page.plots.get('loss-by-steps').lines[0].x.length") == 5
    tab.wait("document.getElementById('live').textContent === 'the server has ended'")
    tab.go("about:blank#end")
    tab.complaints.clear()  # the browser itself reports answers of 503 and a server that is gone
