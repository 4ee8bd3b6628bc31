"""What the report leaves out, groups and colours."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from fabricated import by_hand, evaluation, make_run, whole_run
from page_of_runs import Page

from mpisparse.measures import PHASES
from mpisparse.runtime import report
from mpisparse.runtime.report import groups, read
from mpisparse.runtime.report.assets import SCRIPTS, STYLES, asset

# Machado, Oliveira and Fernandes (2009), in linear RGB: full protanopia, deuteranopia, tritanopia; first: none.
SIGHT = (
    np.eye(3),
    np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
)
LMS = np.array([[0.4122215, 0.5363325, 0.0514460], [0.2119035, 0.6806995, 0.1073970], [0.0883025, 0.2817188, 0.6299787]])
LAB = np.array([[0.2104543, 0.7936178, -0.0040720], [1.9779985, -2.4285922, 0.4505937], [0.0259040, 0.7827718, -0.8086758]])


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def distance(a: str, b: str) -> float:
    """Return the distance in Oklab as the kind of sight that tells two colours apart worst perceives it."""
    seen = [[LAB @ np.cbrt(LMS @ np.clip(eye @ linear(c), 0, 1)) for c in (a, b)] for eye in SIGHT]
    return min(float(np.linalg.norm(one - other)) for one, other in seen)


def contrast(a: str, b: str) -> float:
    low, high = sorted(float(np.array([0.2126, 0.7152, 0.0722]) @ linear(c)) for c in (a, b))
    return (high + 0.05) / (low + 0.05)


def test_colours_are_told_apart_by_all_and_on_both_grounds() -> None:
    light, dark = asset("colours.css").split("@media")
    for theme in (light, dark):
        colours = [re.search(rf"--c{i}: (#\w+)", theme) for i in range(8)]
        ground = re.search(r"--card: (#\w+)", theme)
        assert ground is not None
        values = [found[1] for found in colours if found]
        assert len(values) == 8
        assert min(contrast(colour, ground[1]) for colour in values) >= 3
        assert min(distance(a, b) for a, b in combinations(values, 2)) > 0.1


def test_phases_that_lie_on_each_other_are_told_apart() -> None:
    coloured = [phase.colour for phase in PHASES if phase.colour.startswith("#")]
    assert min(distance(a, b) for a, b in pairwise(coloured)) > 0.05


def test_runs_that_differ_by_seed_are_a_group(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"ex-seed{i}", [by_hand(1)], seed=i, out=f"runs/{i}") for i in range(3)]
    runs.insert(1, make_run(tmp_path / "other", [by_hand(1)], seed=0, lr=0.1))
    runs.append(make_run(tmp_path / "again", [by_hand(1)], seed=0, lr=0.1))
    runs += [make_run(tmp_path / name, [by_hand(1)]) for name in ("plain", "bare")]
    for run in runs[-2:]:
        (run / "config.toml").unlink()
    found = groups.seed_groups(read.read_runs(runs))
    assert [(group.name, group.runs) for group in found] == [
        ("ex, 3 seeds", (0, 2, 3)),
        ("exdyna, 2 runs", (1, 4)),
        ("plain", (5,)),
        ("bare", (6,)),
    ]


def test_groups_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"s{i}", [by_hand(1)], seed=i % 2, lr=0.1 * (i // 2)) for i in range(4)]
    assert [group.name for group in groups.seed_groups(read.read_runs(runs))] == [
        "exdyna, 2 seeds (1)",
        "exdyna, 2 seeds (2)",
    ]


def test_means_over_seeds_have_a_table(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"run-{i}", [by_hand(1), evaluation(1, metric)], seed=i)
        for i, metric in enumerate((0.5, 0.6, 0.7))
    ]
    page = Page(report.write(runs, tmp_path / "page.html"))
    assert page.table("seeds")["Final accuracy"] == [pytest.approx(0.6)]
    assert page.shown("Final accuracy", "seeds") == ["0.6 ± 0.1"]
    assert page.shown("Bytes received per rank", "seeds") == ["1 kB"], "no deviation: no note"
    assert page.data["groups"] == ["run, 3 seeds"]
    assert "seeds" not in Page(report.write(runs[:1], tmp_path / "one.html")).ids
    lost = make_run(tmp_path / "run-3", [by_hand(1, loss=float("nan")), evaluation(1, 0.8)], seed=3)
    both = Page(report.write([*runs, lost], tmp_path / "page.html"))
    assert both.shown("Final loss", "summary")[-1] == "NaN"
    assert "Final loss" not in both.table("seeds"), "there is no mean of what is not a number"


def test_phases_without_time_are_left_out(tmp_path: Path) -> None:
    seconds = {"reduce": {"mean": 0.001}, "probe": {"mean": 0.0}, "unite": {"mean": 1e-9}}
    records = [by_hand(i, seconds=seconds) for i in (1, 2)]
    other = [by_hand(i, seconds={"reduce": 0.002, "agree": 0.001}) for i in (1, 2)]
    page = Page(report.write([make_run(tmp_path / "a", records), make_run(tmp_path / "b", other)], tmp_path / "page.html"))
    assert page.data["phases"]["names"] == ["agree", "reduce"]
    assert page.data["phases"]["values"] == [[None, pytest.approx(0.001)], [pytest.approx(0.001), pytest.approx(0.002)]]
    assert page.lines("time-per-phase-0") == ["reduce"]
    assert page.lines("time-per-phase-1") == ["agree", "reduce"]
    assert "probe" not in page.text


def test_empty_charts_and_sections_are_left_out(tmp_path: Path) -> None:
    fields = dict.fromkeys(("threshold", "borders", "workloads", "seconds", "lr"))
    page = Page(report.write([make_run(tmp_path / "dense", [by_hand(1, **fields), by_hand(2, **fields)])]))
    assert not {"threshold", "learning-rate", "phases", "time-per-step"} & set(page.figures)
    assert not {"metric", "time", "partitions", "speculation", "details", "events"} & set(page.ids)
    silent = by_hand(1, bytes_received={"min": 0, "mean": 0, "max": 0})
    alone = Page(report.write([make_run(tmp_path / "alone", [silent, evaluation(1, 0.5)])]))
    assert not [mark for mark in alone.figures if "bytes" in mark]
    assert not [mark for mark in alone.figures if mark.startswith("accuracy")], "one evaluation is in the summary"
    assert alone.table()["Final accuracy"] == [0.5]


def test_the_package_has_all_files_and_their_licence(tmp_path: Path) -> None:
    for name in (*STYLES, *SCRIPTS):
        assert asset(name)
    assert "Leon Sorokin" in asset("vendor/uplot/LICENSE")
    page = Page(report.write([whole_run(tmp_path / "run", 3)]))
    assert "Leon Sorokin" in page.html, "a copy of uPlot goes with its copyright"


def test_steps_between_exchanges_are_no_deviation(tmp_path: Path) -> None:
    """Scheme drift may exchange every few steps only; the others have no density, and lines go on over them."""
    none = {
        "density": 0.0,
        "bytes_received": {"min": 0, "mean": 0, "max": 0},
        "imbalance": 0.0,
        "borders": [],
        "workloads": [],
    }
    records = [by_hand(i, **({} if i % 4 == 0 else none)) for i in range(1, 13)]
    page = Page(report.write([make_run(tmp_path / "drift", records)]))
    assert page.shown("Mean density") == ["0.011 set 0.01, +10 %"]
    for mark in ("density", "deviation-of-density", "bytes-per-step", "imbalance", "partition-borders-0"):
        known = [i for i, value in enumerate(page.values(mark, -1), 1) if value is not None]
        assert known == [4, 8, 12], mark
