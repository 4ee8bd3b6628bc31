"""What is here: MPI, kernels, CPU, GPUs, Slurm; and what that means for a run."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from mpisparse import __version__

CPU_FEATURES = ("avx2", "f16c", "fma", "avx512f", "avx512bw", "amx_tile", "asimd", "sve")
SLURM_VARIABLES = ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_CPUS_PER_TASK", "SLURM_MPI_TYPE")


def run(*, as_json: bool) -> int:
    """Print what is here, on rank 0; collective under mpirun. Returns 0, or 1 if MPI cannot be used."""
    mpi, rank = _mpi()
    if rank:
        return 0
    found: dict[str, dict[str, Any]] = {
        "mpisparse": {"version": __version__, "python": platform.python_version()},
        "mpi": mpi,
        "kernels": _kernels(),
        "cpu": _cpu(),
        "gpu": _gpus(),
        "slurm": _slurm(),
    }
    if as_json:
        print(json.dumps(found))
    else:
        for part, facts in found.items():
            for i, (key, value) in enumerate(facts.items()):
                print(f"{part if i == 0 else '':<10} {key:<12} {value}")
    return 1 if "error" in mpi else 0


def _mpi() -> tuple[dict[str, Any], int]:
    """The library, and how the ranks lie on hosts."""
    try:
        from mpi4py import MPI

        from mpisparse.exchange import Exchange, cuda_support, library
    except (ImportError, RuntimeError) as error:
        hint = "load your site's MPI module, or install PyPI's Open MPI: pip install 'mpisparse[mpi]'"
        return {"error": f"{error}; {hint}"}, 0
    exchange = Exchange(MPI.COMM_WORLD)
    hosts = Counter(exchange.gather_texts(platform.node()))
    facts = {**library(), "mpi4py": importlib.metadata.version("mpi4py"), "cuda-aware": cuda_support()}
    facts["ranks"] = f"{exchange.size} on {', '.join(f'{host} ({n})' for host, n in hosts.items())}"
    expected = os.environ.get("SLURM_NTASKS")
    if exchange.size == 1 and expected not in (None, "1") and "SLURM_STEP_ID" in os.environ:
        facts["warning"] = (
            f"Slurm started {expected} tasks, but this MPI sees one rank: change srun's --mpi= (srun --mpi=list)"
        )
    return facts, exchange.rank


def _kernels() -> dict[str, Any]:
    import warnings

    import torch

    from mpisparse.device import load_backend

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backend = load_backend()
    facts: dict[str, Any] = {"backend": backend.name}
    if backend.name == "native":
        facts["in use"] = backend.isa()
        facts["available"] = ", ".join(backend.isas())
        facts["openmp"] = "yes" if backend.openmp else "no: one thread"
    for warning in caught:
        facts["warning"] = str(warning.message)
    return {**facts, "threads": torch.get_num_threads(), "torch": torch.__version__}


def _cpu() -> dict[str, Any]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {"model": platform.processor() or platform.machine()}
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    return {
        "model": fields.get("model name", platform.machine()),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} for this process",
        "features": " ".join(name for name in CPU_FEATURES if name in flags) or "none of interest",
    }


def _gpus() -> dict[str, Any]:
    import torch

    cupy = _version("cupy-cuda13x") or _version("cupy-cuda12x")
    return {
        "torch": f"{torch.cuda.device_count()} devices" if torch.cuda.is_available() else "no CUDA device",
        "cupy": cupy or "not installed",
    }


def _version(package: str) -> str | None:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return None


def _slurm() -> dict[str, Any]:
    variables = {key: os.environ[key] for key in SLURM_VARIABLES if key in os.environ}
    if shutil.which("sinfo") is None:
        return {"installed": "no", **variables}
    try:
        version = subprocess.run(["sinfo", "--version"], capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        version = f"sinfo does not answer ({error})"
    return {"installed": version, **(variables or {"job": "none"})}


if __name__ == "__main__":
    sys.exit(run(as_json=False))
