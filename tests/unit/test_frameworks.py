"""Lightning, transformers.Trainer and Accelerate under mpirun and torchrun: the scripts of tests/frameworks, the examples.

Each script starts once on three ranks of MPI and once on two under torchrun, which resume what the three have written.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "frameworks"
TIMEOUT = 1800.0  # seconds, only to end what hangs
LAUNCHERS = (
    "OMPI_",
    "PMI",
    "SLURM_",
    "WORLD_SIZE",
    "RANK",
    "LOCAL_",
    "TORCHELASTIC",
    "MASTER_",
    "MPI_LOCALNRANKS",
    "PRTE_LAUNCHED",
)
EXAMPLES = {
    "lightning": ("lightning_net", ["--epochs", "1"], ["--epochs", "2", "--resume", "last.ckpt"], "accuracy"),
    "huggingface": ("huggingface_gpt", ["--steps", "20"], ["--steps", "22", "--resume"], "train_loss"),
    "accelerate": ("accelerate_net", ["--epochs", "1"], ["--epochs", "2", "--resume"], "loss"),
}


def started(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command with the environment of one that no launcher has started."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    environ = {
        **kept, "OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_mpi_yield_when_idle": "1",
        "HF_HUB_OFFLINE": "1", "COLUMNS": "120",
    }  # fmt: skip
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=TIMEOUT, check=False, cwd=cwd)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-10000:]
    return done


def mpirun(ranks: int) -> list[str]:
    return [str(Path(sys.executable).with_name("mpirun")), "-n", str(ranks), sys.executable]


def torchrun(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def show(launcher: list[str], script: str, ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a script; all ranks must come to its end."""
    done = started(*launcher, str(SCRIPTS / f"{script}.py"), *words)
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}: all shown" in done.stdout
    return done


@pytest.mark.parametrize(
    ("script", "ranks"),
    [
        ("with_accelerate", 3),
        ("with_trainer", 3),
        ("with_lightning", 2),
        pytest.param("with_lightning", 3, marks=pytest.mark.slow),
    ],
)
def test_under_mpirun_and_torchrun(script: str, ranks: int, tmp_path: Path) -> None:
    """Some go on with what another number of ranks has saved."""
    show(mpirun(ranks), script, ranks, str(tmp_path / "mpi"))
    show(torchrun(2), script, 2, str(tmp_path / "torch"), str(tmp_path / "mpi"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("script", ["with_lightning", "with_trainer", "with_accelerate"])
def test_on_other_numbers_of_ranks(script: str, ranks: int, tmp_path: Path) -> None:
    show(mpirun(ranks), script, ranks, str(tmp_path))


@pytest.mark.slow
def test_without_a_launcher(tmp_path: Path) -> None:
    done = show([sys.executable], "with_lightning", 1, str(tmp_path))
    assert "one rank trains alone: start the script with `mpirun -n 2 python ...`" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_train_and_resume(name: str, tmp_path: Path) -> None:
    example, first, second, word = EXAMPLES[name]
    second = [str(tmp_path / given) if given.endswith(".ckpt") else given for given in second]
    command = ["-m", f"mpisparse.examples.{example}", "--out"]
    for launcher, out, words in (
        (mpirun, tmp_path, first),
        (mpirun, tmp_path, second),
        (torchrun, tmp_path / "torch", first),
    ):
        assert word in started(*launcher(2), *command, str(out), *words, cwd=tmp_path).stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_pages_show_the_examples(name: str) -> None:
    """Blocks that a page says are from the example are in it, with another indentation."""
    page = (ROOT / "docs" / "howto" / f"{name}.md").read_text()
    source = (ROOT / "mpisparse" / "examples" / f"{EXAMPLES[name][0]}.py").read_text()
    blocks = re.findall(r"runs the example that it is from -->\n```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        deeper = [textwrap.indent(block, " " * spaces) for spaces in (0, 4, 8)]
        assert any(text in source for text in deeper), f"{EXAMPLES[name][0]}.py has no\n{block}"


@pytest.mark.parametrize(
    ("module", "library", "words"),
    [
        ("lightning", "lightning", "Lightning is not installed: pip install 'mpisparse[lightning]'"),
        ("accelerate", "accelerate", "Accelerate is not installed: pip install 'mpisparse[huggingface]'"),
        ("huggingface", "transformers", "transformers is not installed: pip install 'mpisparse[huggingface]'"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(
    module: str, library: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [
        name for name in sys.modules if name.split(".")[0] == library or name.startswith("mpisparse.integrations.")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)  # type: ignore[arg-type]
    with pytest.raises(ImportError, match=re.escape(words)):
        importlib.import_module(f"mpisparse.integrations.{module}")
