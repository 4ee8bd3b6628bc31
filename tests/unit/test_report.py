"""The report: what it reads, the numbers it shows, and valid pages whatever happened in the run."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fabricated import ELEMENTS, by_hand, evaluation, make_run, steps, whole_run
from page_of_runs import Page

from mpisparse.errors import ConfigurationError
from mpisparse.runtime import report
from mpisparse.runtime.report import read, scale, thin, units

SECTIONS = ("summary", "settings", "loss", "metric", "density", "traffic", "time", "partitions", "events")


def render(*runs: Path, out: Path | None = None) -> Page:
    return Page(report.write(runs, out or runs[0] / "page.html"))


def test_sections_and_pictures(tmp_path: Path) -> None:
    page = render(whole_run(tmp_path / "run", 300))
    assert [name for name in SECTIONS if name not in page.ids] == []
    assert len(page.figures) == 18
    assert page.lines("loss-by-steps") == ["run", "run, evaluation"]
    assert "digits-cnn" in page.text
    assert "checkpoint ×10" in page.text


def test_speculation_has_a_section_where_there_is_any(tmp_path: Path) -> None:
    ahead = {"updated": 9, "fine": 0.5, "whole": ["0.bias"], "corrected": 4, "drift": 0.02, "drift_after": 0.001}
    records = [by_hand(step, speculation={**ahead, "fine": 0.1 * step}) for step in range(1, 6)]
    page = render(make_run(tmp_path / "ahead", records), make_run(tmp_path / "plain", [by_hand(1)]))
    assert "speculation" in page.ids
    for mark in ("granularity", "corrections", "drift"):
        assert page.lines(mark)[-1].startswith("ahead")
    assert page.values("granularity") == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert "speculation" not in render(tmp_path / "plain").ids


def test_evaluations_are_named_by_their_data(tmp_path: Path) -> None:
    """Earlier runs did not record the data: their metric has its plain name."""
    on = [evaluation(step, metric, data="validation") for step, metric in ((1, 0.7), (2, 0.9), (3, 0.8))]
    steps = [by_hand(step) for step in (1, 2, 3)]
    records = [record for pair in zip(steps, on, strict=True) for record in pair]
    page = render(make_run(tmp_path / "run", [*records, evaluation(3, 0.6, data="test", loss=0.875)]))
    assert page.shown("Final validation accuracy") == ["0.8 at step 3"]
    assert page.shown("Best validation accuracy") == ["0.9 at step 2"]
    assert page.shown("Final test accuracy") == ["0.6 at step 3, loss 0.875"]
    assert page.shown("Final evaluation loss") == ["0.75 validation data"]
    assert "dashed: evaluation on validation data" in page.text
    old = make_run(tmp_path / "old", [by_hand(1), evaluation(1, 0.5)])
    both = render(tmp_path / "run", old)
    assert both.table()["Final test accuracy"] == [0.6, "–"]


def test_headline_is_what_a_hand_computes(tmp_path: Path) -> None:
    records = [
        by_hand(1, density=0.009),
        by_hand(2, bytes_received={"min": 1, "mean": 3000, "max": 9000}, imbalance=0.3),
        evaluation(2, 0.9),
        by_hand(3, loss={"min": 0, "mean": 0.25, "max": 1}, skipped=True, density=0.0, imbalance=0.0),
        evaluation(3, 0.8, loss=0.5),
    ]
    page = render(make_run(tmp_path / "run", records))
    table = {label: cells[0] for label, cells in page.table().items()}
    assert table == {
        "Final accuracy": 0.8,
        "Best accuracy": 0.9,
        "Final loss": 0.25,
        "Final evaluation loss": 0.5,
        "Steps": 3,
        "Training time": 1.5,
        "Bytes received per rank": 5000,
        "Bytes of a dense exchange": 120_000,
        "Reduction against dense": 24,
        "Mean density": pytest.approx(0.010),  # the skipped step has none
        "Mean imbalance": pytest.approx(0.2),
        "Steps skipped": 1,
    }
    assert page.shown("Best accuracy") == ["0.9 at step 2"]
    assert page.shown("Bytes of a dense exchange") == ["120 kB"]
    assert page.shown("Reduction against dense") == ["24×"]
    assert page.shown("Mean imbalance") == ["20 %"]


def test_lines_that_stand_for_many_steps(tmp_path: Path) -> None:
    """A line's bytes count for all its steps, and so does its density in the mean."""
    records = [by_hand(10, every=10), by_hand(20, every=10), by_hand(21, density=0.0215)]
    table = render(make_run(tmp_path / "run", records)).table()
    assert table["Bytes received per rank"] == [21_000]
    assert table["Bytes of a dense exchange"] == [840_000]
    assert table["Mean density"] == [pytest.approx((20 * 0.011 + 0.0215) / 21)]


