"""The parts of a run: settings, schedules, the order of data, metrics, signals, the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpisparse.errors import ConfigurationError
from mpisparse.runtime.board import Board
from mpisparse.runtime.cli import main, parser
from mpisparse.runtime.flags import resolve
from mpisparse.runtime.metrics import MetricsFile, spread, write_whole
from mpisparse.runtime.output import SteadyOutput
from mpisparse.runtime.run_state import RunState
from mpisparse.runtime.schedule import Order, Position, lr_factor
from mpisparse.runtime.scheme_losses import SchemeLosses
from mpisparse.runtime.settings import FOR_AUTO, OPTIMIZERS, SCHEDULES, Settings
from mpisparse.runtime.settings_file import read_file, to_toml
from mpisparse.runtime.workloads import MODELS, build, hold_out
from mpisparse.schemes import configure, find_scheme
from mpisparse.schemes.falling import density_at

COUNTS = ("epochs", "steps", "batch_size", "accumulation", "eval_every", "log_every", "checkpoint_every", "keep")


# Settings


def parse(*words: str) -> Settings:
    """Parse settings from a command line."""
    return resolve(vars(parser().parse_args(["train", *words])))


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    return str(path)


def test_defaults_are_the_defaults() -> None:
    assert parse() == Settings()


@pytest.mark.parametrize(
    ("words", "scheme"),
    [
        ("", "auto"), ("--option slowdown=1.3 --clip 1", "auto"), ("--option weights=false", "auto"),
        ("--option every=1", "auto"), ("--option hierarchy=flat", "auto"), ("--option hierarchy=node", "exdyna"),
        ("--density 0.01", "exdyna"), ("--codec int8", "exdyna"),
        ("--density-warmup 5", "exdyna"), ("--option overlap=true", "exdyna"), ("--device cuda", "exdyna"),
        ("--on-failure shrink", "exdyna"), ("--scheme drift", "drift"), ("--scheme auto --density 0.01", "auto"),
    ],
)  # fmt: skip
def test_auto_is_the_default_unless_something_is_set_that_it_would_choose(words: str, scheme: str) -> None:
    settings = parse(*words.split())
    assert settings.scheme == scheme
    assert Settings(**dataclasses.asdict(settings)) == settings
    names = set(FOR_AUTO)
    assert names < {field.name for field in dataclasses.fields(find_scheme("auto"))}


def test_a_file_of_settings_leaves_the_default_to_the_flags_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(to_toml(parse("--lr", "0.3")), encoding="utf-8")
    assert parse("--config", str(path)).scheme == "auto"
    assert parse("--config", str(path), "--density", "0.01").scheme == "exdyna", "as without the file"
    path.write_text(to_toml(parse("--scheme", "auto", "--density", "0.01")), encoding="utf-8")
    assert parse("--config", str(path)).scheme == "auto", "chosen there"


def test_every_setting_has_a_flag_and_a_line_of_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(["train", "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    for entry in dataclasses.fields(Settings):
        flag = {"options": "--option", "imports": "--import"}.get(entry.name, f"--{entry.name.replace('_', '-')}")
        assert flag in told


def test_flags_give_every_kind_of_value() -> None:
    settings = parse(
        *("--batch-size", "7", "--lr", "1e-3", "--bf16", "--drop-at", "0.2", "0.4", "--clip", "2", "--data", "digits"),
        *("--option", "accumulate=step", "--option", "segment_nbytes=64", "--option", "gamma=0.5", "--option", "x=a=b"),
    )
    assert (settings.batch_size, settings.lr, settings.bf16, settings.clip) == (7, 0.001, True, 2.0)
    assert settings.drop_at == (0.2, 0.4)
    assert settings.options == {"accumulate": "step", "segment_nbytes": 64, "gamma": 0.5, "x": "a=b"}


def test_flags_override_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, 'lr = 1\nseed = 4\nepochs = 3\nbf16 = true\n[options]\naccumulate = "step"\nsegment_nbytes = 8\n')
    settings = parse("--config", file, "--seed", "5", "--steps", "9", "--no-bf16", "--option", "segment_nbytes=16")
    assert (settings.lr, settings.seed, settings.epochs, settings.steps, settings.bf16) == (1.0, 5, None, 9, False)
    assert settings.options == {"accumulate": "step", "segment_nbytes": 16}
    assert isinstance(settings.lr, float)
    assert parse("--config", file).epochs == 3


FINITE = st.floats(1e-12, 1e6)
PATHS = st.text(min_size=1, max_size=60).filter(lambda text: "\0" not in text)
SETTINGS = st.builds(
    Settings,
    model=st.sampled_from(list(MODELS)) | PATHS.map(lambda name: f"{name}:factory"),
    data=st.none() | PATHS,
    out=PATHS,
    steps=st.none() | st.integers(1, 2**53 - 1),
    batch_size=st.integers(1, 2**31),
    seed=st.integers(0, 2**40 - 1),
    optimizer=st.sampled_from(OPTIMIZERS),
    schedule=st.sampled_from(SCHEDULES),
    lr=FINITE,
    weight_decay=FINITE | st.just(0.0),
    drop_at=st.lists(st.floats(0, 1), max_size=3).map(tuple),
    clip=st.none() | FINITE | st.just(math.inf),
    target=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    bf16=st.booleans(),
    density=st.none() | st.floats(1e-9, 1.0),
    options=st.dictionaries(
        st.text(min_size=7), st.booleans() | st.integers(-(2**62), 2**62) | FINITE | st.text(), max_size=3
    ),
)


@given(SETTINGS)
def test_written_settings_are_read_as_the_same(tmp_path_factory: pytest.TempPathFactory, settings: Settings) -> None:
    path = tmp_path_factory.getbasetemp() / "round.toml"
    path.write_text(to_toml(settings), encoding="utf-8")
    again = Settings(**read_file(path))
    assert again == settings
    assert [type(v) for v in dataclasses.astuple(again)] == [type(v) for v in dataclasses.astuple(settings)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batchsize = 3", "unknown setting 'batchsize'; did you mean 'batch_size'?"),
        ('batch_size = "3"', "batch_size must be of type int, got '3'"),
        ("batch_size = 3.5", "batch_size must be of type int, got 3.5"),
        ("batch_size = true", "batch_size must be of type int, got True"),
        ('lr = "fast"', "lr must be of type float"),
        ("lr = true", "lr must be of type float"),
        ("bf16 = 1", "bf16 must be of type bool"),
        ("model = 3", "model must be of type str"),
        ("options = 3", "options must be of type dict"),
        ("drop_at = 0.5", "drop_at must be of type tuple"),
        ('drop_at = ["half"]', "drop_at"),
        ("lr = ", "is not a TOML file"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigurationError) as caught:
        parse("--config", file)
    assert words in str(caught.value)
    assert file in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read the settings in .*nowhere\.toml"):
        parse("--config", str(tmp_path / "nowhere.toml"))
    with pytest.raises(ConfigurationError, match="cannot read"):
        parse("--config", str(tmp_path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="is not a TOML file"):
        parse("--config", str(tmp_path / "binary"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"optimizer": "sdg"}, "unknown optimizer 'sdg'; did you mean 'sgd'?"),
        ({"scheme": "exdina"}, "unknown scheme 'exdina'; did you mean 'exdyna'?"),
        ({"codec": "int9"}, "unknown codec 'int9'; did you mean 'int8'?"),
        ({"driver": "mpi"}, "unknown driver 'mpi'; did you mean 'mpio'?"),
        ({"driver": "mpio", "background": True}, "driver mpio does not write in the background"),
        ({"model": "vgg17"}, "unknown model 'vgg17'; did you mean 'vgg1"),
        ({"options": {"density": 0.5}}, "density is not an option of a scheme; pass --density"),
        ({"options": {"comm": 5}}, "comm is not an option of a scheme"),
        ({"density": "abc"}, "density must be in (0, 1], got 'abc'"),
        ({"seed": 2**64}, "seed must be below 2^40"),
        ({"schedule": "cosin"}, "unknown schedule 'cosin'; did you mean 'cosine'?"),
        *[({name: 0}, f"{name} must be at least 1, got 0") for name in COUNTS],
        *[({name: -1}, f"{name} must be at least 0, got -1") for name in ("warmup", "density_warmup", "seed")],
        *[({name: -0.5}, f"{name} must be at least 0, got -0.5") for name in ("lr", "momentum", "weight_decay")],
        *[({name: math.nan}, f"{name} must be at least 0, got nan") for name in ("lr", "momentum", "weight_decay")],
        ({"epochs": 1, "steps": 1}, "got both epochs and steps"),
        *[({"density": value}, "density must be in (0, 1]") for value in (0.0, -0.1, 1.5, math.nan)],
        *[({"density_from": value}, "density_from must be in (0, 1]") for value in (0.0, -0.1, 1.5, math.nan)],
        ({"clip": 0.0}, "clip must be above 0, got 0.0"),
        ({"clip": math.nan}, "clip must be above 0"),
        ({"clip": 1.0, "options": {"accumulate": "backward"}}, "clip has no effect with accumulate"),
    ],
    ids=str,
)
def test_values_that_cannot_be_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Settings(**given)
    assert words in str(caught.value)


LONG = "x" * 256
WHOLE = (*COUNTS, "warmup", "density_warmup")
SHARES = "drop_at must be fractions of the run in [0, 1]"
ABSURD: list[tuple[str, Any, str]] = [
    *((n, v, f"{n} must be at") for n in ("lr", "momentum", "weight_decay", "stop_before") for v in (math.nan, -math.inf)),
    *((n, v, f"{n} must be at most") for n in ("lr", "weight_decay", "stop_before") for v in (math.inf, 1e30)),
    *(("momentum", v, "momentum must be below 1") for v in (1.0, 5.0, 1e300, math.inf)),
    *(("beta2", v, "beta2 must be below 1") for v in (1.0, math.inf)),
    *(("target", v, "target must be finite") for v in (math.nan, math.inf, -math.inf)),
    *(("drop_at", (0.5, v), SHARES) for v in (math.nan, math.inf, -0.1, 50.0)),
    *((n, v, f"{n} must be below 2^53") for n in WHOLE for v in (2**53, 10**4000)),
    *((n, "", f"{n} must not be empty") for n in ("out", "data", "resume")),
    *((n, f"a{chr(0)}b:f", f"{n} must not contain NUL characters") for n in ("out", "data", "resume", "model")),
    *((n, v, f"{n} is too long") for n in ("out", "data", "resume") for v in (LONG, "y/" * 3000, "é" * 200)),
    ("out", "run\udcff", "out must be text in UTF-8"),
]


def in_toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(in_toml, value))}]"
    return json.dumps(value) if isinstance(value, str) else repr(value)


@pytest.mark.parametrize(("name", "value", "words"), ABSURD, ids=lambda v: str(v)[:20])
def test_absurd_values_are_refused_by_flag_and_by_file(tmp_path: Path, name: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        Settings(**{name: value})
    if "\udcff" not in str(value):  # which TOML cannot say
        with pytest.raises(ConfigurationError, match=re.escape(words)):
            parse("--config", write(tmp_path, f"{name} = {in_toml(value)}"))
    given = [f"{v}" for v in (value if isinstance(value, tuple) else (value,))]
    if not any(text.startswith("-") for text in given):  # argparse takes those for flags
        with pytest.raises(ConfigurationError, match=re.escape(words)):
            parse(f"--{name.replace('_', '-')}", *given)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"options = {'[' * 20_000}{']' * 20_000}", "nested too deep"),
        (f"options = {'{a=' * 20_000}1{'}' * 20_000}", "nested too deep"),
        (f"{'a.' * 20_000}b = 1", "unknown setting 'a'"),
        (f"lr = {'9' * 400}", "lr is too large"),
        (f"drop_at = [{'9' * 400}]", "drop_at is too large"),
        (f"steps = {'9' * 5000}", "is not a TOML file"),
        (f"steps = {'9' * 40}", "steps must be below 2^53, got far more"),
        ("drop_at = [true]", "drop_at must be of type tuple"),
    ],
    ids=lambda text: text[:12],
)
def test_odd_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        parse("--config", write(tmp_path, text))


def test_odd_options_and_counts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationError, match="option x is nested too deep"):
        parse("--option", f"x={'[' * 200_000}")
    assert parse("--option", f"x={'9' * 5000}").options == {"x": "9" * 5000}
    for count in ("1e400", "inf", "nan", "1e-400", "1e17", "9" * 5000):
        with pytest.raises(SystemExit):
            parser().parse_args(["bench", "kernels", "--elements", count])
        assert "expected a whole number >= 1 and below 2^53" in capsys.readouterr().err


def test_overlong_paths_of_other_commands_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["inspect", LONG], ["report", LONG], ["train", "--config", LONG], ["inspect", "step-" + LONG]):
        assert main(words) == 2, words
        assert "File name too long" in capsys.readouterr().err


def test_an_option_that_is_none_is_not_written() -> None:
    assert "blocks" not in to_toml(parse("--option", "blocks=null"))


@pytest.mark.parametrize("pair", ["accumulate", "=3", ""])
def test_an_option_needs_a_name_and_a_value(pair: str) -> None:
    with pytest.raises(ConfigurationError, match="NAME=VALUE"):
        parse("--option", pair)


# Schedules


def test_warmup_rises_evenly_to_the_peak() -> None:
    factors = [lr_factor(step, 100, "constant", 4, ()) for step in range(6)]
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert lr_factor(0, 100, "constant", 0, ()) == 1.0


def test_cosine_falls_from_the_peak_towards_zero() -> None:
    factors = [lr_factor(step, 110, "cosine", 10, ()) for step in range(10, 111)]
    assert factors[0] == 1.0
    assert factors[50] == pytest.approx(0.5)
    assert factors[100] == pytest.approx(0.0, abs=1e-12)
    assert all(a > b for a, b in itertools.pairwise(factors))
    assert lr_factor(500, 110, "cosine", 10, ()) == pytest.approx(0.0, abs=1e-12), "a run that goes on past its end"
    assert lr_factor(3, 3, "cosine", 3, ()) == 1.0, "nothing but warm-up"


def test_step_falls_to_a_tenth_at_each_point() -> None:
    factors = [lr_factor(step, 100, "step", 0, (0.5, 0.75)) for step in (0, 49, 50, 74, 75, 99)]
    assert factors == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_density_falls_geometrically_to_the_set_one() -> None:
    densities = [density_at(step, 0.01, 1.0, 10) for step in range(12)]
    assert densities[0] == 1.0
    assert densities[5] == pytest.approx(0.1)
    assert densities[10:] == [0.01, 0.01]
    ratios = [b / a for a, b in itertools.pairwise(densities[:11])]
    assert ratios == pytest.approx([ratios[0]] * 10)
    assert density_at(0, 0.5, 0.25, 10) == 0.5, "warm-up never begins below the set one"
    assert density_at(0, 0.5, 1.0, 0) == 0.5


# The order of data


def walk(order: Order, position: Position, share: int, size: int, batches: int) -> list[list[int]]:
    """Return the global batches that `size` ranks take together; advances the position."""
    taken = []
    for _ in range(batches):
        places = [Position(position.epoch, position.offset) for _ in range(size)]
        parts = [order.take(place, share, rank, size) for rank, place in enumerate(places)]
        assert len({(place.epoch, place.offset) for place in places}) == 1
        assert {epoch for _, epoch in parts} == {places[0].epoch}
        position.epoch, position.offset = places[0].epoch, places[0].offset
        taken.append([int(i) for part, _ in parts for i in part])
    return taken


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 4), st.integers(0, 3))
def test_an_epoch_has_each_example_at_most_once(count: int, share: int, size: int, seed: int) -> None:
    order = Order(count, seed)
    batches = order.steps_per_epoch(share, size)
    if batches == 0:
        return
    position = Position()
    epochs = []
    for epoch in range(3):
        taken = [i for batch in walk(order, position, share, size, batches) for i in batch]
        assert position == Position(epoch, batches * share * size)
        assert len(set(taken)) == len(taken) == batches * share * size
        assert set(taken) <= set(range(count))
        epochs.append(taken)
    if count % (share * size) == 0:
        assert sorted(epochs[0]) == list(range(count))
    if len(epochs[0]) > 12:
        assert epochs[0] != epochs[1], "epochs are shuffled apart"


def test_the_order_is_the_same_for_any_number_of_ranks() -> None:
    def sequence(share: int, size: int) -> list[int]:
        return [i for batch in walk(Order(24, 7), Position(), share, size, 2 * 24 // (share * size)) for i in batch]

    assert sequence(12, 1) == sequence(6, 2) == sequence(4, 3) == sequence(3, 4)
    assert sequence(12, 1) != [i for batch in walk(Order(24, 8), Position(), 12, 1, 4) for i in batch]


def test_a_position_goes_on_with_another_number_of_ranks() -> None:
    position = Position()
    order = Order(48, 1)
    taken = walk(order, position, 3, 4, 2)  # 24 by four ranks
    taken += walk(Order(48, 1), position, 3, 2, 2)  # 12 by two, in a new process
    taken += walk(Order(48, 1), position, 3, 1, 4)  # 12 by one
    assert sorted(i for batch in taken for i in batch) == list(range(48))
    assert position == Position(0, 48)
    walk(order, position, 3, 1, 1)
    assert position == Position(1, 3)


# Metrics


def test_metrics_are_lines_and_an_unfinished_one_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    first.write("step", step=1, loss=0.5)
    assert json.loads(path.read_text()) == {"kind": "step", "step": 1, "loss": 0.5}, "a line is there at once"
    first.close()
    with path.open("a") as file:
        file.write('{"kind": "step", "st')
    second = MetricsFile(path)
    second.write("eval", step=2)
    second.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize("left", ["", '{"kind'])
def test_a_file_without_a_whole_line_begins_anew(tmp_path: Path, left: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(left)
    metrics = MetricsFile(path)
    metrics.write("step", step=1)
    metrics.close()
    assert json.loads(path.read_text())["step"] == 1


class Full:
    """A file on a disk that fills up: only the first bytes of a line are written."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self.file.write(data[: self.room])
        self.room -= written
        return int(written)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def test_metrics_without_room_are_dropped_with_one_warning_and_go_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.write("step", step=1)
    real = metrics._file
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for room, first in ((0, 2), (7, 4)):
            metrics._file = Full(real, room)  # type: ignore[assignment]
            metrics.write("step", step=first, time=0.5)
            metrics.write("step", step=first + 1)
            assert path.read_bytes().endswith(b"}\n"), "nothing of a line that did not fit"
            metrics._file = real
            metrics.write("step", step=10 * first, time=1.5)
    assert [str(each.message) for each in told] == [
        f"{path}: No space left on device; metrics are dropped until they can be written"
    ]
    metrics.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    gap = {"kind": "event", "time": 1.5, "event": "metrics dropped", "text": "2: No space left on device"}
    assert [line for line in lines if line["kind"] == "event"] == [{**gap, "step": 20}, {**gap, "step": 40}]
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 20, 40]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.toml"
    write_whole(path, "lr = 1\n")

    def half(self: Path, text: str, encoding: str) -> int:
        with self.open("w") as file:
            file.write(text[:2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", half)
        with pytest.raises(OSError, match="No space left"):
            write_whole(path, "lr = 2\n")
    assert path.read_text() == "lr = 1\n"
    assert [p.name for p in tmp_path.iterdir()] == ["config.toml"]


def test_tensorboard_events_without_room_are_dropped_with_one_warning_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    board = Board(tmp_path)
    first = board._writer
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in (1, 2):
            with monkeypatch.context() as patch:
                patch.setattr(type(first), "add_scalar", no_room)
                board.add({"loss": 0.5}, step)
    assert len([each for each in told if "events are dropped until there is room" in str(each.message)]) == 1
    board.add({"loss": 0.5}, 3)
    assert board._writer is not None
    assert board._writer is not first
    board.close()


PRINTING = """
import sys
from pathlib import Path
from mpisparse.runtime.output import RankOutput
with RankOutput(0, None) as output:
    for _ in range(3000):
        print("a line of a run that goes on", flush=True)
    print("the same of errors", file=sys.stderr)
sys.stderr.write("done\\n")
"""


def test_output_to_a_full_disk_does_not_end_a_run() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", PRINTING], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("No space left on device; output is dropped until there is room") == 1
    assert done.stderr.endswith("the same of errors\ndone\n")


def test_a_log_on_a_full_disk_does_not_end_a_run(tmp_path: Path) -> None:
    shown, log = io.StringIO(), open("/dev/full", "w", buffering=1)  # noqa: SIM115 - closing it fails
    output = SteadyOutput(shown, log)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(1000):
            output.write("shown and logged\n")
            output.flush()
    assert [str(each.message) for each in told] == [
        "/dev/full: No space left on device; output is dropped until there is room"
    ]
    assert shown.getvalue() == "shown and logged\n" * 1000
    with contextlib.suppress(OSError):
        log.close()


def test_spread() -> None:
    assert spread(np.array([3.0, 1.0, 2.0])) == {"min": 1.0, "mean": 2.0, "max": 3.0}


# Signals

ASKED = """
import os, signal
from mpisparse.stopping import StopRequest
stop = StopRequest()
assert not stop.asked
os.kill(os.getpid(), signal.{first})
print(f"asked: {{stop.asked}}", flush=True)
os.kill(os.getpid(), signal.{second})
print("still here", flush=True)
"""


def run_python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.mark.parametrize(("first", "second"), [("SIGUSR1", "SIGUSR1"), ("SIGTERM", "SIGUSR1"), ("SIGUSR1", "SIGTERM")])
def test_the_first_signal_asks_and_the_second_ends(first: str, second: str) -> None:
    ended = run_python(ASKED.format(first=first, second=second))
    assert ended.stdout == "asked: True\n", ended.stderr
    assert ended.returncode == -getattr(signal, second)


@pytest.mark.parametrize("names", ["USR2", "SIGUSR2", "HUP, USR2"])
def test_the_signals_that_ask_can_be_chosen(names: str) -> None:
    ended = run_python(ASKED.format(first="SIGUSR2", second="SIGTERM"), MPISPARSE_SIGNALS=names)
    assert ended.stdout == "asked: True\n", ended.stderr
    assert ended.returncode == -signal.SIGTERM


def test_a_signal_that_does_not_exist_is_refused() -> None:
    ended = run_python(
        "import sys; from mpisparse.runtime.cli import main; sys.exit(main(['train']))", MPISPARSE_SIGNALS="USR9"
    )
    assert ended.returncode == 2, ended.stderr
    assert "USR9" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_earlier_handlers_are_given_back() -> None:
    code = """
import signal
from mpisparse.stopping import StopRequest
before = signal.getsignal(signal.SIGUSR1)
stop = StopRequest()
assert signal.getsignal(signal.SIGUSR1) != before
stop.restore()
assert signal.getsignal(signal.SIGUSR1) == before
"""
    assert run_python(code).returncode == 0


# The command line, with no MPI to load

COMMAND = """
import sys
from mpisparse.runtime.cli import main
code = 0
try:
    code = main(sys.argv[1:])
except SystemExit as ended:
    code = ended.code or 0
loaded = [name for name in ("mpi4py.MPI", "torch", "h5py") if name in sys.modules]
print("loaded:", *loaded)
sys.exit(code)
"""


def run_command(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command line without an MPI library; its last line lists the heavy modules it loaded."""
    environment = {**os.environ, "MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *words], env=environment, capture_output=True, text=True, timeout=900, check=False
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--help"], "train"),
        (["train", "--help"], "--checkpoint-every"),
        (["inspect", "--help"], "--verify"),
        (["--version"], "mpisparse"),
    ],
    ids=str,
)
def test_help_needs_no_mpi(words: list[str], told: str) -> None:
    ended = run_command(*words)
    assert ended.returncode == 0, ended.stderr
    assert told in ended.stdout
    assert ended.stdout.endswith("loaded:\n")


def test_python_m_is_the_same_command() -> None:
    command = [sys.executable, "-m", "mpisparse", "train", "--batch-size", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert ended.returncode == 2
    assert "batch_size must be at least 1" in ended.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train", "--bogus", "1"], "--bogus"),
        (["train", "--batch-size", "many"], "--batch-size"),
        (["train", "--batch-size", "0"], "batch_size must be at least 1"),
        (["train", "--optimizer", "sdg"], "did you mean 'sgd'?"),
        (["train", "--config", "/nowhere.toml"], "/nowhere.toml"),
        (["train", "--density", "3"], "density must be in (0, 1]"),
        (["train", "--epochs", "1", "--steps", "1"], "epochs and steps"),
        (["frobnicate"], "frobnicate"),
        ([], "COMMAND"),
    ],
    ids=str,
)
def test_bad_options_need_no_mpi(words: list[str], told: str) -> None:
    ended = run_command(*words)
    assert ended.returncode == 2, ended.stderr
    assert told in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout == "loaded:\n"


@pytest.mark.parametrize(
    ("scheme", "options", "losses"),
    [
        ("exdyna", {}, set()),
        ("exdyna", {"scorer": "influence"}, {"probe"}),
        ("exdyna", {"scorer": "influence", "probe": False}, set()),
        ("drift", {"scorer": "predicted"}, {"validation"}),
        ("drift", {"scorer": "average"}, set()),
        ("speculative", {}, {"probe"}),
        ("speculative", {"scorer": "predicted"}, {"validation"}),
        ("predictive", {}, {"validation"}),
    ],
)
def test_a_scorer_gets_the_loss_that_it_learns_from(scheme: str, options: dict[str, Any], losses: set[str]) -> None:
    settings = Settings(scheme=scheme, options=options, model="digits-cnn")
    model, data, task = build(settings.model, settings.data, seed=0)
    data = hold_out(data, 0.1, seed=0)
    chosen = SchemeLosses(settings, model, data, task, RunState()).options()
    assert {name for name in ("probe", "validation") if chosen.get(name) is not None} == losses
    configure(scheme, **chosen)
