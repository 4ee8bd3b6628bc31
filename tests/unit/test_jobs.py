"""Whole jobs under mpirun, started as a user would: how they end in success, when a rank fails and when one dies.

Both MPI libraries, if both are there: the one beside the running Python, and MPICH's beside MPISPARSE_MPICH_PYTHON.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

TIMEOUT = 900.0  # seconds for a job; one takes about three, on a machine with nothing else to do

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
MORE_RANKS_THAN_CORES = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_mpi_yield_when_idle": "1"}

START = """
import os, pathlib, signal, sys
import torch
from mpi4py import MPI
import mpisparse

pathlib.Path(sys.argv[1], str(os.getpid())).touch()
torch.set_num_threads(1)
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
assert size == int(sys.argv[2]), f"mpirun and mpi4py are of different libraries: {MPI.get_vendor()}"
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Tanh(), torch.nn.Linear(30, 5))

def backward():
    model.zero_grad()
    model(torch.randn(8, 40)).square().mean().backward()
"""

TRAINS = """
def check_replicas():
    mine = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().tobytes()
    assert len(set(MPI.COMM_WORLD.allgather(mine))) == 1

sync = mpisparse.GradientSync(model, density=0.05)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(5):
    backward()
    sync.step()
    optimizer.step()
    check_replicas()

mpisparse.attach(optimizer, sync)
for step in range(5):
    backward()
    optimizer.step()
    check_replicas()
assert sync.stats.step == 9
print(f"r{rank} of {size} | trained with {MPI.get_vendor()[0]}")
"""

RAISES = """
sync = mpisparse.GradientSync(model, density=0.05)
for step in range(1_000_000):
    backward()
    if step == 3 and rank == size - 1:
        raise OSError("the data set is gone")
    sync.step()
"""

DIES = """
sync = mpisparse.GradientSync(model, density=0.05)
for step in range(1_000_000):
    backward()
    if step == 3 and rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    sync.step()
"""

DIFFERS = """
try:
    mpisparse.GradientSync(model, density=0.05 * (rank + 1))
except mpisparse.ConfigurationError as error:
    print(f"r{rank} caught: {error}", flush=True)
sync = mpisparse.GradientSync(model, density=0.05)
for step in range(1_000_000):
    backward()
    if step == 3 and rank == 0:
        sync.density = 0.5
    sync.step()
"""

LEAVES = """
import time
sync = mpisparse.GradientSync(model, density=0.05, timeout=3)
for step in range(8 if rank == 0 else 1_000_000):  # the rank that collects heartbeats computes for ever
    backward()
    if step == 5 and rank == 1:
        with sync.unwatched("plotting"):
            time.sleep(8)
    sync.step()
print(f"r{rank} is through", flush=True)
while True:
    time.sleep(1)
"""

ENDS = """
sync = mpisparse.GradientSync(model, density=0.05)
late = mpisparse.GradientSync(torch.nn.Linear(3, 2))  # two of them, of which one is fine
for step in range(8 if rank == 0 else 9):
    backward()
    try:
        sync.step()
    except mpisparse.errors.CollectiveError as error:
        print(f"r{rank} caught: {error}", flush=True)
if rank > 0:
    try:
        mpisparse.checkpoint.save(sys.argv[1], step=1, model=model, sync=sync)
    except mpisparse.errors.CollectiveError as error:
        print(f"r{rank} caught again: {error}", flush=True)
"""

SAVES_ALONE = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sync = mpisparse.GradientSync(model, scheme="speculative", density=0.05)
mpisparse.attach(optimizer, sync)
for step in range(5):
    backward()
    optimizer.step()
if rank == 0:
    mpisparse.checkpoint.save(sys.argv[1], step=5, model=model, optimizer=optimizer, sync=sync)
"""

