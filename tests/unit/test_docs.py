"""Snippets of README and docs work: each is run as printed, or says why not.

A comment on the line before a block of code says what the test should know of it:

    <!-- not run: REASON -->     it is not run; commands of mpisparse in it are still parsed
    <!-- file: NAME -->          it is a file that commands on the same page use
    <!-- goes on -->             Python that has the names of the blocks before it on the page

Python has, beside that, the user's names that GIVEN holds. Commands of mpisparse run in this process on one rank,
`mpirun -n N` or not; a command that starts a file of the page runs as printed. Commands that NOT_RUN lists are not run.
What is not run, and every command in the text, is still parsed by the real parser.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import mpisparse
from mpisparse.bench.converge.cases import all_cases
from mpisparse.bench.train import Case
from mpisparse.errors import ConfigurationError
from mpisparse.runtime.cli import COMMANDS, main, parser
from mpisparse.runtime.flags import resolve
from mpisparse.schemes import configure

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
FENCED = re.compile(r"(?:^<!-- (.+?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TIMEOUT = 900.0  # seconds, for a job that takes a few

BIG = "takes minutes on 25 million elements; test_bench.py runs it small"
LONG = "trains for minutes; test_bench.py runs it short"
HOURS = "trains for hours; test_converge.py runs it short"
INSTALLS = "installs packages"
SLURM = "needs Slurm: see tests/slurm"
LAB = "needs root and two emulated hosts; test_bench.py runs it on this one"
NOT_RUN = {
    "bin/quickstart": "sets up an environment of its own",
    "bin/test": "runs this test",
    "pip install 'mpisparse[mpi] @ .'": INSTALLS,
    "pip install .": INSTALLS,
    "pip install 'mpisparse[cuda13]'": INSTALLS,
    "python3 -m venv '~/mpisparse/.venv' '&&' . '~/mpisparse/.venv/bin/activate'": INSTALLS,
    "sbatch job.sbatch": SLURM,
    "sbatch --test-only job.sbatch": SLURM,
    "srun --nodes 2 --ntasks-per-node 2 --mpi=pmix mpisparse doctor": SLURM,
    "tail -f 'mpisparse-*.log'": "does not end",
    "h5dump -n RUN/checkpoints/step-00000020/rank-0000.h5": "a tool of HDF5, which h5py does not bring",
    "mpirun -n 4 mpisparse train --device cuda": "needs GPUs",
    "mpirun -n 2 mpisparse bench sync": BIG,
    "mpirun -n 2 mpisparse bench kernels": BIG,
    "mpirun -n 2 mpisparse bench checkpoint": BIG,
    "mpirun -n 4 mpisparse bench train": LONG,
    "mpirun -n 4 mpisparse bench ablation": LONG,
    "mpirun -n 4 mpisparse bench memory": BIG,
    "mpisparse bench converge": HOURS,
    "mpisparse bench converge --model gpt-nano --data corpus.txt --case 'few: scheme=exdyna density=0.01' --jobs 2 "
    "--out runs/converge": HOURS,
    "mpisparse bench converge --model gpt-nano --data tinyshakespeare.txt:alphabet --cases docs/results/gpt-nano.toml "
    "--lr 0.010125 --give-up 0.03": HOURS,
    "mpisparse bench converge --model resnet20 --data fashion_mnist.npz --cases docs/results/resnet20.toml --steps 200 "
    "--warmup 20 --batch-size 16 --lr 0.4 --lr-factor 2 --seeds 3 --tuning-seeds 1 --eval-examples 2048": HOURS,
    "mpirun -n 2 mpisparse bench sparse-models": LONG,
    "mpirun -n 8 mpisparse bench scaling": LONG,
    "bin/netlab with 2 1gbit -- mpisparse bench sync": LAB,
    "bin/netlab with 2 16mbit -- mpisparse bench overlap --density 0.5 --batch-size 96": LAB,
    "bin/netlab with 2 1gbit -- mpisparse bench ddp": LAB,
    "bin/netlab with --per-host 2 2 100mbit -- mpisparse bench nodes": LAB,
}
STANDS_FOR = {"RANKS": "2", "RATE": "1gbit", "B": "64", "[settings]": ""}  # in commands within the text


class Block(NamedTuple):
    """A block of code, its language, and what the comment before it says: a word and perhaps a text."""

    mark: str
    note: str
    kind: str
    text: str


def blocks(page: str, *kinds: str) -> list[Block]:
    """Return the fenced blocks of these languages on a page."""
    found = []
    for comment, kind, text in FENCED.findall(PAGES[page]):
        mark, _, note = comment.partition(": ")
        if kind in kinds:
            found.append(Block(mark, note, kind, text))
    return found


def python_of(page: str) -> list[Block]:
    return blocks(page, "python")


def commands(page: str, *, run: bool = False) -> list[list[str]]:
    """Return the shell commands on a page, as words; only those to run, if so."""
    texts = [block.text for block in blocks(page, "", "bash", "sh") if not (run and block.mark == "not run")]
    found = []
    for line in "\n".join(texts).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words and not (run and shlex.join(words) in NOT_RUN):
            found.append(words)
    return found


def ours(words: list[str]) -> list[str] | None:
    """Return the arguments of an mpisparse command without redirection; None for other commands."""
    for at, (word, following) in enumerate(itertools.pairwise(words)):
        if word == "mpisparse" and following in COMMANDS:
            rest = words[at + 1 :]
            return rest[: rest.index(">")] if ">" in rest else rest
    return None


def check(words: list[str]) -> None:
    """Parse a command and check its settings and cases; raises if it is wrong."""
    if "--help" in words:
        words = [word for word in words if word != "--help"]
    args = parser().parse_args(words)
    if args.command == "train" and args.config is None:
        resolve(vars(args))
    for text in getattr(args, "cases", []):
        case = Case.parse(text)
        configure(case.scheme, **case.values)
    all_cases(getattr(args, "case_texts", []), None)
    for scheme in getattr(args, "scheme", []) if args.command == "bench" else []:
        configure(scheme)


# Python


class Net(torch.nn.Sequential):
    """A user's model."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 4))