def test_best_of_a_metric_that_should_be_low(tmp_path: Path) -> None:
    low = {"metric_name": "perplexity", "higher_is_better": False}
    records = [by_hand(1), *(evaluation(i, m, **low) for i, m in enumerate((90.0, math.nan, 30.0, 50.0), 1))]
    page = render(make_run(tmp_path / "run", records))
    assert page.table()["Best perplexity"] == [30]
    assert page.table()["Final perplexity"] == [50]
    assert "lower is better" in page.text


def test_overlays_have_a_line_for_each_run(tmp_path: Path) -> None:
    names = ["first", "second", "third"]
    runs = [whole_run(tmp_path / name, 60 + 10 * i, seed=i, density=0.1**i) for i, name in enumerate(names, 1)]
    page = render(*runs, out=tmp_path / "page.html")
    overlaid = ["by-steps", "by-time", "by-bytes-received"]
    for mark in (*(f"{what}-{by}" for what in ("loss", "accuracy") for by in overlaid), "deviation-of-density", "threshold",
                 "bytes-per-step", "imbalance", "time-per-step", "learning-rate"):  # fmt: skip
        assert [name for name in page.lines(mark) if "," not in name] == names, mark
    assert page.lines("density") == [*(f"{name}, set" for name in names), *names]
    for mark in page.charts:
        for line in page.charts[mark]["lines"]:
            assert line["name"] == names[line["run"]] or line["colour"]
    assert page.table()["Steps"] == [70, 80, 90]
    assert len(page.figures) == 15 + 3 * 3


def last_values(run: Path) -> dict[str, Any]:
    """Return what the reader takes from a run."""
    (found,) = read.read_runs([run])
    rows = found.evals.get("accuracy")
    return {
        "steps": found.steps["step"].tolist(),
        "losses": found.steps["loss.mean"].tolist(),
        "metrics": rows["metric"].tolist() if rows else [],
        "borders": len(found.borders),
        "bytes": found.received().tolist()[-1],
    }


def test_the_later_of_a_step_wins(tmp_path: Path) -> None:
    """Killed after step 5, resumed after step 2, killed again after step 4: step 5 is not repeated."""
    lost = {"min": 7.0, "mean": 7.0, "max": 7.0}
    first = [
        by_hand(1),
        by_hand(2),
        evaluation(2, 0.2),
        by_hand(3, loss=lost),
        by_hand(4, loss=lost),
        evaluation(4, 0.1),
        by_hand(5, loss=lost),
    ]
    resume = {"kind": "event", "step": 2, "time": 1.0, "event": "resume", "text": "on 2 ranks"}
    run = make_run(tmp_path / "run", [*first, resume, by_hand(3), by_hand(4), evaluation(4, 0.4)])
    assert last_values(run) == {
        "steps": [1, 2, 3, 4],
        "losses": [1.0] * 4,
        "metrics": [0.2, 0.4],
        "borders": 4,
        "bytes": 4000,
    }
    page = render(run)
    assert page.table()["Final accuracy"] == [0.4]
    assert "on 2 ranks" in page.text


def test_evaluations_of_a_lost_life_are_forgotten(tmp_path: Path) -> None:
    records = [by_hand(1), evaluation(1, 0.1), by_hand(2), by_hand(3), evaluation(3, 0.9), by_hand(2)]
    assert last_values(make_run(tmp_path / "run", records))["metrics"] == [0.1]


