"""Which backend runs: CUDA kernels on a CUDA device; on the host native kernels, or NumPy where they could not be built.

`MPISPARSE_BACKEND=native|numpy` chooses on the host; `MPISPARSE_ISA=generic|avx2|avx512` limits the native instruction set.
"""

from __future__ import annotations

import functools
import os
import types
import warnings
from pathlib import Path
from typing import Any

import torch

from mpisparse.backends import host_arrays
from mpisparse.backends.protocol import Backend
from mpisparse.errors import ConfigurationError, check_choice

BACKENDS = ("native", "numpy")
ARRAYS = ("empty", "array_of", "from_host", "to_host", "copy", "fill", "view_as", "search", "pick", "bytes_at", "put_bytes")


def local_device(local_rank: int) -> torch.device:
    """Return the CUDA device for a rank's place on its host, and make it torch's current one.

    CUDA_VISIBLE_DEVICES decides which devices there are, and in what order; a rank that sees only one device gets that.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = "" if seen is None else f" (CUDA_VISIBLE_DEVICES={seen})"
        raise ConfigurationError(f"torch {torch.__version__} finds no CUDA device{hint}; see what mpisparse doctor says")
    device = torch.device("cuda", local_rank % count)
    torch.cuda.set_device(device)
    return device


@functools.cache
def load_backend(name: str | None = None, device: torch.device | None = None) -> Any:
    """Return the backend of a CUDA device; on the host by name, by MPISPARSE_BACKEND, or the fastest available."""
    if device is not None and device.type == "cuda":
        return _cuda(device)
    wanted = name or os.environ.get("MPISPARSE_BACKEND") or None
    if wanted is not None:
        check_choice("backend (MPISPARSE_BACKEND)", wanted, BACKENDS)
    if wanted == "numpy":
        return _numpy()
    try:
        return _native()
    except ImportError as error:
        if wanted == "native":
            raise ConfigurationError(f"native kernels were asked for but cannot be loaded ({error})") from error
        warnings.warn(
            f"mpisparse runs without its native kernels, because {_why_not_native()}. The bits are the same, but "
            "accumulation and selection take several times longer. MPISPARSE_BACKEND=numpy silences this.",
            stacklevel=2,
        )
        return _numpy()


def _why_not_native() -> str:
    """Return why there are no native kernels, and what to do."""
    home = Path(__file__).parents[2]
    if (home / "kernels" / "CMakeLists.txt").is_file():  # the clone, whatever is installed
        return (
            f"it is imported from its sources in {home}, where none are compiled: start in another directory, or "
            "run pip install -e there, with a C++ compiler"
        )
    return "no C++ compiler was found when it was installed: install one, and mpisparse again"


def _numpy() -> Any:
    from mpisparse.backends import numpy_backend

    return numpy_backend


def _cuda(device: torch.device) -> Backend:
    try:
        from mpisparse.backends.cuda.binding import CupyLauncher
    except ImportError as error:
        raise ConfigurationError(
            f"the model is on {device}, but CuPy cannot be imported ({error}); install mpisparse[cuda13] or [cuda12]"
        ) from error
    from mpisparse.backends.cuda.backend import CudaBackend

    return CudaBackend(CupyLauncher(device), load_backend(), pooled=True)


def _native() -> Any:
    from mpisparse import _cpu

    isa = os.environ.get("MPISPARSE_ISA")
    if isa:
        check_choice("instruction set (MPISPARSE_ISA)", isa, _cpu.isas())
        _cpu.use_isa(isa)
    _cpu.use_threads(torch.get_num_threads())
    kernels = {key: getattr(_cpu, key) for key in dir(_cpu) if not key.startswith("_")}
    return types.SimpleNamespace(name="native", **kernels, **{key: getattr(host_arrays, key) for key in ARRAYS})
