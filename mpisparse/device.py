"""Which kernels run: native CPU code, or NumPy where it could not be built.

`MPISPARSE_BACKEND=native|numpy` chooses; `MPISPARSE_ISA=generic|avx2|avx512` limits the native instruction set.
"""

from __future__ import annotations

import functools
import os
import types
import warnings
from typing import Any

import torch

from mpisparse import reference
from mpisparse.errors import ConfigurationError, check_choice

Backend = Any  # a namespace with the functions of mpisparse.reference; see there for what each does
BACKENDS = ("native", "numpy")
THREADED = (
    "accumulate_select", "accumulate_select_scored", "average_select", "accumulate", "select", "select_scored",
    "first_nonfinite", "histogram", "histogram_scored",
)  # fmt: skip


@functools.cache
def load_backend(name: str | None = None) -> Backend:
    """Return the kernels: by name, by MPISPARSE_BACKEND, or the fastest there are."""
    wanted = name or os.environ.get("MPISPARSE_BACKEND") or None
    if wanted is not None:
        check_choice("backend (MPISPARSE_BACKEND)", wanted, BACKENDS)
    if wanted == "numpy":
        return reference
    try:
        return _native()
    except ImportError as error:
        if wanted == "native":
            raise ConfigurationError(f"native kernels were asked for but cannot be loaded ({error})") from error
        warnings.warn(
            "mpisparse runs without its native kernels, because no C++ compiler was found when it was installed: the same "
            "bits, but accumulation and selection take several times longer. Install a compiler and mpisparse again; "
            "MPISPARSE_BACKEND=numpy silences this.",
            stacklevel=2,
        )
        return reference


def _native() -> Backend:
    from mpisparse import _cpu

    isa = os.environ.get("MPISPARSE_ISA")
    if isa:
        check_choice("instruction set (MPISPARSE_ISA)", isa, _cpu.isas())
        _cpu.use_isa(isa)
    functions = {key: getattr(_cpu, key) for key in dir(_cpu) if not key.startswith("_")}
    functions |= {key: _with_threads(functions[key]) for key in THREADED}
    return types.SimpleNamespace(**{**functions, "name": "native"})


def _with_threads(kernel: Any) -> Any:
    """Run a kernel on as many threads as torch uses now."""

    def run(*args: Any) -> Any:
        return kernel(*args, torch.get_num_threads())

    return run
