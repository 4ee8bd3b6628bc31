"""`mpirun -n N python -m pytest --with-mpi` with tests/lockstep.py: a failure on one rank fails the run and hangs none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
MPIRUN = Path(sys.executable).with_name("mpirun")
TIMEOUT = 900.0  # seconds, for a job that takes a few
ALLOWED = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_mpi_yield_when_idle": "1",
}  # fmt: skip

SOME_FAIL = """
import pytest
from mpi4py import MPI

pytestmark = pytest.mark.mpi
comm = MPI.COMM_WORLD

def test_passes():
    comm.Barrier()

def test_fails_on_rank_1():
    print("seen on", comm.rank)
    assert comm.rank != 1, "wrong here"

@pytest.fixture
def made():
    if comm.rank == 1:
        raise OSError("cannot be made here")

def test_setup_fails_on_rank_1(made):
    comm.Barrier()  # never reached: rank 1 would not come

@pytest.fixture
def ended():
    yield
    assert comm.rank == 0, "cannot be ended here"

def test_teardown_fails_on_rank_1(ended):
    comm.Barrier()

def test_skips_on_rank_1():
    if comm.rank == 1:
        pytest.skip("not here")

def test_shares_a_directory(mpi_tmp_path):
    (mpi_tmp_path / str(comm.rank)).touch()
    comm.Barrier()
    assert sorted(path.name for path in mpi_tmp_path.iterdir()) == ["0", "1"]

@pytest.mark.mpi(min_size=3)
def test_needs_three():
    raise AssertionError

@pytest.mark.mpi
@pytest.mark.ranks(1, 4)
def test_of_one_and_of_four():
    raise AssertionError

@pytest.mark.mpi_skip
def test_of_one_process():
    raise AssertionError
"""

ONE_WAITS = """
import pytest
from mpi4py import MPI

@pytest.mark.mpi
def test_fails_on_rank_1_while_rank_0_waits():
    assert MPI.COMM_WORLD.rank == 0, "wrong here"
    MPI.COMM_WORLD.Barrier()
"""


def run(folder: Path, source: str, *before: str, options: tuple[str, ...] = (), **variables: str) -> tuple[int, str]:
    """Exit code and output of pytest on one file with the plugin of this suite."""
    for name in ("conftest.py", "fewer.py", "lockstep.py"):
        shutil.copy(TESTS / name, folder)
    (folder / "test_some.py").write_text(source)
    (folder / "scratch").mkdir()
    command = [*before, sys.executable, "-m", "pytest", "--color=no", "-ra", *options, "test_some.py"]
    environment = {**os.environ, **ALLOWED, "TMPDIR": str(folder / "scratch"), **variables}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


needs_mpirun = pytest.mark.skipif(not MPIRUN.exists(), reason=f"there is no mpirun beside {sys.executable}")
ON_TWO = (str(MPIRUN), "-n", "2")


@needs_mpirun
def test_what_fails_on_one_rank_fails_and_is_shown_once(tmp_path: Path) -> None:
    code, told = run(tmp_path, SOME_FAIL, *ON_TWO, options=("--with-mpi", "--junitxml=junit.xml"))
    assert code == pytest.ExitCode.TESTS_FAILED, told
    assert "2 failed, 3 passed, 3 skipped, 2 errors" in told, told
    for message in ("wrong here", "cannot be made here", "cannot be ended here", "seen on 1"):
        assert message in told, told
    for phase, outcome in (("call", "failed"), ("setup", "failed"), ("teardown", "failed"), ("call", "skipped")):
        assert f"{phase}: passed on rank 0, {outcome} on rank 1" in told, told
    assert told.count("short test summary info") == 1, "only rank 0 reports"
    assert "Test requires 3 MPI processes" in told
    assert 'failures="2"' in (tmp_path / "junit.xml").read_text()


@needs_mpirun
def test_ranks_that_wait_for_one_that_failed_are_ended(tmp_path: Path) -> None:
    code, told = run(tmp_path, ONE_WAITS, *ON_TWO, options=("--with-mpi",), MPISPARSE_TEST_PATIENCE="1")
    assert code != 0
    assert "r1 | test_some.py::test_fails_on_rank_1_while_rank_0_waits failed on this rank" in told, told
    assert "wrong here" in told, told


@needs_mpirun
def test_a_test_that_hangs_is_ended_and_shows_where(tmp_path: Path) -> None:
    source = ONE_WAITS.replace(
        'assert MPI.COMM_WORLD.rank == 0, "wrong here"',
        "if MPI.COMM_WORLD.rank == 1: return __import__('faulthandler').cancel_dump_traceback_later()",  # rank 0 ends it
    )
    code, told = run(tmp_path, source, *ON_TWO, options=("--with-mpi",), MPISPARSE_TEST_TIMEOUT="1")
    assert code != 0
    assert "in test_fails_on_rank_1_while_rank_0_waits" in told, told


def test_without_with_mpi_tests_are_skipped_and_say_why(tmp_path: Path) -> None:
    code, told = run(tmp_path, SOME_FAIL.replace("def test_of_one_process", "def _unused"))
    assert code == 0, told
    assert "8 skipped" in told, told
    assert "need --with-mpi option to run" in told, told