STOPS = """
def warm_up():  # the first step of an optimizer imports for seconds
    backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()

warm_up()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sync = mpisparse.GradientSync(model, scheme="speculative", density=0.05, timeout=3)
mpisparse.attach(optimizer, sync)
for step in range(1_000_000):
    backward()
    if step == 8 and rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    optimizer.step()
"""


@dataclass(frozen=True)
class Ended:
    """A finished job: mpirun's exit code, and all output of mpirun and the ranks."""

    code: int
    output: str


@dataclass(frozen=True)
class Launcher:
    """A Python and the mpirun beside it; `folder` is for scripts, outputs and the ranks' process ids."""

    python: Path
    folder: Path

    def run(self, script: str, ranks: int) -> Ended:
        """Run START and the script on some ranks; fails if the job does not end or a rank outlives it."""
        source, output, pids = self.folder / "job.py", self.folder / "output", self.folder / "pids"
        source.write_text(START + script)
        pids.mkdir()
        command = [self.python.with_name("mpirun"), "-n", str(ranks), self.python, source, pids, str(ranks)]
        with output.open("w") as sink:
            job = subprocess.Popen(
                command, env=job_environment(), stdout=sink, stderr=sink, stdin=subprocess.DEVNULL, start_new_session=True
            )
            try:
                code = job.wait(TIMEOUT)
            except subprocess.TimeoutExpired:
                end(job)
                pytest.fail(f"the job hangs: not ended after {TIMEOUT:g} s\n{output.read_text()}")
            finally:
                survivors = end_survivors(source, pids)
        ended = Ended(code, output.read_text())
        assert len(list(pids.iterdir())) == ranks, ended.output
        assert not survivors, f"still running when mpirun had ended: {survivors}\n{ended.output}"
        return ended


def job_environment() -> dict[str, str]:
    """Return an environment with one thread per rank, in which Open MPI may run as root and oversubscribe cores."""
    return {**os.environ, **AS_ROOT, **MORE_RANKS_THAN_CORES, "OMP_NUM_THREADS": "1"}


def end(job: subprocess.Popen[bytes]) -> None:
    """Ask mpirun to end its ranks, or kill it."""
    job.terminate()
    try:
        job.wait(5)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()


def end_survivors(source: Path, pids: Path, patience: float = 60.0) -> list[int]:
    """The ranks that still run the script when patience is over, now killed."""
    noted = [int(path.name) for path in pids.iterdir()]
    until = time.monotonic() + patience
    while (alive := [pid for pid in noted if is_running(pid, source)]) and time.monotonic() < until:
        time.sleep(0.1)
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return alive


def is_running(pid: int, source: Path) -> bool:
    """Tell whether a process is alive and runs the script (a zombie has no command line)."""
    try:
        return str(source).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.fixture(params=["own", "mpich"])
def launcher(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Launcher]:
    """Run with the MPI of this environment, then with MPICH."""
    named = sys.executable if request.param == "own" else os.environ.get("MPISPARSE_MPICH_PYTHON")
    if not named:
        pytest.skip("MPISPARSE_MPICH_PYTHON is not set to a Python with MPICH's mpirun beside it")
    python = Path(named)
    if not python.with_name("mpirun").exists():
        pytest.skip(f"there is no mpirun beside {python}")
    return Launcher(python, tmp_path)


long = pytest.mark.parametrize("launcher", ["own", pytest.param("mpich", marks=pytest.mark.slow)], indirect=True)


def test_training_ends_well_with_equal_replicas(launcher: Launcher) -> None:
    job = launcher.run(TRAINS, 2)
    assert job.code == 0, job.output
    assert sorted(re.findall(r"r(\d) of 2 \| trained", job.output)) == ["0", "1"], job.output


def test_a_rank_that_raises_ends_the_job_and_shows_its_traceback(launcher: Launcher) -> None:
    job = launcher.run(RAISES, 2)
    assert job.code != 0
    assert "Traceback (most recent call last)" in job.output, job.output
    assert "OSError: the data set is gone" in job.output, job.output
    assert "r1 | uncaught OSError: ending all ranks" in job.output, job.output


