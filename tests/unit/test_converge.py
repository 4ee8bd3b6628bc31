"""bench converge: cases, learning rates, what is captured, results on disk, and the whole bench, small."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpisparse.bench.converge import training
from mpisparse.bench.converge.cases import ALONE, DENSE, Case, all_cases, parse_case, read_cases
from mpisparse.bench.converge.plan import ConvergePlan, Run
from mpisparse.bench.converge.rates import Grid, at_edge, best_rate
from mpisparse.bench.converge.store import Store
from mpisparse.bench.converge.summary import captured, markdown, summary
from mpisparse.bench.converge.work import perform
from mpisparse.errors import ConfigurationError
from mpisparse.owner import start_of
from mpisparse.runtime.cli import main
from mpisparse.runtime.settings import Settings

# Cases


def test_a_case_is_parsed() -> None:
    case = parse_case("few: scheme=exdyna density=0.01 codec=int8 optimizer=sgd optimizer.momentum=0.5")
    assert case == Case("few", {"scheme": "exdyna", "density": 0.01, "codec": "int8"}, "sgd", {"momentum": 0.5})


def test_density_warm_up_is_the_loops_where_the_scheme_has_none() -> None:
    assert parse_case("a: scheme=topk density_warmup=3 density=0.1").loop == {"density_warmup": 3}
    assert parse_case("a: scheme=exdyna density_warmup=3 density=0.1").loop == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("scheme=exdyna", "--case expects NAME: OPTION=VALUE"),
        (": scheme=exdyna", "--case expects NAME: OPTION=VALUE"),
        ("a: density", "--option expects NAME=VALUE, got 'density'"),
        ("a: scheme=exdina", "case 'a': unknown scheme 'exdina'; did you mean 'exdyna'?"),
        ("a: scheme=exdyna densty=0.1", "case 'a': unknown option 'densty' for scheme \"exdyna\"; did you mean 'density'?"),
        ("a: scheme=exdyna density=3", "case 'a': density must be in (0, 1], got 3; for 3 % pass 0.03"),
        ("a: scheme=exdyna comm=1", "case 'a': comm is set by the bench"),
        ("a: optimizer=adamv", "case 'a': unknown optimizer 'adamv'; did you mean"),
        ("a: scheme=dense density_warmup=3 density=0.5", "case 'a': scheme \"dense\" sends everything"),
        ("dense: scheme=exdyna", "two cases are called 'dense', which is always there"),
    ],
)
def test_a_wrong_case_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        all_cases([text], None)
    assert words in str(caught.value)


def test_cases_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "cases.toml"
    file.write_text(
        '[[case]]\nname = "a"\noptimizer = "sgd"\nrates = [0.1, 0.2]\noptions = { scheme = "topk", density = 0.1 }\n'
        '[[case]]\nname = "b"\n[case.options]\nscheme = "dense"\n'
    )
    names = [case.name for case in all_cases(["c: scheme=dense"], file)]
    assert names == [ALONE, DENSE, "c", "a", "b"]
    assert read_cases(file)[0] == Case("a", {"scheme": "topk", "density": 0.1}, "sgd", {}, (0.1, 0.2))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected tables [[case]]"),
        ("case = 3", "expected tables [[case]]"),
        ("[[case]]\noptions = {}", "expected a name in every [[case]]"),
        ('[[case]]\nname = "a"\nscheme = "dense"', "unknown key 'scheme' of a case"),
        ('[[case]]\nname = "a"\nrates = [-1.0]', "case 'a': expected learning rates above 0, got [-1.0]"),
        ('[[case]]\nname = "a"\noptions = 3', "options of a case must be of type dict, got 3"),
        ("[[case", "is not a TOML file"),
    ],
)
def test_a_wrong_file_of_cases_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "cases.toml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        read_cases(file)
    assert words in str(caught.value)


# Learning rates

GRID = Grid(1.0, 2.0, count=3, most=9)


def search(loss: Callable[[float], float], grid: Grid = GRID, start: tuple[float, ...] = ()) -> dict[float, float]:
    scores: dict[float, float] = {}
    while wanted := grid.wanted(scores, start):
        scores |= {rate: loss(rate) for rate in wanted}
    return scores


@pytest.mark.parametrize("best", [1.0, 2.0, 8.0, 0.5, 0.125])
def test_the_grid_grows_until_the_best_is_inside(best: float) -> None:
    scores = search(lambda rate: abs(math.log(rate / best)))
    assert best_rate(scores) == best
    assert not at_edge(scores)
    assert {best / 2, best * 2} <= set(scores)
    assert len(scores) == 3 + abs(round(math.log2(best)))


def test_the_grid_stops_at_its_cap() -> None:
    scores = search(lambda rate: -rate)
    assert len(scores) == GRID.most
    assert at_edge(scores)


def test_diverged_rates_bound_the_best() -> None:
    scores = search(lambda rate: 1 / rate if rate <= 1.0 else math.inf)
    assert best_rate(scores) == 1.0
    assert not at_edge(scores)
    everywhere = search(lambda rate: math.inf)
    assert best_rate(everywhere) is None
    assert at_edge(everywhere)
    assert max(everywhere) == 2.0, "smaller rates are tried"


def test_a_case_may_begin_with_its_own_rates() -> None:
    scores = search(lambda rate: rate, start=(8.0, 16.0))
    assert sorted(scores)[-2:] == [8.0, 16.0]
    assert len(scores) == GRID.most


# What is still to be done


def plan(tmp_path: Path, **options: Any) -> ConvergePlan:
    cases = [Case(ALONE, {"scheme": "dense"}), Case(DENSE, {"scheme": "dense"}), Case("x", {"scheme": "topk"})]
    given = {"cases": cases, "grid": Grid(1.0, 2.0, 3, 9), "seeds": 2, "tuning_seeds": 2, **options}
    return ConvergePlan(Settings(seed=7), out=tmp_path, **given)


def result(loss: float, **more: Any) -> dict[str, Any]:
    return {
        "diverged": False, "validation": loss, "test": loss + 1, "train": loss, "bytes": 6.0, "seconds": 1.0, "workers": 4,
        "steps": 9, "parameters": 5, "evaluated_by_step": [0], "validation_by_step": [3.0], **more,
    }  # fmt: skip


def do_all(todo: ConvergePlan, loss: Callable[[str, float, int], float]) -> dict[tuple[str, float, int], dict[str, Any]]:
    done: dict[tuple[str, float, int], dict[str, Any]] = {}
    while missing := todo.missing(done):
        for run in missing:
            name, rate, seed = run.key
            value = loss(name, rate, seed)
            done[run.key] = result(value, lr=rate) if math.isfinite(value) else {"diverged": True, "lr": rate}
    return done


def test_every_case_has_its_own_rate(tmp_path: Path) -> None:
    best = {ALONE: 1.0, DENSE: 4.0, "x": 0.5}
    gain = {ALONE: 2.0, DENSE: 1.0, "x": 1.25}
    todo = plan(tmp_path)
    done = do_all(todo, lambda name, rate, seed: gain[name] + math.log2(rate / best[name]) ** 2)
    records = summary(todo, done)
    assert [r["lr"] for r in records] == [1.0, 4.0, 0.5]
    assert [r["captured"] for r in records] == [0.0, 1.0, 0.75]
    assert [r["beats_alone"] for r in records] == [None, 2, 2]
    assert {seed for _, _, seed in done} == {7, 8}
    table = markdown(records).splitlines()
    assert table[0].startswith("| case | bytes | lr |")
    assert table[4].startswith("| x | 6 | 0.5 |")


def test_a_seed_that_diverged_decides(tmp_path: Path) -> None:
    done = do_all(plan(tmp_path), lambda name, rate, seed: math.inf if rate > 1.0 and seed == 8 else 1 / rate)
    assert best_rate(plan(tmp_path).scores(Case("x", {"scheme": "topk"}), done)) == 1.0


def test_few_seeds_may_pick_the_rate(tmp_path: Path) -> None:
    todo = plan(tmp_path, seeds=3, tuning_seeds=1)
    done = do_all(todo, lambda name, rate, seed: abs(math.log2(rate)))
    assert sorted(done) == sorted((case.name, rate, seed) for case in todo.cases for rate, seed in
                                  [(0.5, 7), (1.0, 7), (2.0, 7), (1.0, 8), (1.0, 9)])  # fmt: skip


def test_a_rate_that_is_far_behind_is_given_up(tmp_path: Path) -> None:
    """Its other seeds are not run, and it is never the best, whatever they would have given."""
    todo, done = plan(tmp_path, give_up=0.5), dict[tuple[str, float, int], dict[str, Any]]()

    def loss(rate: float, seed: int) -> float:
        return {0.5: 2.0, 1.0: 1.0, 2.0: 1.2}[rate] * (0.1 if rate == 0.5 and seed == 8 else 1.0)

    while missing := todo.missing(done):  # one after the other, as a bench with one job does
        _, rate, seed = missing[0].key
        done[missing[0].key] = result(loss(rate, seed), lr=rate)
    assert ("x", 0.5, 7) in done
    assert ("x", 0.5, 8) not in done
    assert ("x", 2.0, 8) in done
    assert best_rate(todo.scores(Case("x", {"scheme": "topk"}), done)) == 1.0
    with pytest.raises(ConfigurationError, match="--give-up must be a share of at least 0, got -1"):
        plan(tmp_path, give_up=-1.0)


def test_a_case_that_always_diverges_is_told(tmp_path: Path) -> None:
    todo = plan(tmp_path)
    done = do_all(todo, lambda name, rate, seed: math.inf if name == "x" else rate + 1 / rate)
    (record,) = (r for r in summary(todo, done) if r["case"] == "x")
    assert record["edge"] == "diverged"
    assert record["captured"] is None


# What is captured


def test_captured_is_a_share_of_the_gain() -> None:
    assert captured([3.0], [1.0], [2.0]) == (0.5, None)
    assert captured([3.0, 3.0], [1.0, 1.0], [2.0, 2.0]) == (0.5, 0.0)
    assert captured([3.0, 5.0], [1.0, 1.0], [1.0, 1.0]) == (1.0, 0.0), "seeds are compared with themselves"
    assert captured([1.0], [1.0], [1.0]) == (None, None)
    assert captured([2.0], [1.0], []) == (None, None)


def test_the_error_of_what_is_captured() -> None:
    share, error = captured([2.0, 2.0, 2.0], [1.0, 1.0, 1.0], [1.2, 1.5, 1.8])
    assert share == pytest.approx(0.5)
    assert error == pytest.approx(0.3 / math.sqrt(3))


# Results on disk


def test_settings_that_differ_are_refused(tmp_path: Path) -> None:
    Store(plan(tmp_path))
    Store(plan(tmp_path, seeds=5))
    with pytest.raises(ConfigurationError, match="has results with workers 4, this bench has 8; choose another --out"):
        Store(plan(tmp_path, workers=8))


def test_results_of_a_case_that_has_changed_are_refused(tmp_path: Path) -> None:
    todo = plan(tmp_path)
    store = Store(todo)
    run = todo.missing({})[-1]
    store.add(run, {**result(1.0), "case": "x", "definition": run.case.definition(), "lr": 1.0, "seed": 7})
    assert list(store.read()) == [("x", 1.0, 7)]
    changed = plan(tmp_path, cases=[*todo.cases[:2], Case("x", {"scheme": "topk", "density": 0.5})])
    with pytest.raises(ConfigurationError, match=r"is a result of case 'x' with .* give the new case another name"):
        Store(changed).read()
    assert not Store(plan(tmp_path, cases=todo.cases[:2])).read(), "cases that are not asked for stay out"


@pytest.mark.parametrize("text", ['{"case"', "[]", '{"case": "alone"}'])
def test_what_is_no_result_is_told(tmp_path: Path, text: str) -> None:
    store = Store(plan(tmp_path))
    (store.runs / "x.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"expected what bench converge wrote in .*x\.json"):
        store.read()


# The whole bench

MODEL = """
import torch