@pytest.mark.parametrize("cut", [1, 15, -2])
@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_a_half_written_last_line_is_ignored(tmp_path: Path, cut: int, end: str) -> None:
    run = make_run(tmp_path / "run", [by_hand(1), by_hand(2)])
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps(by_hand(3))[:cut] + end)
    assert last_values(run)["steps"] == [1, 2]


def test_a_whole_last_line_without_an_end_counts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [by_hand(1)])
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps(by_hand(2)))
    assert last_values(run)["steps"] == [1, 2]


@pytest.mark.parametrize(
    "damage",
    ['{"kind": "step", "st', "[1, 2]", '{"step": 3}', '{"kind": "step"}', '{"kind": "step", "step": null}', "\udcff\udcfe",
     json.dumps(by_hand(2, borders="abc")), json.dumps(by_hand(2, density="much")), json.dumps(by_hand(2, seconds=[1]))],
)  # fmt: skip
def test_a_damaged_line_is_named(tmp_path: Path, damage: str) -> None:
    run = make_run(tmp_path / "run", [by_hand(1)])
    text = json.dumps(by_hand(1)) + "\n\n" + damage + "\n" + json.dumps(by_hand(4)) + "\n"
    (run / "metrics.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigurationError, match=r"expected .* in line 3 of .*metrics\.jsonl, got .*; remove that line"):
        report.write([run], None)
    assert not (run / "report.html").exists()


def test_unknown_kinds_and_fields_pass(tmp_path: Path) -> None:
    records = [by_hand(1, novel={"a": [1]}), {"kind": "weather", "sky": "blue"}, by_hand(2, seconds={"dream": 0.5})]
    page = render(make_run(tmp_path / "run", records, novel_setting=[1, 2]))
    assert "dream" in page.text
    assert "novel_setting" in page.text


def test_runs_without_a_step_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"expected a run directory, got .*nowhere, which is nothing that exists; name"
    ):
        report.write([tmp_path / "nowhere"], None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=r"expected .*metrics\.jsonl, .* got no such file; name"):
        report.write([tmp_path / "empty"], None)
    for name, records in (("none", []), ("only-start", [{"kind": "event", "step": 0, "time": 0, "event": "start"}])):
        with pytest.raises(ConfigurationError, match=r"expected at least one step in .*, got none; wait"):
            report.write([make_run(tmp_path / name, records)], None)
    with pytest.raises(ConfigurationError, match="expected at least one run directory, got none"):
        report.write([], None)
    broken = make_run(tmp_path / "broken", [by_hand(1)])
    (broken / "config.toml").write_text("model = = 3")
    with pytest.raises(ConfigurationError, match=r"expected TOML in .*config\.toml"):
        report.write([broken], None)


def test_without_settings(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [by_hand(1)])
    (run / "config.toml").unlink()
    assert "settings" not in render(run).ids


def test_losses_that_are_not_finite(tmp_path: Path) -> None:
    """The line is interrupted where values are not finite, and there are crosses."""
    records = steps(90)
    for i, bad in ((30, math.nan), (31, math.inf), (32, -math.inf), (33, 1e300), (89, math.nan)):
        records[i]["loss"] = {"min": bad, "mean": bad, "max": bad}
    page = render(make_run(tmp_path / "run", records))
    assert page.table()["Final loss"] == ["NaN"]
    values = page.values("loss-by-steps")
    bad = [30, 31, 32, 33, 89]
    assert [i for i, value in enumerate(values) if value is None] == bad == page.values("loss-by-steps", what=".bad")
    assert max(page.values("loss-by-steps", what=".high"), key=lambda v: v or 0.0) < 10
    assert "5 not finite" in "".join(page.figures["loss-by-steps"].itertext())


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_nothing_finite_at_all(tmp_path: Path, bad: float | None) -> None:
    fields = ("lr", "density", "set_density", "threshold", "imbalance", "bytes_dense")
    spreads = {name: {"min": bad, "mean": bad, "max": bad} for name in ("loss", "bytes_received")}
    records = [by_hand(i, **dict.fromkeys(fields, bad), **spreads, seconds={"reduce": {"mean": bad}}) for i in (1, 2, 3)]
    page = render(make_run(tmp_path / "run", [*records, evaluation(3, math.nan, loss=bad)]))
    assert not [mark for mark in page.charts if mark.startswith("loss")]
    assert page.shown("Final loss") == ["NaN"] or bad == math.inf
    assert {"summary", "settings", "partitions"} <= set(page.ids)
    assert not {"loss", "metric", "density", "traffic", "time"} & set(page.ids)