def test_a_rank_that_is_killed_ends_the_job(launcher: Launcher) -> None:
    job = launcher.run(DIES, 3)
    assert job.code != 0, job.output


def assert_waiting(job: Ended, ranks: list[int]) -> None:
    """Assert that rank 0 lists this many ranks as waiting, in one call or, depending on MPI's progress, in two."""
    a, b = ranks
    together, apart = rf"ranks {a}-{b}", rf"rank {a}: waiting(.|\n)*rank {b}"
    assert re.search(rf"r0 \|   ({together}|{apart}): waiting in \w+ after \d+ steps", job.output), job.output


def test_a_rank_that_ends_early_tells_those_that_wait_for_it(launcher: Launcher) -> None:
    job = launcher.run(ENDS, 3)
    assert job.code == 0, job.output
    found = "rank 0 is at the end of the program, ranks 1 and 2 in step 8: "
    assert f"r0 | {found}" in job.output, job.output
    for rank in (1, 2):
        assert f"r{rank} caught: r{rank} | {found}" in job.output, job.output
        assert f"r{rank} caught again: r{rank} | {found}" in job.output, job.output


def test_a_checkpoint_of_rank_0_alone_at_the_end(launcher: Launcher) -> None:
    job = launcher.run(SAVES_ALONE, 2)
    assert job.code != 0, job.output
    found = "rank 0 is in checkpoint.save, rank 1 at the end of the program: save is collective, call it on every rank"
    for rank in (0, 1):
        assert f"r{rank} | {found}" in job.output, job.output


@long
def test_a_rank_that_leaves_its_loop_ends_the_job_and_one_in_an_exempt_phase_does_not(launcher: Launcher) -> None:
    job = launcher.run(LEAVES, 3)
    assert job.code == 87, job.output
    assert "r0 is through" in job.output, job.output
    for rank in (1, 2):
        assert re.search(rf"r{rank} \| watchdog: waits in \w+ since ", job.output), job.output
        assert re.search(rf"r{rank} \| .*job.py\", line \d+, in <module>\nr{rank} \|     sync.step\(\)", job.output), (
            job.output
        )
    assert re.search(r"r0 \|   rank 0: .*job.py:\d+ in <module>", job.output), job.output
    assert_waiting(job, [1, 2])
    assert "ending all ranks with exit code 87" in job.output, job.output


@long
def test_a_rank_that_is_stopped_ends_the_job_though_results_are_in_flight(launcher: Launcher) -> None:
    job = launcher.run(STOPS, 3)
    assert job.code == 87, job.output
    for rank in (0, 1):
        assert re.search(rf"r{rank} \| watchdog: waits in \w+ for a result in flight since ", job.output), job.output
        assert re.search(rf"r{rank} \|     optimizer.step\(\)", job.output), job.output
    assert re.search(r"r0 \|   rank 2: stopped or gone: last heartbeat \d+ s ago from .*, process \d+, ", job.output), (
        job.output
    )
    assert_waiting(job, [0, 1])


def test_an_agreed_error_ends_the_job_and_shows_its_message(launcher: Launcher) -> None:
    job = launcher.run(DIFFERS, 2)
    assert job.code != 0
    for rank in range(2):
        assert f"r{rank} caught: r{rank} | the ranks differ" in job.output, job.output
    assert "density must be the same on all ranks" in job.output, job.output


def test_import_needs_no_mpi_library() -> None:
    environment = {**os.environ, "MPI4PY_LIBMPI": "/nowhere/libmpi.so"}

    def run(program: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )

    assert run("from mpi4py import MPI").returncode != 0, "an MPI library was reachable: this test would prove nothing"
    imported = run("import mpisparse; print(mpisparse.__version__, *dir(mpisparse))")
    assert imported.returncode == 0, imported.stderr
    assert "GradientSync" in imported.stdout