def model(sizes):
    return torch.nn.Linear(6, 3)

def data():
    inputs = torch.randn(400, 6, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))
    return data, data
"""
SMALL = (
    "bench", "converge", "--model", "converging:model", "--data", "converging:data", "--steps", "12", "--warmup", "2",
    "--batch-size", "4", "--workers", "2", "--seeds", "2", "--lr", "0.4", "--lr-factor", "4", "--most-rates", "5",
    "--case", "few: scheme=topk density=0.2",
)  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "converging.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_the_bench_runs_and_goes_on(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--out", "out", "--json"]) == 0
    first = capsys.readouterr()
    records = {r["case"]: r for r in map(json.loads, first.out.splitlines())}
    assert list(records) == ["alone", "dense", "few"]
    assert records["alone"]["bytes"] == 0
    assert 4.0 < records["dense"]["bytes"] < 9.0, "2 x 4 bytes x 1/2 on 2 ranks, and control messages, of 21 parameters"
    assert records["few"]["bytes"] > 0
    assert records["alone"]["captured"] == 0
    assert records["dense"]["captured"] == 1
    assert all(not r["edge"] or len(r["validation_by_rate"]) == 5 for r in records.values())
    root = ET.parse(home / "out" / "pictures" / "converge-frontier.svg").getroot()
    words = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"few", "dense", "alone"} <= set(words)
    assert len((home / "out" / "table.md").read_text().splitlines()) == 5
    assert "runs done" in first.err
    runs = sorted((home / "out" / "runs").iterdir())
    whole = {file: file.read_bytes() for file in runs}
    lost = runs[0]
    lost.unlink()
    assert main([*SMALL, "--out", "out", "--json"]) == 0
    again = capsys.readouterr()
    assert again.err.count("runs done") == 1, "only what was missing"
    for file in runs:
        before, now = json.loads(whole[file]), json.loads(file.read_bytes())
        for timed in ("seconds", "examples_per_second"):
            before.pop(timed), now.pop(timed)
        assert before == now, "the same bits"


def test_the_last_delivery_in_flight_counts(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A late exchange of all elements receives what one at once does, and its last result is applied in no step."""
    cases = [f"{name}: scheme=drift density=1 codec=fp32 staleness={late}" for name, late in (("now", 0), ("late", 1))]
    more = ["--case", cases[0], "--case", cases[1], "--seeds", "1", "--most-rates", "3"]
    assert main([*SMALL, *more, "--out", "out", "--json"]) == 0
    records = {r["case"]: r for r in map(json.loads, capsys.readouterr().out.splitlines())}
    assert records["late"]["bytes"] == records["now"]["bytes"] > 0