def test_names_are_escaped(tmp_path: Path) -> None:
    name = """<script>alert("1")</script> & 'x'""".replace("/", "∕")
    settings = {"model": "<i>&", "<b>": "\\"}
    run = make_run(
        tmp_path / name, [by_hand(1), {"kind": "event", "step": 1, "time": 1, "event": "<u>", "text": "</table>&"}]
    )
    (run / "config.toml").write_text("".join(f"{json.dumps(k)} = {json.dumps(v)}\n" for k, v in settings.items()))
    page = render(run, make_run(tmp_path / "b", [by_hand(1)]), out=tmp_path / "page.html")
    assert name in page.text
    assert name in page.lines("loss-by-steps")
    assert page.html.count("<script>") == 1
    assert page.html.count("</script>") == 2
    assert "</table>&" in page.text


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    a, b = (make_run(tmp_path / parent / "run", [by_hand(1)]) for parent in ("a", "b"))
    assert [run.name for run in read.read_runs([a, b])] == ["a/run", "b/run"]
    assert [run.name for run in read.read_runs([a, a])] == ["run (1)", "run (2)"]


def test_where_the_page_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make_run(tmp_path / name, [by_hand(1)]) for name in "ab"]
    monkeypatch.chdir(tmp_path)
    assert report.write(runs[:1], None) == runs[0] / "report.html"
    assert report.write(runs, None) == Path("report.html")
    assert report.write(runs, tmp_path / "x.html") == tmp_path / "x.html"
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "report.html", "x.html"}
    before = (tmp_path / "x.html").read_bytes()
    with pytest.raises(ConfigurationError, match=r"expected a file that can be written, got .*; choose another with --out"):
        report.write(runs, tmp_path / "missing" / "x.html")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ConfigurationError, match="No space left"):
        report.write(runs, tmp_path / "x.html")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "report.html", "x.html"}
    assert (tmp_path / "x.html").read_bytes() == before


def test_what_cannot_be_written_or_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "a", [by_hand(1)])
    for out in (Path(), Path("/"), tmp_path / ("x" * 300), tmp_path, run / "metrics.jsonl" / "x.html"):
        with pytest.raises(ConfigurationError, match="expected a file that can be written, got"):
            report.write([run], out)
    records = tmp_path / "bench.jsonl"
    records.write_text(json.dumps({"bench": "sync"}) + "\n")
    with pytest.raises(ConfigurationError, match=r"cannot read or write .*: Not a directory"):
        report.write([records], None, records / "pictures")
    (run / "config.toml").write_text("a = " + "[" * 20_000)
    with pytest.raises(ConfigurationError, match=r"expected TOML in .*config\.toml"):
        report.write([run])
    (run / "config.toml").unlink()
    for deep in (run / "metrics.jsonl", records):
        deep.write_text("[" * 200_000 + "\n" + "{}\n")
        with pytest.raises(ConfigurationError, match=r"in line 1 of .*\.jsonl"):
            report.write([run if deep.parent == run else deep])


def test_a_read_only_file_system_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    run = make_run(tmp_path / "a", [by_hand(1)])
    for name in ("write_text", "unlink"):
        monkeypatch.setattr(Path, name, refuse)
    with pytest.raises(ConfigurationError, match=r"got .*report\.html \(Read-only file system\); choose another with --out"):
        report.write([run])