def given() -> dict[str, Any]:
    """Return the user's names in snippets of docs."""
    model = Net()

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(8, 20), torch.randint(4, (8,))

    def loss_of(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(pair[0]), pair[1])

    held_out = batch()
    return {
        "torch": torch, "mpisparse": mpisparse, "Net": Net, "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loss": torch.nn.functional.cross_entropy,
        "loss_of": loss_of, "held_out_inputs": held_out[0], "held_out_targets": held_out[1], "some_batch": batch(),
        "dataset": torch.utils.data.TensorDataset(*held_out),
        "my_shard": lambda rank, size: [batch() for _ in range(3)], "accuracy": 0.5,
        "evaluate": lambda model: model(held_out[0]),
    }  # fmt: skip


def execute(text: str, names: dict[str, Any], where: str) -> None:
    exec(compile(text, where, "exec"), names)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a fresh directory, and the package as after `import mpisparse` only."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name, value in vars(mpisparse).items() if isinstance(value, types.ModuleType)]:
        monkeypatch.delattr(mpisparse, name)
    return tmp_path


def test_python_of_the_readme_runs_from_top_to_bottom(here: Path) -> None:
    names: dict[str, Any] = {"__name__": "snippet"}
    for block in (block for block in python_of("README.md") if block.mark != "not run"):
        execute(block.text, names, "README.md")
    assert names["sync"].stats.step == names["step"] == 99
    names["sync"].close()


DOCS = [
    (page, number)
    for page in PAGES
    if page != "README.md"
    for number, block in enumerate(python_of(page))
    if block.mark not in ("not run", "file")
]


@pytest.mark.parametrize(("page", "number"), DOCS)
def test_python_of_docs_runs(here: Path, page: str, number: int) -> None:
    all_blocks, names = python_of(page), given()
    first = max(at for at in range(number + 1) if all_blocks[at].mark != "goes on")
    text = "\n".join(block.text for block in all_blocks[first : number + 1])
    if '"RUN' in text:
        mpisparse.checkpoint.save("RUN/checkpoints", step=20, model=names["model"])
    ends = contextlib.nullcontext()
    if "local_device(" in text and not torch.cuda.is_available():
        ends = pytest.raises(ConfigurationError, match="finds no CUDA device")  # type: ignore[assignment]
    with ends:
        execute(text, names, page)
    if "sync" in names:
        names["sync"].close()


