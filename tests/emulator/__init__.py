"""The CUDA kernels compiled for the CPU, and a launcher that runs them there; see emulator.hpp."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpisparse.backends.cuda import source

HEADER, RACES = (Path(__file__).parent / name for name in ("emulator.hpp", "races.cpp"))
ORDERS = ("forward", "reversed", "shuffled")
COMPILER = os.environ.get("CXX") or shutil.which("g++") or "g++"
FLAGS = ["-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-w"]
ALIGNED = ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]  # a vector that begins elsewhere is a fault
LINKER = ["-Wl,-Bsymbolic"]


def kernels_in(text: str) -> list[str]:
    """Return the names of the kernels in a source."""
    return re.findall(r'extern "C" __global__ void\s+(?:__launch_bounds__\(\w+\)\s*)?(\w+)\(', text)


def build(text: str, *, block: int, scan: int, sanitize: str = "") -> Path:
    """Compile kernels to a shared library, once per user, source and options.

    sanitize: "address", or "thread" with hooks of our own, which find races; the sanitizer's library is not linked then.
    """
    flags = [*FLAGS, *ALIGNED, *source.defines(block, scan), *(["-g"] if sanitize == "address" else [])]
    checked = [f"-fsanitize={sanitize}"] if sanitize else []
    text = "\n".join([text, *(f"EMULATE({name})" for name in kernels_in(text))])
    header = _header([*flags, *checked])
    library = _place() / f"{_digest(str(header), RACES.read_text(), text)}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=_place()) as scratch:
            made, file = Path(scratch) / "kernels.so", Path(scratch) / "kernels.cpp"
            file.write_text(f'#include "{header}"\n{text}')
            if sanitize == "thread":
                objects = str(Path(scratch) / "kernels.o")
                subprocess.run([COMPILER, *flags, *checked, "-c", "-o", objects, str(file)], check=True)
                sources = [objects, str(RACES)]
            else:
                sources = [*checked, str(file)]
            subprocess.run([COMPILER, *flags, *LINKER, "-o", str(made), *sources], check=True)
            made.replace(library)
    return library


def _place() -> Path:
    """Where this user's compiled kernels are."""
    place = Path(tempfile.gettempdir()) / f"mpisparse-emulator-{os.getuid()}"
    place.mkdir(exist_ok=True)
    return place


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join([COMPILER, *texts]).encode()).hexdigest()[:24]


def _header(flags: Sequence[str]) -> Path:
    """The emulator's header, compiled once for these flags: that takes longer than most kernels."""
    text = HEADER.read_text()
    header = _place() / f"{_digest(*flags, text)}.hpp"
    compiled = header.with_suffix(".hpp.gch")
    if not compiled.exists():
        with tempfile.TemporaryDirectory(dir=_place()) as scratch:
            made = Path(scratch) / "made"
            made.write_text(text)
            made.replace(header)
            subprocess.run([COMPILER, *flags, "-x", "c++-header", "-o", str(made), str(header)], check=True)
            made.replace(compiled)
    return header