@pytest.mark.parametrize(("ranks", "lines"), [(1, 1), (2, 2), (16, 16), (17, 0), (300, 0)])
def test_partitions_of_few_and_many_ranks(tmp_path: Path, ranks: int, lines: int) -> None:
    """Above 16 ranks workloads are a heat map, and above 32 neighbouring partitions share an area."""
    page = render(whole_run(tmp_path / "run", 20, ranks=ranks))
    workloads, borders = page.charts["workload-of-each-partition-0"], page.charts["partition-borders-0"]
    assert (workloads["shape"], len(workloads["lines"])) == (("lines", lines) if lines else ("heat", 1))
    if not lines:
        (stretch,) = workloads["heat"]["stretches"]
        assert (stretch["count"], workloads["heat"]["most"]) == (ranks, ranks)
        assert {len(column) for column in stretch["cells"]} == {min(ranks, 128)}
    assert len(borders["lines"]) == 1 + (ranks if ranks <= 32 else math.ceil(ranks / math.ceil(ranks / 32)))


def test_rank_count_may_change(tmp_path: Path) -> None:
    records = [*steps(10, ranks=4), *steps(30, ranks=2)[10:]]
    page = render(make_run(tmp_path / "run", records))
    assert page.lines("partition-borders-0") == [f"border {i}" for i in range(5)]
    edges = [page.values("partition-borders-0", i) for i in range(5)]
    assert [sum(value is not None for value in edge) for edge in edges] == [30, 30, 30, 10, 10]
    assert edges[4][:10] == [ELEMENTS] * 10
    assert edges[2][10:] == [ELEMENTS] * 20


def test_one_step(tmp_path: Path) -> None:
    page = render(make_run(tmp_path / "zero", [by_hand(0, time=0.0)]), make_run(tmp_path / "one", [by_hand(1)]))
    assert page.lines("loss-by-steps") == ["zero", "one"]
    alone = render(tmp_path / "zero")
    assert alone.lines("loss-by-steps") == ["zero"]
    assert alone.data["axes"]["steps"]["range"] == [0, 1]
    later = render(make_run(tmp_path / "later", [by_hand(1), evaluation(1, 0.5, time=0.75)]))
    assert later.data["axes"]["time"]["range"] == [0, 0.75], "axes reach to evaluations, too"


def test_a_hundred_thousand_steps(tmp_path: Path) -> None:
    """The page stays small, and thinning loses no extreme."""
    template = json.dumps(by_hand(1))
    rng = np.random.default_rng(5)
    losses = rng.uniform(1.0, 2.0, 100_000).round(6)
    losses[77_777], losses[33_333] = 9.0, 0.5
    run = make_run(tmp_path / "run", [])
    head, tail = template.split('"step": 1,')
    tail = tail.split('"loss": ')[1].split("}", 1)[1]
    with (run / "metrics.jsonl").open("w") as lines:
        for i, loss in enumerate(losses.tolist()):
            spread = f'{{"min": {loss}, "mean": {loss}, "max": {loss}}}'
            lines.write(f'{head}"step": {i}, "time": {i * 0.01:.2f}, "loss": {spread}{tail}\n')
        lines.writelines(
            json.dumps({"kind": "event", "step": i, "time": i * 0.01, "event": event, "text": "x"}) + "\n"
            for i in range(0, 100_000, 50)
            for event in ("checkpoint", "density")
        )
    path = report.write([run], None)
    assert path.stat().st_size < 1_000_000
    page = Page(path)
    assert 500 < len(page.values("loss-by-steps")) <= 1000
    assert min(page.values("loss-by-steps", what=".low")) == 0.5
    assert max(page.values("loss-by-steps", what=".high")) == 9.0
    assert np.mean(page.values("loss-by-steps")) == pytest.approx(losses.mean(), rel=1e-3)
    assert page.charts["loss-by-steps"]["lines"][0]["y"] == page.charts["loss-by-time"]["lines"][0]["y"]
    assert page.data["axes"]["steps"]["range"] == [0, 99_999]
    assert 0 < len(page.data["runs"][0]["events"]["loud"]["steps"]) <= 400


