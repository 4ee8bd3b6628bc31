"""Whole runs of `mpisparse train`: killed, stopped, failed, refused, and resumed bit for bit.

Jobs of two ranks use the mpirun next to the running Python; one rank runs inside this process.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from soak.ends import contents

import mpisparse
from mpisparse import checkpoint
from mpisparse.checkpoint import h5file, store, tree
from mpisparse.checkpoint.model_files import read_model
from mpisparse.runtime.cli import main
from mpisparse.runtime.evaluate import evaluate
from mpisparse.runtime.metrics import MetricsFile
from mpisparse.runtime.report.read import read_runs
from mpisparse.runtime.run_checkpoints import RunCheckpoints
from mpisparse.runtime.train import Trainer
from mpisparse.runtime.workloads import build

TIMEOUT = 900.0  # seconds for a job; on a quiet machine one takes about six
STEPS = 120
OPTIONS = [
    *("--model", "tiny:model", "--data", "tiny:data", "--batch-size", "4", "--accumulation", "2", "--seed", "3"),
    *("--schedule", "cosine", "--warmup", "5", "--density", "0.05", "--density-from", "0.5", "--density-warmup", "20"),
    *("--clip", "1.0", "--bf16", "--eval-every", "30", "--weight-decay", "0.01"),
]

ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMP_NUM_THREADS": "1",
    "MPISPARSE_PROGRESS": "plain",
}


class Job:
    """A run on two ranks under mpirun."""

    def __init__(self, home: Path, out: Path, *options: str, ranks: int = 2) -> None:
        self.home, self.out = home, out
        self.log = home / f"{out.name}.log"
        command = [mpirun(), "-n", str(ranks), Path(sys.executable).with_name("mpisparse"), "train", "--out", out, *options]
        with self.log.open("w") as sink:
            self.mpirun = subprocess.Popen(
                [str(word) for word in command], env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(home)}, cwd=home,
                stdout=sink, stderr=sink, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    @property
    def output(self) -> str:
        return self.log.read_text()

    @property
    def ranks(self) -> list[int]:
        """Return the process ids of the live ranks, in rank order."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                if str(self.out).encode() not in words:
                    continue
                variables = dict(v.split(b"=", 1) for v in (process / "environ").read_bytes().split(b"\0") if b"=" in v)
                rank = variables.get(b"OMPI_COMM_WORLD_RANK", variables.get(b"PMI_RANK"))
                if rank is not None:
                    found[int(rank)] = int(process.name)
        return [found[rank] for rank in sorted(found)]

    def signal(self, number: int, pids: list[int]) -> None:
        """Send a signal to processes; skips those that have ended."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait(self) -> int:
        """Wait for the end; fails after a time-out, or if a rank outlives mpirun."""
        try:
            code = self.mpirun.wait(TIMEOUT)
            wait_until(lambda: not self.ranks, self, seconds=120)
            return code
        except subprocess.TimeoutExpired:
            pytest.fail(f"the job hangs: not ended after {TIMEOUT:g} s\n{self.output}")
        finally:
            self.end()

    def end(self) -> None:
        """Kill mpirun and its ranks."""
        if self.mpirun.poll() is None:
            self.mpirun.kill()
            self.mpirun.wait()
        self.signal(signal.SIGKILL, self.ranks)


@functools.cache
def mpirun() -> Path:
    """Return the mpirun next to the running Python."""
    return Path(sys.executable).with_name("mpirun")


def wait_until(condition: Callable[[], object], job: Job, seconds: float = TIMEOUT) -> None:
    """Poll until a condition holds; fails after a time-out."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            pytest.fail(f"waited for {seconds:g} s\n{job.output}")
        time.sleep(0.002)


def wait_for_step(job: Job, step: int) -> None:
    """Wait until a job has done a step that no run in this directory did before."""
    wait_until(lambda: last_step(job.out) >= step or job.mpirun.poll() is not None, job)
    assert job.mpirun.poll() is None, f"ended before step {step}\n{job.output}"