class DamageError(AssertionError):
    """A kernel hung, raced or wrote beyond its memory."""


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
        emulator, later = cls.emulator, (kwargs or {}).get("non_blocking", False)
        if name == "cpu" or (name == "to" and torch.device(args[1]).type == "cpu"):
            emulator.copied_out += args[0].nbytes
            host = torch.full_like(plain(args[0]), RUBBISH)
            return emulator.copy(host, args[0], wait=not later)
        if name == "copy_":
            cls._count_copy(args[0], args[1])
            return emulator.copy(args[0], args[1], wait=not isinstance(args[0], OnDevice) and not later, pinned=later)
        if name == "__setitem__" and isinstance(args[2], torch.Tensor):
            args[0][args[1]].copy_(args[2])
            return None
        if name in ("fill_", "zero_", "__setitem__"):
            filled = plain(args[0])[args[1]] if name == "__setitem__" else plain(args[0])
            emulator.enqueue(functools.partial(filled.fill_, 0 if name == "zero_" else args[-1]))
            return args[0]
        if name == "new_empty":
            return emulator.empty(args[1], args[0].dtype)
        if name == "clone":
            return emulator.copy(emulator.empty(len(args[0]), args[0].dtype), args[0])
        if name not in VIEWS:
            emulator.flush()
        if any(isinstance(a, torch.Tensor) and not isinstance(a, OnDevice) for a in args):
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")
        result = super().__torch_function__(func, types, args, kwargs or {})
        if emulator.lazy and name not in VIEWS and isinstance(result, OnDevice) and not any(result is a for a in args):
            emulator.free_in_order(result)
        return result

    @classmethod
    def _count_copy(cls, target: Any, source: Any) -> None:
        if isinstance(target, OnDevice) and not isinstance(source, OnDevice):
            cls.emulator.copied_in += source.nbytes if isinstance(source, torch.Tensor) else 0
        elif not isinstance(target, OnDevice):
            cls.emulator.copied_out += source.nbytes


RUBBISH = 119  # what memory holds that a copy has not reached
# What a stream does not order: it touches no element.
VIEWS = {
    "__getitem__", "__get__", "__len__", "view", "detach", "data_ptr", "as_subclass", "untyped_storage", "size",
    "numel", "dim", "element_size", "narrow", "reshape", "is_contiguous", "stride", "is_floating_point",
}  # fmt: skip
READS = {
    "numpy", "tolist", "item", "__array__", "__bool__", "__float__", "__int__", "__index__", "__contains__", "__iter__",
    "__dlpack__", "equal", "allclose", "is_nonzero",
}  # fmt: skip


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the host."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


