"""What started this process, and whether its launcher and MPI agree on the number of processes. No MPI, no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mpisparse.errors import ConfigurationError

MPIRUN_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PRTE_LAUNCHED", "MPI_LOCALNRANKS")  # set by mpirun of Open MPI and MPICH
PMI = {"openmpi": "pmix", "mpich": "pmi2", "intel": "pmi2", "cray": "cray_shasta"}
WORDS = (("cray", "cray"), ("intel", "intel"), ("openmpi", "open"), ("mpich", "mpich"))  # in the names of libraries
GROUP = "pass comm=torch.distributed.group.WORLD (after init_process_group)"
MEANT = "if separate exchanges are what you want, pass comm=mpi4py.MPI.COMM_WORLD"


def started_by(environ: Mapping[str, str] = os.environ) -> str:
    """Return what started this process: torchrun, mpirun, srun or none; the innermost, as variables are inherited."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun"
    if any(name in environ for name in MPIRUN_VARIABLES):
        return "mpirun"
    return "srun" if "SLURM_STEP_ID" in environ else "none"


def first_task(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this task should print for all tasks, even if MPI sees each as a world of its own."""
    rank = {"srun": "SLURM_PROCID", "torchrun": "RANK"}.get(started_by(environ), "")
    return environ.get(rank, "0") == "0"


def kind_of(library: str) -> str | None:
    """Return the family of an MPI library by its name, or None."""
    return next((kind for kind, word in WORDS if word in library.lower()), None)


def separate_worlds(size: int, library: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return what to change if more processes were started than MPI sees ranks, which would train separate models.

    Only too few ranks are an error. If MPI sees more, they do see each other, and the variable belongs to something else.
    """
    launcher = started_by(environ)
    if _more(environ, "WORLD_SIZE", size):
        return _under_torch(size, library, launcher, environ["WORLD_SIZE"])
    own = "OMPI_COMM_WORLD_SIZE" if kind_of(library) == "openmpi" else "PMI_SIZE"
    if launcher == "mpirun" and environ.get(own) == str(size):
        return None  # other variables come from the environment that mpirun was started in
    if launcher == "srun":
        return _under_srun(size, library, environ)
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if _more(environ, name, size):
            return (
                f"{environ[name]} processes were started ({name}), but {library}, which mpi4py uses, sees {size} of them, "
                f"so separate models would be trained; use the mpirun of {library}, or {GROUP}; {MEANT}"
            )
    return None


def _more(environ: Mapping[str, str], name: str, size: int) -> bool:
    """Whether a variable names more processes than MPI sees."""
    value = environ.get(name, "")
    return value.isdigit() and int(value) > size


def _under_torch(size: int, library: str, launcher: str, started: str) -> str:
    who = "torchrun started" if launcher == "torchrun" else "WORLD_SIZE says"
    other = "start with mpirun" if launcher == "torchrun" else "unset WORLD_SIZE if it is of something else"
    return (
        f"{who} {started} processes, but {library} sees {size} of them, so separate models would be trained; {GROUP}, or "
        f"{other}. Checkpoints and should_stop() need the GradientSync, as sync=. Or, {MEANT}"
    )


def _under_srun(size: int, library: str, environ: Mapping[str, str]) -> str | None:
    tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
    if not tasks.isdigit() or size >= int(tasks):
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
    """Raise ConfigurationError if the processes of this job do not see each other."""
    problem = separate_worlds(size, library)
    if problem:
        raise ConfigurationError(problem)
