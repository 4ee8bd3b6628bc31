"""What is installed: the time of an import, and the wheel and source package in environments with a compiler and without."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT = 1800.0  # seconds, for what takes minutes
ALLOWED = 1.3  # times `import torch`
PUBLIC = "from mpisparse import GradientSync, attach, checkpoint"


def cpu_seconds(code: str) -> float:
    """Return the processor time of a Python process, which other processes of a busy machine do not add to.

    It may keep bytecode, as torch's is kept where it was installed: else only this package would be compiled each time.
    """
    timed = f"import os\n{code}\nprint(sum(os.times()[:2]))"
    keeps = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", timed], capture_output=True, text=True, timeout=TIMEOUT, check=True, env=keeps
    )
    return float(done.stdout)


def test_an_import_takes_hardly_longer_than_that_of_torch() -> None:
    rounds: list[list[float]] = []
    for _ in range(20):  # what else runs only adds, by way of caches: the least of many rounds tells
        rounds.append([cpu_seconds(code) for code in ("import torch", "import mpisparse", PUBLIC)])
        torch, bare, used = (min(times) for times in zip(*rounds, strict=True))
        if len(rounds) >= 3 and max(bare, used) <= ALLOWED * torch:
            break
    assert bare <= ALLOWED * torch
    assert used <= ALLOWED * torch, "with all that a training loop needs"


@pytest.mark.parametrize("code", ["import mpisparse", "from mpisparse.runtime.cli import parser; parser().format_help()"])
def test_neither_the_import_nor_help_loads_what_is_slow(code: str) -> None:
    check = f"import sys\n{code}\nprint({{'torch', 'numpy', 'h5py', 'mpi4py', 'rich', 'safetensors'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=TIMEOUT, check=True)
    assert done.stdout == "set()\n"


# Packages

STEPS = """
import hashlib, warnings
import torch
import mpisparse
from mpisparse.backends.device import load_backend
from mpisparse.comm.virtual import run_virtual

torch.set_num_threads(1)

def work(comm):  # on two virtual ranks: no MPI library is installed here
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 30)
    sync = mpisparse.GradientSync(model, density=0.1, codec="int8", comm=comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpisparse.attach(optimizer, sync)
    torch.manual_seed(1 + sync.rank)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 40)).square().mean().backward()
        optimizer.step()
    return hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()

with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    digests = run_virtual(2, work)
lines = [str(warning.message) for warning in told if "mpisparse" in str(warning.message)]
print(mpisparse.__file__)
print(load_backend().name)
print(len(lines), *lines)
print(*set(digests))
"""


def run(*words: object, env: dict[str, str] | None = None, cwd: Path | None = None, needs_index: bool = False) -> str:
    """Run a program and return what it prints. Skip the test if it fails because pip has no index with what it needs."""
    done = subprocess.run(
        list(map(str, words)), env=env, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    said = done.stdout + done.stderr
    if done.returncode and needs_index and (missing := re.search(r"No matching distribution found for \S+", said)):
        pytest.skip(f"pip reaches no package index that has all it needs: {missing[0]}")
    assert done.returncode == 0, said[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source package, made from a copy of the files that git knows."""
    place = tmp_path_factory.mktemp("source")
    clone = place / "clone"
    for name in subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines():
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    builder = place / "builder"
    run(sys.executable, "-m", "venv", builder)
    run(builder / "bin" / "pip", "install", "-q", "build", needs_index=True)
    run(builder / "bin" / "python", "-m", "build", "--sdist", "-o", place, clone, needs_index=True)
    (package,) = place.glob("*.tar.gz")
    return package


def installed(place: Path, package: Path, path: str) -> list[str]:
    """Install the source package into an empty environment with this PATH, and train with it; return what that says.

    Its requirements are those of the running environment, found by path, because torch alone takes minutes to install.
    """
    run(sys.executable, "-m", "venv", place)
    environment = {**os.environ, "PATH": f"{place / 'bin'}:{path}", "CC": "", "CXX": ""}
    environment = {name: value for name, value in environment.items() if value}
    run(place / "bin" / "pip", "wheel", "-q", "--no-deps", "-w", place, package, env=environment, needs_index=True)
    (wheel,) = place.glob("*.whl")
    run(place / "bin" / "pip", "install", "-q", "--no-deps", "--no-index", wheel, env=environment)
    python = place / "bin" / "python"
    own = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(own) / "requirements.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    said = run(python, "-c", STEPS, env={**environment, "OMP_NUM_THREADS": "1"}, cwd=place).splitlines()
    assert said[0].startswith(own), "not the tree that is tested"
    assert run(place / "bin" / "mpisparse", "--version", env=environment).startswith("mpisparse ")
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    assert {"mpisparse/py.typed", "mpisparse/kernels/pass.cu", "mpisparse/runtime/report/page.css"} <= names
    assert not any(name.startswith(("tests/", "docs/", "bin/")) for name in names)
    compiled = [name for name in names if name.startswith("mpisparse/_cpu.") and name.endswith(".so")]
    return [*said[1:], str(len(compiled))]


def test_without_an_index_the_test_is_skipped_and_other_failures_are_not() -> None:
    pip = (sys.executable, "-m", "pip", "install", "-q")
    offline = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    with pytest.raises(pytest.skip.Exception, match=r"No matching distribution found for mpisparse-nowhere"):
        run(*pip, "mpisparse-nowhere", env=offline, needs_index=True)
    with pytest.raises(AssertionError, match="No matching distribution"):
        run(*pip, "mpisparse-nowhere", env=offline)
    with pytest.raises(AssertionError, match="invalid floating-point"):
        run(*pip, "--timeout=never", "mpisparse-nowhere", env=offline, needs_index=True)


@pytest.mark.slow
def test_the_package_installs_with_a_compiler_and_without(source: Path, tmp_path: Path) -> None:
    """The same bits from either; without a compiler one warning says what is lost."""
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler here")
    with tarfile.open(source) as file:
        assert {Path(name).parts[1] for name in file.getnames() if len(Path(name).parts) > 1} >= {"mpisparse", "kernels"}
    backend, told, digest, compiled = installed(tmp_path / "with", source, os.environ["PATH"])
    assert (backend, told, compiled) == ("native", "0", "1")
    bare = tmp_path / "programs"
    bare.mkdir()
    for name in ("sh", "env", "uname", "cat", "ls"):
        (bare / name).symlink_to(shutil.which(name) or "/nowhere")
    backend, told, again, compiled = installed(tmp_path / "without", source, str(bare))
    assert (backend, compiled) == ("numpy", "0")
    assert told.startswith("1 mpisparse runs without its native kernels, because no C++ compiler was found")
    assert again == digest
