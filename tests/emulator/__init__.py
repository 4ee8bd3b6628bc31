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
import torch
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


class OnDevice(torch.Tensor):
    """A tensor that stands for one in a device's memory, which is secretly the host's.

    As on a GPU, nothing is read on the host but by cpu() or copy_(), and no operation mixes it with tensors of the host.
    Views and results are of the same class.
    """

    emulator: Emulator

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name in READS:
            raise TypeError(
                f"{name}: this tensor is in a device's memory: bring it to the host with the backend's to_host()"
            )
        if name == "cpu":
            cls.emulator.copied_out += args[0].nbytes
            return plain(args[0]).clone()
        if name in ("copy_", "__setitem__"):
            cls._count_copy(args[0], args[-1])
        elif any(isinstance(a, torch.Tensor) and not isinstance(a, OnDevice) for a in args):
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def _count_copy(cls, target: Any, source: Any) -> None:
        if isinstance(target, OnDevice) and not isinstance(source, OnDevice):
            cls.emulator.copied_in += source.nbytes if isinstance(source, torch.Tensor) else 0
        elif not isinstance(target, OnDevice):
            cls.emulator.copied_out += source.nbytes


READS = {
    "numpy", "tolist", "item", "__array__", "__bool__", "__float__", "__int__", "__index__", "__contains__", "__iter__",
    "__dlpack__", "equal", "allclose", "is_nonzero",
}  # fmt: skip


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the host."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


class Emulator:
    """A launcher (mpisparse.backends.cuda.launcher) whose device is this process."""

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
        self.copied_in = self.copied_out = self.waits = 0
        self.damaged = 0
        self.kind: type[OnDevice] = type("OnDevice", (OnDevice,), {"emulator": self})

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A vector full of rubbish, with guards on both sides that are looked at when it is freed."""
        nbytes = max(1, count * dtype.itemsize)
        address = int(self.library.device_allocate(nbytes))
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        weakref.finalize(memory, self._free, address)
        whole = torch.frombuffer(memory, dtype=torch.uint8)[: count * dtype.itemsize]
        return whole.view(dtype).as_subclass(self.kind)

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the model as one on the device."""
        return tensor.detach().as_subclass(self.kind)

    def _free(self, address: int) -> None:
        self.damaged += not self.library.device_free(address)

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

    def synchronize(self, tensor: torch.Tensor) -> None:
        """In place of mpisparse.comm.device_memory.synchronize: note that someone waited."""
        assert isinstance(tensor, self.kind), "only tensors of the device are waited for"
        self.waits += 1

    def mpi_view(self, tensor: torch.Tensor) -> DeviceBuffer:
        """In place of mpisparse.comm.device_memory.mpi_view: MPI may take device memory, as it is the host's."""
        assert isinstance(tensor, self.kind), "only tensors of the device are viewed"
        return DeviceBuffer(plain(tensor).numpy())


class DeviceBuffer:
    """The host's memory under the interface of a CUDA array: mpi4py believes it to be on a device."""

    def __init__(self, values: NDArray[Any]) -> None:
        self.values = values

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.values.__array_interface__, "version": 3}


@functools.cache
def available() -> bool:
    """Tell whether a compiler is installed."""
    return shutil.which(COMPILER) is not None
