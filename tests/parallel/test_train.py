"""Runs of `mpisparse train` on two ranks that end by themselves; those that are killed or die: tests/unit/test_runs.py."""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from pathlib import Path

import pytest
import tiny  # noqa: F401 - on the path, as `--model tiny:model` needs it
from mpi4py import MPI
from ranks import everywhere

from mpisparse.runtime import dry_run
from mpisparse.runtime.cli import main, parser
from mpisparse.runtime.flags import resolve
from mpisparse.runtime.report.read import read_runs

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.ranks(2)]


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPISPARSE_PROGRESS", "plain")


def train(comm: MPI.Intracomm, out: Path, *options: str) -> tuple[int, str]:
    """Run on all ranks; returns the exit code, which must be the same on all, and what all printed. Collective."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), warnings.catch_warnings():
        warnings.simplefilter("default")
        code = main(["train", "--out", str(out), *options])
    ended = comm.allgather((code, printed.getvalue()))
    told = "".join(text for _, text in ended)
    assert len({code for code, _ in ended}) == 1, ended
    return code, told


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("refused_on_rank_1", "rank 1 sees no file"),
        ("more_on_rank_1", "rank 0 has 180, 20, 50 examples, this rank 216, 24, 50"),
    ],
)
def test_what_one_rank_refuses_all_refuse(comm: MPI.Intracomm, directory: Path, data: str, says: str) -> None:
    options = ("--model", "tiny:model", "--data", f"tiny:{data}", "--batch-size", "4", "--steps", "1000000")
    code, told = train(comm, directory / data, *options)
    assert code not in (0, 85), told
    assert says in told
    assert "Traceback" not in told


def test_auto_writes_down_what_it_chose_and_goes_on_with_it(comm: MPI.Intracomm, directory: Path) -> None:
    out = directory / "auto"
    options = ["--model", "tiny:model", "--data", "tiny:data", "--batch-size", "8", "--scheme", "auto"]
    code, told = train(comm, out, *options, "--option", "slowdown=1e9", "--steps", "7")
    assert code == 0, told
    assert "r0 | auto: dense fp32 from step 5 on: predicted step" in told
    chosen = (out / "choices.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in chosen[1:]] == [
        {"step": 0, "candidate": "dense int4"}, {"step": 5, "candidate": "dense fp32"}
    ]  # fmt: skip
    code, told = train(comm, out, *options, "--option", "slowdown=1.5", "--steps", "9")
    assert code == 0, told
    assert "from step 7" in told
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    details = [line["details"] for line in lines if line["kind"] == "step"]
    assert [each["choice"] for each in details] == [*5 * [3.0], *4 * [0.0]]
    assert details[6]["predicted_dense int8"] > details[6]["computing_seconds"] > 0
    assert (out / "choices.jsonl").read_text().splitlines()[1:] == chosen[1:]
    code, told = train(comm, out, "--model", "tiny:wide", *options[2:], "--steps", "9")
    assert code == 2
    for words in ("holds a run with model tiny:model", "this one has model tiny:wide", "choose another --out"):
        assert words in told
    assert (out / "choices.jsonl").read_text().splitlines()[1:] == chosen[1:], "the log of another model's run stays"

    unfinished = directory / "unfinished"
    comm.Barrier()
    if comm.rank == 0:
        unfinished.mkdir()
        (unfinished / "choices.jsonl").write_text("of a run that was killed before its first checkpoint")
    comm.Barrier()
    code, told = train(comm, unfinished, *options, "--steps", "1")
    assert code == 0, told
    assert json.loads((unfinished / "choices.jsonl").read_text().splitlines()[0])["choices"] == 1

    again = directory / "again"
    log = f"deterministic={out / 'choices.jsonl'}"
    code, told = train(comm, again, *options, "--option", log, "--steps", "9")
    assert code == 0, told
    losses = [line["loss"] for line in lines if line["kind"] == "step"]
    told = (again / "metrics.jsonl").read_text()
    assert [line["loss"] for line in map(json.loads, told.splitlines()) if line["kind"] == "step"] == losses


def test_prediction_on_two_ranks_and_what_its_metrics_tell(comm: MPI.Intracomm, directory: Path) -> None:
    """Before the first lesson there is no ranking; accuracies move k, which the metrics show."""
    out = directory / "predictive"
    options = ["--model", "tiny:model", "--data", "tiny:data", "--batch-size", "8", "--scheme", "predictive"]
    options += ["--density", "0.1", "--option", "validate_every=6", "--eval-every", "8", "--steps", "48"]
    code, told = train(comm, out, *options)
    assert code == 0, told
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    rankings = [line["details"]["ranking"] for line in steps]
    assert rankings[:9] == [None] * 9  # the lesson of step 6 is published four steps later
    assert all(0 <= ranking <= 1 for ranking in rankings[9:])
    said = [(line["step"], line["text"]) for line in lines if line["kind"] == "event" and line["event"] == "k"]
    assert said
    for step, text in said[:-1] if said[-1][0] == 48 else said:
        before, after = steps[step - 1], steps[step]
        raised = after["set_density"] > before["set_density"]
        assert text.startswith("raised from" if raised else "lowered from")
        assert after["details"]["k_scale"] != before["details"]["k_scale"]
    assert len(read_runs([out])[0].steps) == 48


@pytest.mark.parametrize("options", [[], ["--codec", "int8"], ["--scheme", "drift", "--option", "every=2"]], ids=str)
def test_a_dry_run_tells_the_bytes_of_a_real_one(comm: MPI.Intracomm, directory: Path, options: list[str]) -> None:
    words = ["train", "--batch-size", "8", "--density", "0.02", "--steps", str(dry_run.WARM + dry_run.STEPS), *options]
    assert main([*words, "--out", str(directory / "run")]) == 0
    lines = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"][dry_run.WARM :]
    received = sum(line["bytes_received"]["mean"] for line in steps) / len(steps)
    expected = dry_run.measure(resolve(vars(parser().parse_args(words))), comm.size).received
    assert everywhere(comm, abs(received - expected) <= 0.05 * expected + 64)