class Emulator:
    """A launcher (mpisparse.backends.cuda.launcher) whose device is this process.

    lazy: launches, fills and copies wait in a queue, the stream, until someone waits for them; so a missing wait shows.
    thread: the only one that may use the device, if one is named.
    """

    def __init__(
        self, *, block: int = 256, scan: int = 1024, order: str = "forward", seed: int = 0, text: str | None = None,
        sanitize: str = "", lazy: bool = False,
    ) -> None:  # fmt: skip
        self.block, self.scan = block, scan
        self.library = ctypes.CDLL(str(build(text or source.joined(), block=block, scan=scan, sanitize=sanitize)))
        self.library.device_allocate.restype = ctypes.c_void_p
        self.library.device_allocate.argtypes = [ctypes.c_size_t]
        self.library.device_free.argtypes = [ctypes.c_void_p]
        self.library.device_free.restype = ctypes.c_bool
        self.library.last_failure.restype = ctypes.c_char_p
        self.order, self.seed = order, seed
        self.lazy = lazy
        self.thread: int | None = None
        self.capturing = False
        self.queue: list[Callable[[], Any]] = []
        self.done = 0  # of what was in it
        self.lock = threading.RLock()  # an event may be waited for on another thread
        self.launches: list[str] = []
        self.copied_in = self.copied_out = self.waits = 0
        self.copies = self.stops = self.allocations = 0  # stops: how often the host waited for the device, for any reason
        self.damaged = 0
        self.kind: type[OnDevice] = type("OnDevice", (OnDevice,), {"emulator": self})

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A vector full of rubbish, with guards on both sides that are looked at when it is freed."""
        self._check_thread()
        self.allocations += 1
        nbytes = max(1, count * dtype.itemsize)
        address = int(self.library.device_allocate(nbytes))
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        weakref.finalize(memory, self._free, address)
        whole = torch.frombuffer(memory, dtype=torch.uint8)[: count * dtype.itemsize]
        return whole.view(dtype).as_subclass(self.kind)

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The host's memory, which copies read when their turn comes."""
        return torch.empty(count, dtype=dtype).fill_(RUBBISH)

    @property
    def stream(self) -> int:
        """There is one."""
        return 0

    def mark(self) -> Callable[[], None]:
        """What does all that is in the stream now, as an event that is waited for; any thread may call it."""
        last = len(self.queue) + self.done

        def wait() -> None:
            with self.lock:
                while self.queue and self.done < last:
                    self._do_next()

        return wait

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the model as one on the device."""
        return tensor.detach().as_subclass(self.kind)

    def enqueue(self, work: Callable[[], Any]) -> None:
        """Do some work when its turn comes: at once, unless the stream is lazy."""
        if self.lazy:
            self.queue.append(work)
        else:
            work()

    def flush(self) -> None:
        """Wait for the stream: do all that is in it."""
        with self.lock:
            while self.queue:
                self._do_next()

    def _do_next(self) -> None:
        self.done += 1
        self.queue.pop(0)()

    def copy(self, target: torch.Tensor, values: torch.Tensor, *, wait: bool = False, pinned: bool = False) -> torch.Tensor:
        """Copy in the order of the stream. The host's memory is read when its turn comes only if it is pinned."""
        self._check_thread()
        here = plain(values)
        from_host = not isinstance(values, OnDevice)
        self.copies += from_host or not isinstance(target, OnDevice)
        self.stops += wait or (from_host and not pinned)  # torch waits for a copy from memory that is not pinned
        if not isinstance(values, OnDevice) and not pinned:
            here = here.clone()
        self.enqueue(functools.partial(plain(target).copy_, here))
        if wait:
            self.flush()
        return target

    def _check_thread(self) -> None:
        assert self.thread in (None, threading.get_ident()), "another thread than the device's uses it"

    def free_in_order(self, made: torch.Tensor) -> None:
        """Let what torch has made live until the stream has come to where it was let go, as torch's allocator does."""
        weakref.finalize(made, self.enqueue, functools.partial(len, made.untyped_storage()))

    def _free(self, address: int) -> None:
        """Free memory when the stream has come so far, as torch's allocator reuses it."""
        self.enqueue(functools.partial(self._free_now, address))

    def _free_now(self, address: int) -> None:
        self.damaged += not self.library.device_free(address)

    def launch(self, name: str, grid: int, block: int, args: Sequence[np.generic]) -> None:
        self._check_thread()
        assert all(isinstance(a, np.generic) for a in args), f"{name}: arguments must have the kernel's types: {args}"
        self.launches.append(name)
        self.enqueue(functools.partial(self._run, name, grid, block, list(args), self.seed + len(self.launches)))

    def _run(self, name: str, grid: int, block: int, args: Sequence[np.generic], seed: int) -> None:
        self.library.set_order(ORDERS.index(self.order), seed)
        cells = [np.array([a]) for a in args]
        places = (ctypes.c_void_p * len(cells))(*(c.ctypes.data for c in cells))
        sizes = (ctypes.c_int * len(cells))(*(c.itemsize for c in cells))
        outcome = getattr(self.library, f"launch_{name}")(grid, block, places, sizes, len(cells))
        if outcome > 0:
            raise TypeError(f"{name}: argument {outcome} of {len(cells)} is not of the kernel's size")
        if outcome < 0:
            raise DamageError(f"{name}: {self.library.last_failure().decode()}")

    @contextlib.contextmanager
    def beginning_with(self, block: int) -> Iterator[None]:
        """Number the blocks of launches from here on: the last ones of a grid too large to run."""
        self.library.begin_with_block(block)
        try:
            yield
        finally:
            self.library.begin_with_block(0)

    def synchronize(self, tensor: torch.Tensor) -> None:
        """In place of mpisparse.comm.device_memory.synchronize: note that someone waited."""
        assert isinstance(tensor, self.kind), "only tensors of the device are waited for"
        self.waits += 1
        self.stops += 1
        self.flush()

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
