"""The CUDA kernels compiled for the CPU, and a launcher that runs them there; see emulator.hpp."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpisparse.backends.cuda import source

HEADER = Path(__file__).parent / "emulator.hpp"
ORDERS = ("forward", "reversed", "shuffled")
COMPILER = os.environ.get("CXX") or shutil.which("g++") or "g++"
FLAGS = ["-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-w"]
LINKER = ["-Wl,-Bsymbolic"]


def kernels_in(text: str) -> list[str]:
    """Return the names of the kernels in a source."""
    return re.findall(r'extern "C" __global__ void\s+(?:__launch_bounds__\(\w+\)\s*)?(\w+)\(', text)


def build(text: str, *, block: int, scan: int, sanitize: bool = False) -> Path:
    """Compile kernels to a shared library, once per user, source and options."""
    flags = [*FLAGS, *source.defines(block, scan), *(["-g", "-fsanitize=address"] if sanitize else [])]
    text = "\n".join([HEADER.read_text(), text, *(f"EMULATE({name})" for name in kernels_in(text))])
    digest = hashlib.sha256("\0".join([COMPILER, *flags, text]).encode()).hexdigest()[:24]
    place = Path(tempfile.gettempdir()) / f"mpisparse-emulator-{os.getuid()}"
    place.mkdir(exist_ok=True)
    library = place / f"{digest}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=place) as scratch:
            made, file = Path(scratch) / "kernels.so", Path(scratch) / "kernels.cpp"
            file.write_text(text)
            subprocess.run([COMPILER, *flags, *LINKER, "-o", str(made), str(file)], check=True)
            made.replace(library)
    return library


class DamageError(AssertionError):
    """A kernel hung or wrote beyond its memory."""


class Emulator:
    """A launcher (mpisparse.backends.cuda.launcher) whose device is this process and whose device memory is host memory."""

    def __init__(
        self, *, block: int = 256, scan: int = 1024, order: str = "forward", seed: int = 0, text: str | None = None,
        sanitize: bool = False,
    ) -> None:  # fmt: skip
        self.block, self.scan = block, scan
        self.library = ctypes.CDLL(str(build(text or source.joined(), block=block, scan=scan, sanitize=sanitize)))
        self.library.device_allocate.restype = ctypes.c_void_p
        self.library.device_allocate.argtypes = [ctypes.c_size_t]
        self.library.device_free.argtypes = [ctypes.c_void_p]
        self.library.device_free.restype = ctypes.c_bool
        self.library.last_failure.restype = ctypes.c_char_p
        self.order, self.seed = order, seed
        self.launches: list[str] = []
        self.copied_in = self.copied_out = 0
        self.damaged = 0

    def allocate(self, nbytes: int) -> tuple[int, object]:
        address = int(self.library.device_allocate(nbytes))
        owner = _Owner()
        weakref.finalize(owner, self._free, address)
        return address, owner

    def _free(self, address: int) -> None:
        self.damaged += not self.library.device_free(address)

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        return np.empty(nbytes, dtype=np.uint8)

    def launch(self, name: str, grid: int, block: int, args: Sequence[np.generic]) -> None:
        self.launches.append(name)
        self.library.set_order(ORDERS.index(self.order), self.seed + len(self.launches))
        cells = [np.array([a]) for a in args]
        assert all(isinstance(a, np.generic) for a in args), f"{name}: arguments must have the kernel's types: {args}"
        places = (ctypes.c_void_p * len(cells))(*(c.ctypes.data for c in cells))
        sizes = (ctypes.c_int * len(cells))(*(c.itemsize for c in cells))
        outcome = getattr(self.library, f"launch_{name}")(grid, block, places, sizes, len(cells))
        if outcome > 0:
            raise TypeError(f"{name}: argument {outcome} of {len(cells)} is not of the kernel's size")
        if outcome < 0:
            raise DamageError(f"{name}: {self.library.last_failure().decode()}")

    def copy(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def fill(self, target: int, value: int, nbytes: int) -> None:
        ctypes.memset(target, value, nbytes)

    def copy_in(self, target: int, source: NDArray[Any]) -> None:
        self.copied_in += source.nbytes
        ctypes.memmove(target, source.ctypes.data, source.nbytes)

    def copy_out(self, target: NDArray[Any], source: int) -> None:
        self.copied_out += target.nbytes
        ctypes.memmove(target.ctypes.data, source, target.nbytes)

    def synchronize(self) -> None:
        pass


class _Owner:
    """Owns a piece of device memory, which is freed with the last reference."""


@functools.cache
def available() -> bool:
    """Tell whether a compiler is installed."""
    return shutil.which(COMPILER) is not None
