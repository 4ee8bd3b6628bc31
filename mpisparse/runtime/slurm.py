"""What the environment of a Slurm job tells. No MPI, no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from mpisparse.comm.world import started_by
from mpisparse.stopping import command_output, end_time


def pmi(environ: Mapping[str, str] = os.environ) -> str:
    """Return how the ranks learned of each other."""
    if "PMIX_NAMESPACE" in environ:
        return f"pmix {environ.get('PMIX_VERSION', '')}".strip()
    if "PMI_FD" in environ or "PMI_RANK" in environ:
        return "pmi2" if started_by(environ) == "srun" else "pmi"
    return "none"


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
