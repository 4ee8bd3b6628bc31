"""What the environment of a Slurm job tells. No MPI, no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from mpisparse.errors import ConfigurationError
from mpisparse.stopping import command_output, end_time

MPIRUN_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PRTE_LAUNCHED", "MPI_LOCALNRANKS")  # set by mpirun of Open MPI and MPICH
PMI = {"openmpi": "pmix", "mpich": "pmi2", "intel": "pmi2", "cray": "cray_shasta"}


def started_by(environ: Mapping[str, str] = os.environ) -> str:
    """Return what started this process: mpirun, srun or none. Ranks of mpirun may have the variables of srun too."""
    if any(name in environ for name in MPIRUN_VARIABLES):
        return "mpirun"
    return "srun" if "SLURM_STEP_ID" in environ else "none"


def pmi(environ: Mapping[str, str] = os.environ) -> str:
    """Return how the ranks learned of each other."""
    if "PMIX_NAMESPACE" in environ:
        return f"pmix {environ.get('PMIX_VERSION', '')}".strip()
    if "PMI_FD" in environ or "PMI_RANK" in environ:
        return "pmi2" if started_by(environ) == "srun" else "pmi"
    return "none"


def first_task(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this task should print for all tasks, even if MPI sees each as a world of its own."""
    return started_by(environ) != "srun" or environ.get("SLURM_PROCID", "0") == "0"


def separate_worlds(size: int, library: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return what to change if srun started more tasks than MPI sees ranks, which would train separate models; else None."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
    if started_by(environ) != "srun" or not tasks.isdigit() or size >= int(tasks):
        return None
    kind = kind_of(library)
    used = environ.get("SLURM_MPI_TYPE", "none")
    fitting = PMI[kind] if kind else "pmix for Open MPI, --mpi=pmi2 for MPICH"
    advice = f"start it with srun --mpi={fitting}"
    if kind and used == fitting:
        advice = f"--mpi={used} should fit {library}, but this build of it does not use it"
    return (
        f"srun --mpi={used} started {tasks} tasks, but {library} sees {size} of them, so separate models would be trained; "
        f"{advice} (srun --mpi=list shows the choices), or with mpirun inside sbatch (docs/howto/slurm.md)"
    )


def check_world(size: int, library: str) -> None:
    """Raise ConfigurationError if the tasks of this job do not see each other."""
    problem = separate_worlds(size, library)
    if problem:
        raise ConfigurationError(problem)


def kind_of(library: str) -> str | None:
    """Return the family of an MPI library by its name, or None."""
    name = library.lower()
    found = [
        kind
        for kind, word in (("cray", "cray"), ("intel", "intel"), ("openmpi", "open"), ("mpich", "mpich"))
        if word in name
    ]
    return found[0] if found else None


def facts(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what doctor shows of Slurm and of this process's job."""
    version = (command_output("sinfo", "--version") or "").strip()
    found = {"installed": version or "no"}
    if "SLURM_JOB_ID" not in environ:
        return {**found, "job": "none"}
    found["job"] = environ["SLURM_JOB_ID"]
    found["nodes"] = f"{environ.get('SLURM_JOB_NUM_NODES', '?')}: {environ.get('SLURM_JOB_NODELIST', '?')}"
    found["tasks"] = environ.get("SLURM_STEP_NUM_TASKS" if started_by(environ) == "srun" else "SLURM_NTASKS", "?")
    end = end_time(environ)
    found["time left"] = "no limit known" if end is None else f"{end - time.time():.0f} s"
    if started_by(environ) == "srun":
        found["srun --mpi"] = environ.get("SLURM_MPI_TYPE", "none")
    return found
