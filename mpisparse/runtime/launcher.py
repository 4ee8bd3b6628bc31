"""Which MPI is here, and what starts its ranks in a Slurm job. No MPI, no torch."""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from mpisparse.comm.world import PMI
from mpisparse.stopping import command_output

MPI_NAMES = {"openmpi": "Open MPI", "mpich": "MPICH", "intel": "Intel MPI", "cray": "Cray MPICH"}


@dataclass(frozen=True)
class JobLauncher:
    """The MPI family, the command that starts its ranks, and the reason for the choice, for a comment line."""

    mpi: str
    command: str
    why: str


def find_mpi() -> tuple[str, str] | None:
    """Return the family of the MPI here and how it was recognized; runs nothing but mpirun --version."""
    if "CRAY_MPICH_VERSION" in os.environ:
        return "cray", f"Cray MPICH {os.environ['CRAY_MPICH_VERSION']} is loaded"
    own = Path(sys.executable).with_name("mpirun")
    for path, where in (
        (str(own) if own.exists() else None, "next to this Python"),
        (shutil.which("mpirun"), "on PATH"),
    ):
        version = command_output(path, "--version") if path else None
        for mark, mpi in (("Open MPI", "openmpi"), ("Open RTE", "openmpi"), ("Intel", "intel"), ("HYDRA", "mpich")):
            if version and mark in version:
                return mpi, f"mpirun {where} is {MPI_NAMES[mpi]}'s"
    return None


def pmi_offered() -> set[str] | None:
    """Return the values of --mpi= that srun offers here, or None without Slurm."""
    listed = command_output("srun", "--mpi=list")
    return None if listed is None else set(re.findall(r"[a-z][a-z0-9_]+", listed.partition("\n")[2]))


def choose_launcher(mpi: str = "auto", launcher: str = "auto") -> JobLauncher:
    """Choose the MPI and its launcher: as requested, or by what is found."""
    found = (mpi, f"{MPI_NAMES[mpi]} was requested") if mpi != "auto" else find_mpi()
    mpi, why = found or ("openmpi", "no MPI was found here: Open MPI is assumed")
    pmi, offered = PMI[mpi], pmi_offered()
    if launcher == "mpirun":
        return JobLauncher(mpi, "mpirun", f"{why}; mpirun starts it without Slurm's PMI")
    if launcher == "srun" or offered is None or pmi in offered:
        known = " (not checked: no Slurm here)" if offered is None else ", which this Slurm offers"
        known = "" if launcher == "srun" else known
        return JobLauncher(mpi, f"srun --mpi={pmi}", f"{why}; srun starts it with --mpi={pmi}{known}")
    return JobLauncher(mpi, "mpirun", f"{why}; it needs srun --mpi={pmi}, which this Slurm lacks: mpirun")
