"""mpisparse doctor: which MPI, kernels, CPU, GPUs and Slurm are here, and whether they work together."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mpisparse.comm.world import first_task, separate_worlds, started_by
from mpisparse.runtime import slurm
from mpisparse.version import __version__

CPU_FEATURES = ("avx2", "f16c", "fma", "avx512f", "avx512bw", "amx_tile", "asimd", "sve")


def run(*, as_json: bool) -> int:
    """Print what is here on rank 0; return 1 if MPI does not work like this, else 0. Collective under mpirun and srun."""
    mpi, rank = _mpi()
    if rank or not first_task():
        return 0
    found: dict[str, dict[str, Any]] = {
        "mpisparse": {"version": __version__, "python": platform.python_version()},
        "mpi": mpi,
        "kernels": _kernels(),
        "cpu": _cpu(),
        "gpu": _gpus(),
        "slurm": slurm.facts(),
    }
    if as_json:
        print(json.dumps(found))
    else:
        for part, facts in found.items():
            for i, (key, value) in enumerate(facts.items()):
                print(f"{part if i == 0 else '':<10} {key:<12} {value}")
    return 1 if "error" in mpi or "warning" in mpi else 0


def _mpi() -> tuple[dict[str, Any], int]:
    """Describe the library, how ranks were started, and their placement on hosts and cores; and return this rank."""
    try:
        from mpisparse.comm.exchange import Exchange
        from mpisparse.comm.mpi import cuda_awareness, everyone, library
    except (ImportError, RuntimeError) as error:
        hint = "load your site's MPI module, or install PyPI's Open MPI: pip install 'mpisparse[mpi]'"
        return {"error": f"{error}; {hint}"}, 0
    exchange = Exchange(everyone())
    hosts = exchange.gather_texts(platform.node())
    facts: dict[str, Any] = {
        **library(),
        "mpi4py": importlib.metadata.version("mpi4py"),
        "cuda-aware": str(cuda_awareness()),
    }
    facts["launcher"], facts["pmi"] = started_by(), slurm.pmi()
    facts["ranks"] = f"{exchange.size} on {', '.join(f'{host} ({n})' for host, n in Counter(hosts).items())}"
    facts["binding"] = _binding(hosts, exchange.gather_texts(_ranges(os.sched_getaffinity(0))))
    problem = separate_worlds(exchange.size, facts["name"])
    if problem:
        facts["warning"] = problem
    return facts, exchange.rank


def _binding(hosts: list[str], cores: list[str]) -> str:
    """Describe on which cores each rank may run."""
    if set(cores) == {_ranges(range(os.cpu_count() or 1))}:
        return f"none: every rank may run on all cores of its host ({cores[0]})"
    return ", ".join(f"r{rank} {host}:{own}" for rank, (host, own) in enumerate(zip(hosts, cores, strict=True)))


def _ranges(numbers: Iterable[int]) -> str:
    """Format a set of core numbers as ranges: 0-3+8."""
    ordered = sorted(numbers)
    starts = [n for n in ordered if n - 1 not in ordered]
    ends = [n for n in ordered if n + 1 not in ordered]
    return "+".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _kernels() -> dict[str, Any]:
    import warnings

    import torch

    from mpisparse.backends.device import load_backend

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
        "features": " ".join(name for name in CPU_FEATURES if name in flags) or "none that the kernels use",
    }


def _gpus() -> dict[str, Any]:
    import torch

    cupy = _version("cupy-cuda13x") or _version("cupy-cuda12x")
    facts = {
        "torch": f"{torch.cuda.device_count()} devices" if torch.cuda.is_available() else "no CUDA device",
        "cupy": cupy or "not installed",
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES", "all: CUDA_VISIBLE_DEVICES is not set"),
    }
    if torch.cuda.is_available():
        facts["names"] = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return facts


def _version(package: str) -> str | None:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(run(as_json=False))