def metrics(out: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics; raises if one is not strict JSON, which has no NaN."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=no_constant) for line in lines]


def no_constant(token: str) -> None:
    raise ValueError(f"{token} is no JSON")


def last_step(out: Path) -> int:
    """Return the step of the last complete line of a run in progress."""
    try:
        lines = (out / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
        return int(json.loads(lines[-1])["step"]) if lines else 0
    except FileNotFoundError:
        return 0


def newest(out: Path) -> Path:
    """Return a run's newest checkpoint."""
    return store.found(out / "checkpoints")[0]


def assert_same_end(out: Path, reference: Path, steps: int = STEPS) -> None:
    """Check that two runs ended with the same bits, part by part."""
    ended, expected = contents(newest(out)), contents(newest(reference))
    assert ended["step"] == steps
    assert ended.keys() == expected.keys()
    for part in expected:
        assert ended[part] == expected[part], f"{part} differs"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make a directory with the module `tiny`, on the path of this process and of the jobs."""
    if not mpirun().exists():
        pytest.skip(f"there is no mpirun beside {sys.executable}")
    place = tmp_path_factory.mktemp("runs")
    shutil.copy(Path(__file__).parents[1] / "tiny.py", place)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(place))
        patch.setenv("MPISPARSE_PROGRESS", "plain")
        yield place


@pytest.fixture(scope="module")
def reference(home: Path) -> Path:
    """Return an uninterrupted run on two ranks that writes only a final checkpoint."""
    out = home / "reference"
    job = Job(home, out, *OPTIONS, "--steps", str(STEPS))
    assert job.wait() == 0, job.output
    assert [line["step"] for line in metrics(out) if line["kind"] == "step"] == list(range(1, STEPS + 1))
    assert len(store.found(out / "checkpoints")) == 1
    return out


# Killed


def unfinished(out: Path) -> bool:
    return any((out / "checkpoints").glob(f"{store.UNFINISHED}*"))


def all_stand(pids: list[int]) -> bool:
    """Tell whether all threads of processes are stopped: a signal to stop takes effect a little later."""
    states = [
        path.read_text().rpartition(")")[2].split()[0] for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/stat")
    ]
    return all(state in "TtZX" for state in states)


def stop_inside_a_write(job: Job) -> None:
    """Stop all ranks while a checkpoint is half written."""
    pids = job.ranks
    while job.mpirun.poll() is None:
        if unfinished(job.out):
            job.signal(signal.SIGSTOP, pids)
            wait_until(lambda: all_stand(pids), job)
            if unfinished(job.out):
                return
            job.signal(signal.SIGCONT, pids)
    pytest.fail(f"ended before a checkpoint was seen half written\n{job.output}")


def kill(job: Job, how: str, step: int, draw: random.Random) -> None:
    """End a job or one of its ranks, as `how` says, at or after a step."""
    if how == "start":
        time.sleep(draw.uniform(0.0, 6.0))
    else:
        wait_for_step(job, step)
    if "write" in how:
        stop_inside_a_write(job)
    else:
        time.sleep(draw.uniform(0.0, 0.03))
    pids = job.ranks
    if "rank" in how:
        job.signal(signal.SIGKILL, [draw.choice(pids)])
        job.signal(signal.SIGCONT, pids)
    else:
        job.signal(signal.SIGKILL, [job.mpirun.pid, *pids])
    assert job.wait() != 0, job.output
    assert how != "write" or unfinished(job.out)  # of two ranks, the one that lives may still make it whole


HOWS = ("rank", "write", "job", "write to a rank", "start", "job", "write")


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_killed_at_any_moment_and_resumed_gives_the_same_bits(home: Path, reference: Path, kills: int) -> None:
    draw = random.Random(kills)
    out = home / f"killed-{kills}"
    command = [*OPTIONS, "--steps", str(STEPS), "--checkpoint-every", "1"]
    moments = sorted(draw.sample(range(1, STEPS - 40 if kills < 20 else STEPS - 10), kills))
    for i, step in enumerate(moments):
        background = ["--background"] if draw.random() < 0.5 else []
        new = max(step, last_step(out) + 1)
        kill(Job(home, out, *command, *background), HOWS[i % len(HOWS)], new, draw)
    job = Job(home, out, *command)
    assert job.wait() == 0, job.output
    assert not unfinished(out)
    assert len(store.found(out / "checkpoints")) == 2
    assert_same_end(out, reference)
    losses: dict[int, set[float]] = {}
    for line in metrics(out):
        if line["kind"] == "step":
            losses.setdefault(line["step"], set()).add(line["loss"]["mean"])
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert all(len(seen) == 1 for seen in losses.values()), "a step that was done again had another loss"


# Two at once


@pytest.mark.filterwarnings("ignore:the number of threads")
def test_a_second_run_in_the_directory_is_refused_or_waits(home: Path, reference: Path) -> None:
    out, alias = home / "shared", home / "shared-too"
    alias.symlink_to(out)
    command = [*OPTIONS, "--steps", str(STEPS), "--checkpoint-every", "1"]
    first = Job(home, out, *command)
    wait_until((out / "lock").exists, first)
    owner = json.loads((out / "lock").read_text())["owner"]
    second = Job(home, alias, *command)
    assert train(out, *command, "--wait-for-lock") == 0, "it finds all done"
    assert first.wait() == 0, first.output
    assert second.wait() == 75, second.output
    assert second.output.count(f"is in use by process {owner['pid']} on {owner['host']}") == 1, second.output
    steps = [line["step"] for line in metrics(out) if line["kind"] == "step"]
    assert steps == list(range(1, STEPS + 1))
    assert main(["inspect", "--verify", str(out)]) == 0
    assert len(store.found(out / "checkpoints")) == 2
    assert not unfinished(out)
    assert not (out / "lock").exists()
    assert_same_end(out, reference)


@pytest.mark.parametrize("background", [False, True])
def test_a_run_whose_directory_was_taken_over_writes_no_more(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], background: bool
) -> None:
    """As if it had been suspended so long that another host took it for dead."""
    one_step = Trainer._one_step
    other = '{"owner": {"host": "node9", "kernel": "x", "pid": 5, "start": 6, "job": "", "restart": 0}, "since": "now"}'

    def step(self: Trainer) -> bool:
        if self.state.step == 4:
            (self.out / "lock").unlink()
            (self.out / "lock").write_text(other)
        return one_step(self)

    monkeypatch.setattr(Trainer, "_one_step", step)
    options = [*OPTIONS, "--steps", "9", "--checkpoint-every", "1", "--keep", "9", *(["--background"] if background else [])]
    assert train(tmp_path, *options) == 75
    said = capsys.readouterr().err
    assert "was taken over by process 5 on node9" in said
    kept = [store.read_manifest(path).step for path in store.found(tmp_path / "checkpoints")]
    assert kept[0] < 5, "what was done after the takeover is not kept"
    assert not unfinished(tmp_path)
    assert (tmp_path / "lock").read_text() == other, "the other's lock stays"
    assert last_step(tmp_path) <= 5


# Asked to stop


def test_signals_stop_after_a_checkpoint_and_the_same_command_goes_on(home: Path, reference: Path) -> None:
    out = home / "signalled"
    command = [*OPTIONS, "--steps", str(STEPS), "--checkpoint-every", "25", "--background"]
    job = Job(home, out, *command)
    wait_for_step(job, 11)
    job.mpirun.send_signal(signal.SIGUSR1)
    assert job.wait() == 85, job.output
    first = store.read_manifest(newest(out)).step
    assert first >= 11
    assert not unfinished(out)
    assert f"continue from step {first}" in job.output

    job = Job(home, out, *command)
    wait_for_step(job, max(40, first + 1))
    job.signal(signal.SIGTERM, job.ranks[1:])  # one rank is asked, all stop
    assert job.wait() == 85, job.output
    assert "resume: 2 ranks" in job.output
    assert first < store.read_manifest(newest(out)).step < STEPS

    job = Job(home, out, *command)
    assert job.wait() == 0, job.output
    assert_same_end(out, reference)


# Failed


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("failing", "OSError: the data of rank 1 is gone"),
        ("no_data_on_rank_1", "FileNotFoundError: rank 1 sees no file"),
    ],
)
def test_an_error_on_one_rank_ends_all_and_is_shown(home: Path, data: str, says: str) -> None:
    """What all ranks agree to refuse ends no job by force: tests/parallel/test_train.py."""
    job = Job(home, home / data, *OPTIONS, "--data", f"tiny:{data}", "--steps", "1000000")
    assert job.wait() not in (0, 85), job.output
    assert says in job.output
    assert "Traceback (most recent call last)" in job.output


# A full disk


class SmallDisk:
    """A file system in memory; fill() leaves no page free."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def fill(self) -> None:
        with open(self.place / "filler", "ab", buffering=0) as filler, contextlib.suppress(OSError):
            while filler.write(bytes(1 << 16)):
                pass

    def empty(self) -> None:
        (self.place / "filler").unlink()


class SaidToBeFull:
    """A directory whose writes fail while it is declared full."""

    def __init__(self, place: Path, patch: pytest.MonkeyPatch) -> None:
        self.place, self.patch = place, patch

    def fill(self) -> None:
        def no_room(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        self.patch.setattr(checkpoint.saving, "write_file", no_room)
        self.patch.setattr(MetricsFile, "_append", no_room)

    def empty(self) -> None:
        self.patch.undo()


@pytest.fixture(params=["small", "said"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallDisk | SaidToBeFull]:
    place = tmp_path / "disk"
    place.mkdir()
    if request.param == "said":
        with pytest.MonkeyPatch.context() as patch:
            yield SaidToBeFull(place, patch)
        return
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small tmpfs: {mounted.stderr.strip()}")
    yield SmallDisk(place)
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_costs_metrics_and_checkpoints_and_not_the_run(
    home: Path, disk: SmallDisk | SaidToBeFull, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """The disk is full from before step 5 until before step 10."""
    out, one_step, failing = disk.place / "run", Trainer._one_step, []

    def step(self: Trainer) -> bool:
        self.checkpoints.finish()
        for thread in threading.enumerate():
            if thread.name == store.REMOVER:
                thread.join()
        if 4 <= self.state.step < 9:
            disk.fill()
        if self.state.step == 9:
            failing.extend(path.name for path in (out / "checkpoints").iterdir() if path.name.startswith("."))
            disk.empty()
        return one_step(self)

    monkeypatch.setattr(Trainer, "_one_step", step)
    options = ["--steps", "12", "--checkpoint-every", "1", "--log-ranks", *(["--background"] if background else [])]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert train(out, *OPTIONS, *options) == 0
    assert not [name for name in failing if name.startswith(store.UNFINISHED)]
    assert not unfinished(out)
    assert len([each for each in told if "metrics are dropped" in str(each.message)]) == 1
    lines = metrics(out)
    steps = [line["step"] for line in lines if line["kind"] == "step"]
    assert steps[:4] == [1, 2, 3, 4]
    assert steps[-3:] == [10, 11, 12]
    assert len(steps) < 12
    assert any(line["event"] == "metrics dropped" for line in lines if line["kind"] == "event")
    assert newest(out).name == store.name_of(12)
    assert main(["inspect", "--verify", str(out)]) == 0
    assert "end: 12 steps" in (out / "logs" / "rank-0000.log").read_text()


def test_the_first_rank_stops_and_heartbeats_go_by_files(home: Path) -> None:
    """Rank 0, which collects heartbeats, is silent: the others use files in the run's directory."""
    job = Job(home, home / "stopping", *OPTIONS, "--data", "tiny:stopping", "--steps", "1000000", "--timeout", "4", ranks=3)
    assert job.wait() == 87, job.output
    assert "r1 | watchdog: waits in " in job.output
    assert "r2 | watchdog: waits in " in job.output
    assert "rank 0: stopped or gone: last heartbeat " in job.output
    assert "ranks 1-2: waiting in " in job.output or "rank 1: waiting in " in job.output
    assert f"these are from {job.out / 'heartbeats'}" in job.output


@pytest.mark.slow
@pytest.mark.parametrize("level", ["multiple", "serialized"])
def test_a_rank_that_stops_while_buckets_are_out(home: Path, monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    """The thread that waits for it is named; where MPI serves one thread only, that is said once, and nothing overlaps."""
    monkeypatch.setenv("MPI4PY_RC_THREAD_LEVEL", level)
    overlap = ("--option", "overlap=true", "--option", "bucket_mb=0.0002", "--scheme", "exdyna")
    data = ("--data", "tiny:stopping", "--steps", "1000000", "--timeout", "4")
    job = Job(home, home / f"stopping-{level}", *OPTIONS, *overlap, *data)
    assert job.wait() == 87, job.output
    assert "r1 | watchdog: waits in " in job.output
    assert "rank 0: stopped or gone: last heartbeat " in job.output
    assert job.output.count("serves one thread only") == (level == "serialized")


# On another number of ranks; one rank runs here


def train(out: Path, *options: str) -> int:
    """Run `mpisparse train` in this process, on one rank."""
    return main(["train", "--out", str(out), *options])


@pytest.fixture
def resized(home: Path, reference: Path) -> Path:
    """Return a copy of the reference run, to be resumed."""
    out = home / "resized"
    shutil.rmtree(out, ignore_errors=True)
    return copy_of(reference, out)


@pytest.mark.filterwarnings("ignore:the number of threads")
def test_two_ranks_then_one_then_two(home: Path, resized: Path) -> None:
    before = store.read_manifest(newest(resized))
    assert train(resized, *OPTIONS, "--steps", str(STEPS + 5)) == 0
    one = store.read_manifest(newest(resized))
    assert (before.ranks, one.ranks, one.step) == (2, 1, STEPS + 5)
    job = Job(home, resized, *OPTIONS, "--steps", str(STEPS + 10))
    assert job.wait() == 0, job.output
    two = contents(newest(resized))
    assert (two["ranks"], two["step"]) == (2, STEPS + 10)
    done = [line["step"] for line in metrics(resized) if line["kind"] == "step"]
    assert done == list(range(1, STEPS + 11))


# Refused


@pytest.fixture(scope="module")
def single(home: Path) -> Path:
    """Return a run of a few steps on one rank."""
    out = home / "single"
    assert train(out, *OPTIONS, "--steps", "6", "--checkpoint-every", "2", "--keep", "3") == 0
    return out


@pytest.fixture
def copied(single: Path, tmp_path: Path) -> Path:
    """Return a copy that a test may change."""
    return copy_of(single, tmp_path / "copied")


def copy_of(run: Path, place: Path) -> Path:
    """Copy a run, without what is being removed from it at this moment."""
    return Path(shutil.copytree(run, place, ignore=shutil.ignore_patterns(".retired-*")))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--resume", "never"], ["already contains a run", "--resume auto"]),
        (
            ["--scheme", "dense", "--density", "1.0"],
            [
                "saved with scheme 'exdyna'",
                "this is scheme 'dense'",
                "holds a run with scheme exdyna, and this one has scheme",
                "choose another --out, or continue that run with --config",
            ],
        ),
        (
            ["--model", "tiny:wide"],
            [
                "is of another model",
                "body.0.weight [16, 12]",
                "body.0.weight [17, 12]",
                "a run with model tiny:model",
                "this one has model tiny:wide; choose another --out",
            ],
        ),
        (
            ["--codec", "int8"],
            ["a run with codec by default, and this one has codec int8; choose another --out", "saved with codec='fp32'"],
        ),
        (["--option", "scorer=average"], ["saved with scorer='magnitude', this is scorer='average'; choose another --out"]),
        (["--resume", "/nowhere"], ["there is no directory /nowhere"]),
        (["--momentum", "0.5"], ["was written with momentum 0.9, this run has 0.5", "--momentum 0.9", "--resume force"]),
        (["--weight-decay", "0.5"], ["with weight_decay 0.01, this run has 0.5", "--weight-decay 0.01"]),
        (["--seed", "4", "--momentum", "0.5"], ["with seed 3, this run has 4", "--seed 3"]),
        (["--batch-size", "1000"], ["a step needs 2000 examples, the data has 200", "--batch-size"]),
    ],
    ids=["never", "scheme", "model", "codec", "option", "nowhere", "momentum", "weight_decay", "seed", "batch"],
)
def test_refused(copied: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: list[str]) -> None:
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    given = [*OPTIONS, "--steps", "9", *options]
    if "--scheme" in options:  # density warm-up is no part of the dense scheme
        given += ["--density-warmup", "0"]
    assert train(copied, *given) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said
    assert {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()} == before


def test_a_run_says_where_it_goes_on_and_when_it_is_finished(copied: Path) -> None:
    def events() -> list[tuple[str, str]]:
        return [(line["event"], line["text"]) for line in metrics(copied) if line["kind"] == "event"]

    assert events()[0][0] == "start"
    config = (copied / "config.toml").read_bytes()
    path = copied / "checkpoints" / "step-00000006"
    assert train(copied, *OPTIONS, "--steps", "6") == 0
    said = f"this run is complete at step 6, {path}; to train on, raise --epochs or --steps"
    assert ("finished", said) in events()
    assert (copied / "config.toml").read_bytes() == config
    assert train(copied, *OPTIONS, "--steps", "8") == 0
    (resumed,) = [text for event, text in events() if event == "resume"]
    assert re.fullmatch(rf"1 ranks, [0-9,]+ parameters, from step 6, {path}", resumed)


def test_the_result_of_drift_is_the_global_weights_which_are_evaluated(tmp_path: Path) -> None:
    """Training does not synchronize at its end, so that it can go on to the bits of a run that was longer from the start."""
    options = ["--batch-size", "8", "--scheme", "drift", "--density", "0.05"]
    assert train(tmp_path / "short", *options, "--steps", "3") == 0
    assert train(tmp_path / "short", *options, "--steps", "6") == 0
    assert train(tmp_path / "long", *options, "--steps", "6") == 0
    short, long = (read_model(newest(tmp_path / name)).tensors for name in ("short", "long"))
    assert all(torch.equal(short[name], long[name]) for name in long)
    lines = metrics(tmp_path / "long")
    (end,) = [line["text"] for line in lines if line.get("event") == "end"]
    assert end.endswith("the result is the global weights, which were evaluated and which mpisparse export writes")
    model, data, task = build("digits-cnn", None, seed=0)
    model.load_state_dict(long)
    sync = mpisparse.GradientSync(model, scheme="dense")
    loss, metric = evaluate(model, data.test, task, sync, 0)
    sync.close()
    (judged,) = [line for line in lines if line["kind"] == "eval" and line["data"] == "test"]
    assert (judged["loss"], judged["metric"]) == (loss, metric)


def optimizer_group(out: Path) -> dict[str, Any]:
    """Return the optimizer's settings in a run's newest checkpoint."""
    manifest = store.read_manifest(newest(out))
    arrays: h5file.Arrays = {}
    text = ""
    for record in manifest.files:
        if record.name.startswith("shared"):
            own, texts = h5file.read_file(newest(out) / record.name, record)
            arrays, text = arrays | own, texts.get("state", text)
    (group,) = tree.unflatten(text, arrays)["optimizer"]["param_groups"]
    return dict(group)


def said_of_settings(out: Path) -> list[str]:
    return [line["text"] for line in metrics(out) if line.get("event") == "settings"]


def test_a_change_of_scheme_auto_is_an_event(tmp_path: Path) -> None:
    options = ["--model", "tiny:model", "--data", "tiny:data", "--batch-size", "4", "--steps", "4"]
    assert train(tmp_path / "first", *options) == 0
    log = (tmp_path / "first" / "choices.jsonl").read_text()
    (tmp_path / "log").write_text(log + '{"step": 2, "candidate": "dense int8"}\n')
    assert train(tmp_path / "second", *options, "--option", f"deterministic={tmp_path / 'log'}") == 0
    told = [line for line in metrics(tmp_path / "second") if line["kind"] == "event" and line["event"] == "exchange"]
    assert [line["text"] for line in told] == ["dense int8 instead of dense fp32"]


@pytest.mark.parametrize(("setting", "before", "now"), [("momentum", 0.9, 0.0), ("weight_decay", 0.01, 0.5)])
def test_forced_settings_of_the_optimizer_hold(
    copied: Path, tmp_path: Path, setting: str, before: float, now: float
) -> None:
    options = [*OPTIONS, "--steps", "7", f"--{setting.replace('_', '-')}", str(now)]
    assert train(copied, *options, "--resume", "force") == 0
    assert optimizer_group(copied)[setting] == now
    assert optimizer_group(copied)["nesterov"] == (setting != "momentum" or now > 0)
    note = f"from step 6 on: {setting} {now}, before {before}"
    assert said_of_settings(copied) == [note]
    config = (copied / "config.toml").read_text()
    assert config.startswith(f"# {note}\n")
    assert f"\n{setting} = {now}\n" in config
    unforced = copy_of(copied, tmp_path / "unforced")
    assert train(unforced, *options) == 0, "from then on they are the run's own"
    assert (unforced / "config.toml").read_text().startswith(f"# {note}\n")
    assert train(unforced, *OPTIONS, "--steps", "7") == 2
    forced = losses_and_weights(copied)
    shutil.rmtree(newest(copied))
    assert train(copied, *OPTIONS, "--steps", "7") == 0
    loss, weights = losses_and_weights(copied)
    assert (loss == forced[0], weights != forced[1]) == (True, True), "the forced value changed the step and nothing else"


def losses_and_weights(out: Path) -> tuple[float, bytes]:
    """Return the loss of the last step, before its update, and the newest checkpoint's replicated state."""
    loss = [line["loss"]["mean"] for line in metrics(out) if line["kind"] == "step"][-1]
    return loss, b"".join(contents(newest(out))["shared"][1].values())


def test_a_forced_seed_holds_and_is_resumed_to_the_last_bit(copied: Path, tmp_path: Path) -> None:
    options = [*OPTIONS, "--seed", "4", "--steps", "8", "--checkpoint-every", "7", "--keep", "9"]
    parts, same = tmp_path / "parts", tmp_path / "same"
    copy_of(copied, same)
    assert train(copied, *options, "--resume", "force") == 0
    assert said_of_settings(copied) == [
        "from step 6 on: seed 4, before 3",
        "from step 6 on: different validation data, some of which was trained on before",
    ]
    shutil.rmtree(newest(copy_of(copied, parts)))
    assert train(parts, *options) == 0
    assert_same_end(parts, copied, steps=8)
    assert train(same, *OPTIONS, "--steps", "8", "--resume", "force") == 0
    assert said_of_settings(same) == [], "nothing is forced that is the same"
    ended, other = contents(newest(same)), contents(newest(copied))
    assert ended["rank-0000.h5"][1]["random/torch"] != other["rank-0000.h5"][1]["random/torch"], (
        "the generators were seeded anew"
    )
    assert losses_and_weights(same)[0] != losses_and_weights(copied)[0]


def test_what_takes_effect_anyway_is_said_and_not_refused(copied: Path) -> None:
    assert train(copied, *OPTIONS, "--steps", "7", "--lr", "0.01", "--schedule", "constant") == 0
    assert said_of_settings(copied) == [
        "from step 6 on: lr 0.01, before 0.05",
        'from step 6 on: schedule "constant", before "cosine"',
    ]
    assert [line["lr"] for line in metrics(copied) if line["kind"] == "step"][-1] == 0.01
    assert train(copied, *OPTIONS, "--steps", "8") == 0
    notes = [line for line in (copied / "config.toml").read_text().splitlines() if line.startswith("#")]
    assert len(notes) == 4, "what was changed before stays"


def test_a_run_that_has_ended_takes_no_new_settings(copied: Path) -> None:
    before = (copied / "config.toml").read_text()
    assert train(copied, *OPTIONS, "--steps", "6", "--momentum", "0.5", "--resume", "force") == 0
    assert (copied / "config.toml").read_text() == before
    assert said_of_settings(copied) == []
    assert train(copied, *OPTIONS, "--steps", "7") == 0, "and goes on as it was"


def test_a_forced_split_is_said(copied: Path) -> None:
    assert train(copied, *OPTIONS, "--steps", "7", "--validation", "0.2", "--resume", "force") == 0
    assert "from step 6 on: different validation data, some of which was trained on before" in said_of_settings(copied)


def test_a_new_run_beside_old_checkpoints_is_refused(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied / "metrics.jsonl").unlink()
    assert train(copied, *OPTIONS, "--steps", "3", "--resume", "never") == 2
    assert "already contains a run" in capsys.readouterr().err


def test_a_stop_without_its_checkpoint_does_not_promise_its_step(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: RunCheckpoints, *_: Any, wait: bool) -> None:
        self.failed = True

    monkeypatch.setattr(RunCheckpoints, "save", fail)
    monkeypatch.setattr(Trainer, "_one_step", lambda self: True)
    assert train(tmp_path / "run", *OPTIONS, "--steps", "9") == 1
    assert "to continue from the last checkpoint that was written" in capsys.readouterr().out


def test_who_reads_no_more_ends_nothing(home: Path, tmp_path: Path) -> None:
    """As in `mpisparse train ... | head -1`."""
    command = [sys.executable, "-m", "mpisparse", "train", "--out", "run", *OPTIONS, "--steps", "40", "--log-every", "1"]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(home)}
    run = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE)
    assert run.stdout is not None
    run.stdout.readline()
    run.stdout.close()
    assert run.wait(TIMEOUT) == 0
    assert newest(tmp_path / "run").name == store.name_of(40)


def test_another_runs_checkpoint_can_be_forced_too(single: Path, tmp_path: Path) -> None:
    options = [*OPTIONS, "--steps", "7", "--momentum", "0.5"]
    assert train(tmp_path / "new", *options, "--resume", str(single)) == 2
    assert train(tmp_path / "new", *options, "--resume", f"force:{single}") == 0
    assert optimizer_group(tmp_path / "new")["momentum"] == 0.5


def test_checkpoints_of_versions_that_stored_no_settings_are_compared_too(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without(*args: Any, extra: dict[str, Any], **kwargs: Any) -> Any:
        return begin_save(*args, extra={k: v for k, v in extra.items() if k not in ("settings", "changes")}, **kwargs)

    begin_save = checkpoint.begin_save
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "begin_save", without)
        assert train(tmp_path, *OPTIONS, "--steps", "2") == 0
    for setting, value in (("momentum", "0.5"), ("weight-decay", "0.5"), ("seed", "4")):
        assert train(tmp_path, *OPTIONS, "--steps", "3", f"--{setting}", value) == 2
        assert f"was written with {setting.replace('-', '_')} " in capsys.readouterr().err
    assert train(tmp_path, *OPTIONS, "--steps", "3", "--momentum", "0.5", "--seed", "4", "--resume", "force") == 0
    assert len(said_of_settings(tmp_path)) == 3, "the seed, the momentum, and what the seed means for validation"


# Going well


def test_a_run_resumed_from_any_directory_ends_alike(single: Path, tmp_path: Path) -> None:
    longer = tmp_path / "longer"
    assert train(longer, *OPTIONS, "--steps", "6", "--resume", str(single)) == 0
    assert [line["event"] for line in metrics(longer) if line["kind"] == "event"] == ["finished", "end"]
    assert not store.found(longer / "checkpoints"), "nothing was left to do"


def test_config_of_a_run_reproduces_it(single: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    assert train(again, "--config", str(single / "config.toml")) == 0
    assert_same_end(again, single, steps=6)
    other = tmp_path / "other"
    assert train(other, "--config", str(single / "config.toml"), "--seed", "4") == 0
    assert contents(newest(other)) != contents(newest(single))


def test_stops_early_at_the_target(home: Path, tmp_path: Path) -> None:
    assert train(tmp_path / "hit", *OPTIONS, "--steps", "9", "--eval-every", "4", "--target", "0.0") == 0
    lines = metrics(tmp_path / "hit")
    assert [line["event"] for line in lines if line["kind"] == "event"] == ["start", "checkpoint", "stop", "end"]
    assert newest(tmp_path / "hit").name == store.name_of(4)
    assert train(tmp_path / "missed", *OPTIONS, "--steps", "9", "--eval-every", "4", "--target", "1.01") == 0
    assert newest(tmp_path / "missed").name == store.name_of(9)


def test_metrics_tell_what_was_set(single: Path, home: Path) -> None:
    steps = [line for line in metrics(single) if line["kind"] == "step"]
    lr = [0.05 * (i + 1) / 5 for i in range(5)]
    assert [line["lr"] for line in steps][:5] == pytest.approx(lr)
    assert steps[0]["set_density"] == pytest.approx(0.5, rel=0.02)
    assert steps[5]["set_density"] == pytest.approx(0.5 * 0.1 ** (5 / 20), rel=0.02)
    assert all(set(line["loss"]) == {"min", "mean", "max"} for line in steps)
    assert all(line["seconds"]["compute"]["mean"] > 0 for line in steps)
    assert all(a["time"] < b["time"] for a, b in itertools.pairwise(steps))


@pytest.mark.filterwarnings("ignore:an adaptive optimizer")
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_resume_of_other_optimizers_and_backward_path(home: Path, tmp_path: Path, optimizer: str) -> None:
    options = ["--model", "tiny:model", "--data", "tiny:data", "--batch-size", "8", "--density", "0.1"]
    options += ["--optimizer", optimizer, "--lr", "0.01", "--option", "accumulate=backward", "--codec", "int8"]
    assert train(tmp_path / "whole", *options, "--steps", "12") == 0
    assert train(tmp_path / "parts", *options, "--steps", "5") == 0
    assert train(tmp_path / "parts", *options, "--steps", "12") == 0
    assert_same_end(tmp_path / "parts", tmp_path / "whole", steps=12)


@pytest.mark.filterwarnings("ignore:an adaptive optimizer")
def test_resume_of_speculation_and_what_its_metrics_tell(home: Path, tmp_path: Path) -> None:
    options = ["--model", "tiny:model", "--data", "tiny:data", "--batch-size", "8", "--scheme", "speculative"]
    options += ["--density", "0.1", "--option", "probe_every=4", "--option", "granularity=learned", "--optimizer", "adam"]
    assert train(tmp_path / "whole", *options, "--steps", "24") == 0
    assert train(tmp_path / "parts", *options, "--steps", "13") == 0
    assert train(tmp_path / "parts", *options, "--steps", "24") == 0
    assert_same_end(tmp_path / "parts", tmp_path / "whole", steps=24)
    steps = [line for line in metrics(tmp_path / "whole") if line["kind"] == "step"]
    ahead = [line["speculation"] for line in steps]
    assert all(a["drift_after"] <= 1e-3 and a["updated"] > 0 and a["probe_loss"] > 0 for a in ahead)
    assert len({a["probe_loss"] for a in ahead}) == 6
    assert len({a["fine"] for a in ahead}) > 1
    assert [line["density"] > 0 for line in steps] == [False] + [True] * 23


def test_what_is_not_finite_is_null_in_metrics(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    nothing = {"min": 0.5, "mean": math.inf, "max": math.nan}
    file.write("step", step=1, loss=nothing, threshold=-math.inf, workloads=(3, 4), details={"ranking": math.nan})
    file.close()
    (line,) = metrics(tmp_path)
    assert line["loss"] == {"min": 0.5, "mean": None, "max": None}
    assert (line["threshold"], line["workloads"], line["details"]) == (None, [3, 4], {"ranking": None})
    (run,) = read_runs([tmp_path])
    assert run.steps["loss.min"].tolist() == [0.5]
    assert math.isnan(run.steps["loss.mean"][0])
    assert math.isnan(run.steps["threshold"][0])


# Looked at


def test_inspect_tells_and_verifies(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(copied)]) == 0
    told = capsys.readouterr().out
    for words in ("step        6", "exdyna on 1 ranks", "body.1.running_mean [16] float32", "rank-0000.h5", "use --verify"):
        assert words in told
    assert told.index("step        6") < told.index("step        2")
    assert main(["inspect", "--verify", str(copied / "checkpoints")]) == 0
    assert capsys.readouterr().out.count("all verified") == 3
    file = newest(copied) / "rank-0000.h5"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    assert main(["inspect", "--verify", str(copied)]) == 1
    told = capsys.readouterr().out
    assert told.count("DAMAGED") == 1
    assert told.count("all verified") == 2
    assert main(["inspect", "--verify", "--json", str(copied / "checkpoints" / store.name_of(4))]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["step"], record["ranks"], record["verified"]) == (4, 1, True)
    assert any("float32" in kind for kind in record["files"]["rank-0000.h5"]["arrays"].values())
    assert main(["inspect", str(copied.parent)]) == 2


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(copied: Path, single: Path) -> None:
    (newest(copied) / "rank-0000.h5").write_bytes(b"no HDF5")
    with pytest.warns(UserWarning, match="step-00000006 is not used"):
        assert train(copied, *OPTIONS, "--steps", "6") == 0
    assert_same_end(copied, single, steps=6)