@pytest.mark.parametrize("page", PAGES)
def test_marks_are_those_that_the_test_knows(page: str) -> None:
    for block in blocks(page, "python", "", "bash", "sh", "toml", "text", "diff"):
        assert block.mark in ("", "not run", "file", "goes on"), block.mark
        assert bool(block.note) == (block.mark in ("not run", "file")), f"{block.mark}: {block.note}"
    kinds = {kind for _, kind, _ in FENCED.findall(PAGES[page])}
    assert kinds <= {"python", "", "bash", "sh", "toml", "text", "diff"}, "a language that is neither run nor known"


@pytest.mark.parametrize("page", PAGES)
def test_names_of_the_package_in_python_are_there(page: str, here: Path) -> None:
    """Including those after the line at which a snippet ends without a GPU."""
    for block in python_of(page):
        for node in ast.walk(ast.parse(block.text)):
            chain: list[str] = []
            while isinstance(node, ast.Attribute):
                chain.insert(0, node.attr)
                node = node.value
            if isinstance(node, ast.Name) and node.id == "mpisparse":
                found: Any = mpisparse
                for name in chain:
                    found = getattr(found, name)


# Shell

MODELS = """
import torch

def build(sizes):
    return torch.nn.Linear(4, 2)
"""
FILES = """
import torch

def open_sets():
    inputs = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())
    return data, data
"""


@pytest.fixture
def workplace(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a directory with the files that commands name: a text, a package, a run, a script; programs are on PATH."""
    (here / "mypackage").mkdir()
    for name, text in (("__init__", ""), ("nets", MODELS), ("files", FILES)):
        (here / "mypackage" / f"{name}.py").write_text(text)
    (here / "corpus.txt").write_text("".join(f"{n} times {n} is {n * n}. " for n in range(220)))
    (here / "train.py").write_text(python_of("README.md")[0].text)
    monkeypatch.setenv("MPISPARSE_PROGRESS", "plain")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.syspath_prepend(str(here))
    assert main(["train", "--steps", "2", "--batch-size", "4", "--out", "RUN"]) == 0
    shutil.copytree("RUN", "runs/other")
    yield here
    for name in [name for name in sys.modules if name.partition(".")[0] == "mypackage"]:
        del sys.modules[name]


def start(words: list[str]) -> None:
    """Run a command unchanged, with this environment's mpirun and Python first on PATH."""
    allowed = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_mpi_yield_when_idle": "1",
    }  # fmt: skip
    done = subprocess.run(words, env={**os.environ, **allowed}, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page, run=True)])
def test_lines_of_shell_run(page: str, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks(page, "python", "toml", "text"):
        if block.mark == "file":
            (workplace / block.note).write_text(block.text)
    for words in commands(page, run=True):
        command, into = ours(words), words[words.index(">") + 1] if ">" in words else None
        capsys.readouterr()
        if command is not None:
            assert main(command) == 0, f"{page}: {shlex.join(words)}\n{capsys.readouterr().err}"
        else:
            files = [word for word in words if word.endswith(".py") and (workplace / word).is_file()]
            assert files, f"{page}: {shlex.join(words)!r} can be neither run, nor does anything say why not"
            start(words)
        if into is not None:
            Path(into).write_text(capsys.readouterr().out)
            subprocess.run(["bash", "-n", into], check=True)


def test_what_is_not_run_is_still_printed() -> None:
    printed = {shlex.join(words) for page in PAGES for words in commands(page)}
    assert set(NOT_RUN) <= printed


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_parsed(page: str) -> None:
    """Commands in blocks, run or not, and those within the text."""
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCED.sub("", PAGES[page]))]
    inline = [[STANDS_FOR.get(word, word) for word in shlex.split(span)] for span in spans if "mpisparse " in span]
    for words in [*commands(page), *inline]:
        rest = ours([word for word in words if word])
        if rest is not None and rest != ["slurm"]:
            try:
                check(rest)
            except (SystemExit, ConfigurationError) as error:
                pytest.fail(f"{page}: {shlex.join(words)}: {error}")
