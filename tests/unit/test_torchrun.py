"""Jobs under torchrun: the scripts of tests/torchrun, and processes that MPI does not see as one job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpisparse.comm.world import separate_worlds

SCRIPTS = Path(__file__).parents[1] / "torchrun"
TIMEOUT = 900.0  # seconds, only to end what hangs
LAUNCHERS = ("OMPI_", "PMI", "SLURM_", "WORLD_SIZE", "RANK", "TORCHELASTIC", "MASTER_", "MPI_LOCALNRANKS", "PRTE_LAUNCHED")


def environment() -> dict[str, str]:
    """Return the environment without what other launchers have set."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return {**kept, "OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def torchrun(script: str, processes: int, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return subprocess.run(
        [*command, str(SCRIPTS / script), *words], env=environment(), capture_output=True, text=True, timeout=TIMEOUT,
        check=False, cwd=SCRIPTS.parents[1],
    )  # fmt: skip


@pytest.mark.parametrize("processes", [2])
def test_over_a_process_group_without_mpi(processes: int) -> None:
    done = torchrun("transport.py", processes)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(processes):
        assert f"rank {rank} of {processes}: all shown" in done.stdout
    assert done.stderr.count("torchrun started 2 processes") == 1  # mpisparse train: one process prints for all


def test_a_rank_that_hangs_ends_the_job() -> None:
    done = torchrun("ends.py", 2, "hangs")
    assert done.returncode != 0
    assert "exitcode  : 87" in done.stderr, done.stderr
    assert "r0 | watchdog: ending all ranks with exit code 87" in done.stderr
    assert "rank 1: at" in done.stderr  # where it hangs


def test_a_rank_that_raises_ends_the_job() -> None:
    done = torchrun("ends.py", 2, "raises")
    assert done.returncode != 0
    assert "the data set is gone" in done.stderr


@pytest.mark.parametrize("how", ["fails", pytest.param("leaves", marks=pytest.mark.slow)])
def test_a_rank_that_ends_while_others_wait_in_torch_ends_the_job(how: str) -> None:
    assert torchrun("ends.py", 2, how).returncode != 0


def test_the_hook_of_ddp(tmp_path: Path) -> None:
    """Laws, refusals and states on two ranks; then the states are taken over by three."""
    for processes, part in ((2, "all"), (3, "resume")):
        done = torchrun("hook.py", processes, part, str(tmp_path))
        assert done.returncode == 0, done.stdout + done.stderr
        for rank in range(processes):
            assert f"rank {rank} of {processes}: all shown" in done.stdout


def test_replicas_of_shards() -> None:
    done = torchrun("shards.py", 4)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(4):
        assert f"rank {rank} of 4: all shown" in done.stdout


SINGLE = """
import mpisparse
try:
    mpisparse.aggregator(10)
except mpisparse.ConfigurationError as error:
    print(error)
"""


def test_mpirun_of_another_mpi() -> None:
    """MPICH's with Open MPI's library; the other way round MPICH aborts by itself."""
    mpich = os.environ.get("MPISPARSE_MPICH_PYTHON")
    if not mpich:
        pytest.skip("MPISPARSE_MPICH_PYTHON is not set to a Python with MPICH's mpirun beside it")
    command = [str(Path(mpich).with_name("mpirun")), "-n", "2", sys.executable, "-c", SINGLE]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 processes were started") == 2, done.stdout + done.stderr
    assert "use the mpirun of Open MPI" in done.stdout


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4", "RANK": "0"}


@pytest.mark.parametrize(
    ("size", "environ", "words"),
    [
        (1, TORCHRUN, "torchrun started 4 processes"),
        (1, {**TORCHRUN, "OMPI_COMM_WORLD_SIZE": "1"}, "torchrun started 4 processes"),  # torchrun inside mpirun -n 1
        (2, {**TORCHRUN, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "torchrun started 4 processes"),
        (1, {"WORLD_SIZE": "4"}, "WORLD_SIZE says 4 processes"),
        (1, {"OMPI_COMM_WORLD_SIZE": "4"}, "4 processes were started (OMPI_COMM_WORLD_SIZE)"),
        (1, {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, "2 processes were started (PMI_SIZE)"),
    ],
)
def test_separate_worlds_are_refused(size: int, environ: dict[str, str], words: str) -> None:
    problem = separate_worlds(size, "Open MPI", environ)
    assert problem is not None
    assert problem.startswith(words)
    assert "comm=" in problem


@pytest.mark.parametrize(
    ("size", "library", "environ"),
    [
        (4, "Open MPI", {"OMPI_COMM_WORLD_SIZE": "4", "WORLD_SIZE": "4"}),  # torch.distributed beside MPI
        (4, "Open MPI", {"OMPI_COMM_WORLD_SIZE": "4", "WORLD_SIZE": "1"}),  # a container's default
        (1, "Open MPI", {"WORLD_SIZE": "1"}),
        (1, "Open MPI", {"WORLD_SIZE": "many"}),
        (1, "Open MPI", {"OMPI_COMM_WORLD_SIZE": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"}),  # in a step
        (2, "Open MPI", {"OMPI_COMM_WORLD_SIZE": "2", "PMI_SIZE": "8", "SLURM_STEP_ID": "0"}),  # in srun --mpi=pmi2
        (2, "MPICH", {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "OMPI_COMM_WORLD_SIZE": "3"}),  # in another MPI's rank
        (8, "MPICH", {"PMI_SIZE": "8", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"}),  # srun --mpi=pmi2
        (1, "Open MPI", {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}),  # alone in a batch script
    ],
)
def test_no_false_alarm(size: int, library: str, environ: dict[str, str]) -> None:
    assert separate_worlds(size, library, environ) is None
