"""What wrote a checkpoint, as far as results may depend on it."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from mpisparse.backends.device import load_backend
from mpisparse.checkpoint.store import Manifest
from mpisparse.version import __version__


def origin_of(sync: Any) -> dict[str, Any]:
    """What wrote a checkpoint, or would write one here: versions, threads, processor, scheme."""
    backend = load_backend()
    return {
        "mpisparse": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "kernels": backend.isa() if backend.name == "native" else backend.name,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "scheme": sync.scheme if sync is not None else None,
    }


def warn_of_origin(manifest: Manifest, sync: Any, rank: int) -> None:
    """Warn on rank 0 if torch, the thread count or the processor differ, which may change bits."""
    here = origin_of(sync)
    for key, meaning in (("torch", "torch"), ("threads", "the number of threads"), ("cpu", "the CPU's capability")):
        if manifest.origin[key] != here[key] and rank == 0:
            warnings.warn(
                f"{meaning} was {manifest.origin[key]} when the checkpoint was written and is {here[key]} now: "
                "the run continues, but its results may differ in the last bits",
                stacklevel=4,
            )
