"""The command line: groups, choices and examples in help, suggestions, completion, and --dry-run. No MPI is started."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from mpisparse.names import SCHEMES
from mpisparse.runtime import dry_run
from mpisparse.runtime.cli import COMMANDS, EXAMPLES, main, parser
from mpisparse.runtime.flags import GROUPS, choices_of, resolve
from mpisparse.runtime.settings import Settings


def test_every_setting_is_in_one_group() -> None:
    counted = Counter(name for names in GROUPS.values() for name in names)
    assert counted == Counter(field.name for field in dataclasses.fields(Settings))


def test_help_has_groups_choices_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(f" {title}: --" in text for title in GROUPS)
    assert all(name in text for name in ("adamw", "cosine", "resnet18", *SCHEMES, "momentum-int8"))
    assert "examples: mpirun -n 4 mpisparse train" in text


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_examples_are_printed_and_valid(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    printed = capsys.readouterr().out
    for line in EXAMPLES[command]:
        assert f"\n  {line}\n" in printed
        words = shlex.split(line, comments=True)
        words = words[words.index("mpisparse") + 1 :]
        words = words[: words.index(">")] if ">" in words else words
        if "--help" not in words:
            args = parser().parse_args(words)
            if args.command == "train" and args.config is None:
                resolve(vars(args))


@pytest.mark.parametrize(
    ("words", "usage", "says"),
    [
        ("train --densty 0.1", "mpisparse train", "--densty 0.1; instead of --densty, did you mean --density?"),
        ("train --desity=0.1 --epoch-s 3", "mpisparse train", "instead of --epoch-s, did you mean --epochs?"),
        ("train --schem dense", "mpisparse train", "instead of --schem, did you mean --scheme?"),  # no abbreviations
        ("bench sync --elem 3", "mpisparse bench sync", "unrecognized arguments: --elem 3"),
        ("train --zzz", "mpisparse train", "unrecognized arguments: --zzz"),
        ("slurm --node 3 --partion x -- train", "mpisparse slurm", "did you mean --partition?"),
        ("bench sync --elemnts 3", "mpisparse bench sync", "did you mean --elements?"),
        ("export RUN model.pt --overwite", "mpisparse export", "did you mean --overwrite?"),
        ("--versoin", "mpisparse [-h]", "required: COMMAND; instead of --versoin, did you mean --version?"),
        ("inspect --verfy", "mpisparse inspect", "required: directory; instead of --verfy, did you mean --verify?"),
        ("trian", "mpisparse [-h]", "did you mean 'train'?"),
        ("bench snyc", "mpisparse bench", "did you mean 'sync'?"),
        ("train --dry-run none", "mpisparse train", "expected a whole number >= 1"),
    ],
)
def test_mistyped_words_get_a_suggestion_and_the_usage(
    words: str, usage: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(words.split())
    told = capsys.readouterr().err
    assert left.value.code == 2
    assert told.startswith(f"usage: {usage} ")
    assert says in told


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("mpisparse tr", {"train"}),
        ("mpisparse train --densit", {"--density", "--density-from", "--density-warmup"}),
        ("mpisparse train --scheme dr", {"drift"}),
        ("mpisparse train --schedule c", {"constant", "cosine"}),
        ("mpisparse export --over", {"--overwrite"}),
    ],
)
def test_a_shell_completes(line: str, offered: set[str], tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    environment = {
        **os.environ, "_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer), "_ARGCOMPLETE_SUPPRESS_SPACE": "1", "COMP_TYPE": "9",
    }  # fmt: skip
    code = "import sys; sys.argv[0] = 'mpisparse'; from mpisparse.runtime.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {word.strip() for word in answer.read_text().split("\n") if word.strip()} == offered


# --dry-run


def test_a_dry_run_needs_no_mpi_and_writes_nothing(tmp_path: Path) -> None:
    code = "import sys; sys.modules['mpi4py'] = None\nfrom mpisparse.runtime.cli import main\nsys.exit(main(sys.argv[1:]))"
    words = ["train", "--batch-size", "4", "--density", "0.02", "--seed", "7", "--dry-run", "3"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    for line in ('model = "digits-cnn"', "density = 0.02", "seed = 7", "batch_size = 4", "# 3 ranks, 283,786 parameters"):
        assert line in done.stdout
    (tmp_path / "again.toml").write_text(done.stdout)  # it is a settings file
    again = resolve({"config": tmp_path / "again.toml"})
    assert again == resolve(vars(parser().parse_args(words)))
    shown = re.findall(r"#   (parameters|optimizer|gradients) +([0-9.]+) MB", done.stdout)
    assert dict(shown) == dict.fromkeys(("parameters", "optimizer", "gradients"), f"{4 * 283786 / 1000000.0:.1f}")


def test_memory_is_counted_once() -> None:
    settings = Settings(batch_size=2, scheme="dense", optimizer="adamw")
    measured = dry_run.measure(settings, 2)
    n = measured.elements
    assert measured.memory["parameters"] == 4 * n
    assert 8 * n <= measured.memory["optimizer"] <= 8 * n + 1000, "two moments, and a step for each tensor"
    assert measured.memory["gradients"] == 4 * n
    assert measured.received == pytest.approx(4 * n, rel=0.01), "of two ranks: half of 2 x 4 bytes"


def test_only_the_first_process_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert main(["train", "--dry-run"]) == 0
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert main(["train", "--batch-size", "2", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "# 3 ranks" in told
    assert "scheme auto" in told
    assert dry_run.CHOSEN in told


def test_bad_input_of_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in (
        (["--dry-run", "2", "--batch-size", "100000"], "a step needs 200000 examples; lower --batch-size"),
        (["--dry-run", "100000000"], "a dry run of 100000000 ranks in one process needs about"),
        (["--dry-run", "2", "--data", "/nowhere.npz"], "/nowhere.npz"),
        (["--dry-run", "2", "--density", "3"], "density must be in (0, 1]"),
    ):
        assert main(["train", *words]) == 2
        assert says in capsys.readouterr().err


def test_choices_are_those_that_settings_take() -> None:
    for name in ("optimizer", "schedule", "device", "scheme", "evaluate_on"):
        assert choices_of(name)
        for choice in choices_of(name):
            assert getattr(Settings(**{name: choice}), name) == choice


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for on Linux only")
@pytest.mark.parametrize(("set_to", "asked"), [(None, True), ("0", False)])
def test_gradients_are_in_memory_with_huge_pages(set_to: str | None, asked: bool) -> None:
    """The kernel notes `hg` for memory of which it was asked; what a user has set stays."""
    program = """
import contextlib, re
from mpisparse.runtime.cli import main
with contextlib.suppress(SystemExit):
    main(["--version"])
import torch
gradient = torch.zeros(1 << 24)
at = gradient.data_ptr() + (1 << 24)
flags, inside = "", False
for line in open("/proc/self/smaps"):
    if span := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
        inside = int(span[1], 16) <= at < int(span[2], 16)
    elif inside and line.startswith("VmFlags"):
        flags = line.split()
print("hg" in flags)
"""
    environment = {key: value for key, value in os.environ.items() if key != "THP_MEM_ALLOC_ENABLE"}
    environment |= {} if set_to is None else {"THP_MEM_ALLOC_ENABLE": set_to}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == str(asked)


def test_a_reader_who_has_left_sees_no_traceback() -> None:
    """As `| head` leaves."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-u", "-m", "mpisparse", "doctor"]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writes)
    assert (done.returncode, done.stderr) == (1, "")