def test_thinning_keeps_mean_and_extremes() -> None:
    values = np.arange(1000.0)
    values[500] = math.nan
    values[700:800] = math.inf
    columns = thin.Columns.along(np.linspace(0, 1, 1000), 10)
    mean = columns.mean(values)
    assert len(mean) == 10
    assert mean[[0, 9]].tolist() == pytest.approx([49.5, 949.5])
    assert columns.low(values)[:7].tolist() == [0, 100, 200, 300, 400, 501, 600]
    assert columns.high(values)[[5, 9]].tolist() == [599, 999]
    assert np.flatnonzero(columns.bad(values)).tolist() == [5, 7]
    assert np.flatnonzero(np.isnan([mean, columns.low(values), columns.high(values)]).any(axis=0)).tolist() == [7]
    assert columns.last(values)[0] == 99
    few = thin.Columns.along(np.arange(3.0), 10)
    assert few.mean(np.array([1.0, math.nan, 3.0])).tolist() == pytest.approx([1, math.nan, 3], nan_ok=True)
    none = thin.Columns.along(np.empty(0), 10)
    assert (len(none.last(np.empty(0))), len(none.mean(np.empty(0)))) == (0, 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (units.number(0.9722333), "0.9722"), (units.number(1234567.0), "1,234,567"), (units.number(3.2e-7), "3.2×10⁻⁷"),
        (units.number(-12.5), "−12.5"), (units.number(100.0), "100"), (units.number(0.0), "0"),
        (units.number(math.inf), "∞"),
        (units.number(math.nan), "NaN"), (units.number(12345.6), "12,346"), (units.number(1e20), "10²⁰"),
        (units.nbytes(2_293_780), "2.29 MB"), (units.nbytes(812), "812 B"), (units.nbytes(0), "0 B"),
        (units.nbytes(3.78e9), "3.78 GB"), (units.nbytes(999_999), "1 MB"), (units.seconds(0.0082), "8.2 ms"),
        (units.seconds(34.5), "34.5 s"), (units.seconds(725), "12 min 5 s"), (units.seconds(120), "2 min"),
        (units.seconds(11_520), "3 h 12 min"), (units.seconds(2e-5), "20 µs"), (units.seconds(0), "0 s"),
        (units.percent(0.0105, signed=True), "+1.05 %"), (units.percent(-0.2), "−20 %"),
    ],
)  # fmt: skip
def test_numbers_for_people(text: str, said: str) -> None:
    assert text == said


@pytest.mark.parametrize(
    ("axis", "labels"),
    [
        (scale.Axis(0, 1.02), ["0", "0.25", "0.50", "0.75", "1.00"]),
        (scale.Axis(0, 3, kind="count"), ["0", "1", "2", "3"]),
        (scale.Axis(0, 1, kind="count"), ["0", "1"]),
        (scale.Axis(0, 50_000, kind="count"), ["0", "10k", "20k", "30k", "40k", "50k"]),
        (scale.Axis(0, 1500, kind="seconds"), ["0", "5 min", "10 min", "15 min", "20 min", "25 min"]),
        (scale.Axis(0, 2e6, kind="bytes"), ["0", "0.5 MB", "1.0 MB", "1.5 MB", "2.0 MB"]),
        (scale.Axis(-0.05, 0.05, kind="percent"), ["−4 %", "−2 %", "0", "2 %", "4 %"]),
        (scale.Axis(5e3, 2e7, log=True, kind="bytes"), ["10 kB", "100 kB", "1 MB", "10 MB"]),
        (scale.Axis(1e-7, 1.0, log=True), ["10⁻⁶", "10⁻⁴", "0.01", "1"]),
        (scale.Axis(0.003, 0.03, log=True), ["0.003", "0.01", "0.03"]),
    ],
)  # fmt: skip
def test_ticks(axis: scale.Axis, labels: list[str]) -> None:
    ticks = axis.ticks()
    assert [label for _, label in ticks] == labels
    fractions = axis.fraction(np.array([value for value, _ in ticks]))
    assert (fractions >= -0.01).all()
    assert (fractions <= 1.01).all()
