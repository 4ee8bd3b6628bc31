"""A real parallel HDF5 for these tests: Debian's h5py with MPI. Without it they are skipped, with the reason."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import debian
import pytest

PYTHON, MPIRUN = "/usr/bin/python3", "/usr/bin/mpirun.openmpi"
PACKAGES = ["python3-h5py-mpi", "python3-mpi4py", "openmpi-bin"]
PROBE = "import h5py, mpi4py.MPI, sys; assert h5py.get_config().mpi; print(*sys.version_info[:2])"
BESIDE = [str(Path(__file__).parent / "beside.py"), sysconfig.get_path("purelib")]
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMP_NUM_THREADS": "1",
    "MPISPARSE_PROGRESS": "plain",
}


@pytest.fixture(scope="session")
def command() -> Callable[..., list[str]]:
    """Return the command that runs a script, or -m and a module, on `ranks` ranks with a parallel HDF5."""
    version = probe() or install()
    if version != "{} {}".format(*sys.version_info[:2]):
        pytest.skip(f"no parallel HDF5: it is for Python {version}, the environment is of another")
    return lambda ranks, *words: [MPIRUN, "-n", str(ranks), PYTHON, *BESIDE, *words]


def probe() -> str:
    """Return the version of Python that has an h5py with MPI, or nothing."""
    if not Path(PYTHON).exists() or not Path(MPIRUN).exists():
        return ""
    environment = os.environ | ENVIRONMENT | {"H5PY_ALWAYS_USE_MPI": "1"}
    found = subprocess.run([PYTHON, "-c", PROBE], capture_output=True, text=True, timeout=600, env=environment, check=False)
    return found.stdout.strip() if found.returncode == 0 else ""


def install() -> str:
    """Install Debian's packages; returns as probe()."""
    if reason := debian.install(*PACKAGES):
        pytest.skip(f"no parallel HDF5: {reason}")
    return probe() or pytest.skip("no parallel HDF5: installed, but h5py has no MPI")