def test_jobs_side_by_side_find_the_same(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = []
    for jobs in ("1", "2"):
        assert main([*SMALL, "--seeds", "1", "--out", f"out{jobs}", "--jobs", jobs, "--json"]) == 0
        records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        tables.append([{key: value for key, value in r.items() if key != "seconds"} for r in records])
    assert tables[0] == tables[1]


def test_a_bench_that_was_killed_goes_on(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--out", "out", "--jobs", "2"]
    bench = subprocess.Popen([sys.executable, "-m", "mpisparse", *words], stderr=subprocess.PIPE, text=True, cwd=home)
    assert bench.stderr is not None
    for line in bench.stderr:
        if "runs done" in line:
            break
    bench.send_signal(signal.SIGKILL)
    bench.wait()
    bench.stderr.close()
    done = list((home / "out" / "runs").glob("*.json"))
    assert done
    assert main(words[:-2]) == 0
    said = capsys.readouterr()
    assert said.err.count("runs done") == len(list((home / "out" / "runs").glob("*.json"))) - len(done)
    assert "captured" in said.out


CHILD = """
import os, time
from mpisparse.bench.converge.work import _end_with
_end_with(os.getppid())
print(os.getpid(), flush=True)
time.sleep(900)
"""
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline(), flush=True)
os._exit(0)
"""


def test_a_process_ends_with_the_one_that_started_it() -> None:
    ended = subprocess.run([sys.executable, "-c", PARENT, CHILD], capture_output=True, text=True, check=True, timeout=900)
    pid, until = int(ended.stdout), time.monotonic() + 600
    while start_of(pid) is not None:
        assert time.monotonic() < until, "it still runs"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--case", "a: scheme=topk densty=1"], "case 'a': unknown option 'densty'"),
        (
            ["--config", "epochs.toml"],
            "bench converge does not support the settings epochs, codec; remove them from its file",
        ),
        (["--cases", "nowhere.toml"], "cannot read the cases in nowhere.toml"),
        (["--batch-size", "1000"], "a step needs 1000 examples, the data has 379; lower --batch-size"),
        (["--lr", "0"], "--lr must be above 0, got 0"),
        (["--validation", "0"], "learning rates are picked by validation data, but --validation 0 holds out none"),
        (["--case", "a: scheme=dense optimizer.fast=1"], "case 'a': SGD has no option 'fast'; choose from: dampening"),
    ],
)
def test_a_wrong_bench_is_refused(home: Path, capsys: pytest.CaptureFixture[str], more: list[str], words: str) -> None:
    Path("epochs.toml").write_text('epochs = 3\ncodec = "int8"\n')
    small = [word for word in SMALL if "epochs.toml" not in more or word not in ("--steps", "12")]
    assert main([*small, "--out", "out", *more]) == 2
    assert words in capsys.readouterr().err


def test_an_error_ends_all_jobs(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--case", "a: scheme=dense optimizer.fast=1", "--jobs", "2", "--rates", "1", "--most-rates", "1"]
    assert main([*SMALL, "--out", "out", *more]) == 2
    assert "case 'a': SGD has no option 'fast'" in capsys.readouterr().err
    assert not multiprocessing.active_children()


def test_a_directory_of_another_bench_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.makedirs("out")
    Path("out/settings.json").write_text('{"steps": 5}')
    assert main([*SMALL, "--out", "out"]) == 2
    assert "out has results with steps 5, this bench has 12; choose another --out" in capsys.readouterr().err


def test_training_that_diverges_is_no_error(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--seeds", "1", "--lr", "1e3", "--lr-factor", "1000", "--out", "out", "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(None in r["validation_by_rate"].values() for r in records)
    assert all(r["lr"] <= 1.0 for r in records)


def test_a_validation_loss_that_rises_for_a_while_ends_no_training(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with batch normalization at a high rate. The training loss tells; in the end the validation loss does."""
    losses = iter([1.0, *[50.0] * (training.LOOKS - 1), 0.5, 0.5])
    monkeypatch.setattr(training, "evaluate", lambda *_: (next(losses), 0.0))
    settings = Settings(model="converging:model", data="converging:data", steps=12, batch_size=4)
    record = perform(Run(settings, Case(ALONE, {"scheme": "dense"}), 1, 64))
    assert not record["diverged"]
    assert record["steps"] == 12


def test_the_cases_of_the_pages_are_cases() -> None:
    """Options that a scheme takes no more would be found by a run of hours only."""
    pages = sorted((Path(__file__).parents[2] / "docs" / "results").rglob("*.toml"))
    assert pages
    for page in pages:
        assert len({case.name for case in read_cases(page)}) == len(read_cases(page)) > 0, page
