"""The device as CuPy binds it: compiles the kernels with NVRTC, launches them on torch's current stream. Imports cupy.

Memory is torch's: its allocator knows the current stream, so that what is freed here is used again in the right order.
CuPy's own RawModule would add -ftz=true to the options, and denormals would be lost: so NVRTC is called directly, and the
cubin it makes is loaded.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import cupy
import numpy as np
import torch
from cupy.cuda import nvrtc
from numpy.typing import NDArray

from mpisparse.arrays import Bytes
from mpisparse.backends.cuda import source
from mpisparse.backends.cuda.launcher import BLOCK, SCAN
from mpisparse.errors import ConfigurationError

HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3


@functools.cache
def compile_cubin(capability: str) -> bytes:
    """The kernels as machine code for a compute capability such as "90"; needs no GPU."""
    options = (f"--gpu-architecture=sm_{capability}", *source.EXACT, *source.defines(), "-std=c++17")
    program = nvrtc.createProgram(source.joined(), "mpisparse.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        raise ConfigurationError(f"NVRTC does not compile the kernels: {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


class Stream(NamedTuple):
    """A stream of torch's; CuPy asks a stream for its address alone."""

    ptr: int

    def synchronize(self) -> None:
        """Wait for all that was launched on it."""
        cupy.cuda.runtime.streamSynchronize(self.ptr)


class CupyLauncher:
    """One CUDA device, and whatever stream of torch is current on it when something is launched."""

    block, scan = BLOCK, SCAN

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)
        with cupy.cuda.Device(self.device.index):
            self.module = cupy.cuda.function.Module()
            self.module.load(compile_cubin(cupy.cuda.Device().compute_capability))
        self.functions: dict[str, Any] = {}

    def allocate(self, nbytes: int) -> tuple[int, object]:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return memory.data_ptr(), memory

    def pinned(self, nbytes: int) -> Bytes:
        values: Bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        return values

    def launch(self, name: str, grid: int, block: int, args: Sequence[np.generic]) -> None:
        if name not in self.functions:
            self.functions[name] = self.module.get_function(name)
        with self._current() as stream:
            self.functions[name]((grid,), (block,), tuple(args), stream=stream)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        with self._current() as stream:
            cupy.cuda.runtime.memcpyAsync(target, source, nbytes, DEVICE_TO_DEVICE, stream.ptr)

    def fill(self, target: int, value: int, nbytes: int) -> None:
        with self._current() as stream:
            cupy.cuda.runtime.memsetAsync(target, value, nbytes, stream.ptr)

    def copy_in(self, target: int, source: NDArray[Any]) -> None:
        with self._current() as stream:
            cupy.cuda.runtime.memcpyAsync(target, source.ctypes.data, source.nbytes, HOST_TO_DEVICE, stream.ptr)
            stream.synchronize()

    def copy_out(self, target: NDArray[Any], source: int) -> None:
        with self._current() as stream:
            cupy.cuda.runtime.memcpyAsync(target.ctypes.data, source, target.nbytes, DEVICE_TO_HOST, stream.ptr)
            stream.synchronize()

    def synchronize(self) -> None:
        with self._current() as stream:
            stream.synchronize()

    @contextlib.contextmanager
    def _current(self) -> Iterator[Stream]:
        """Torch's current stream of the device, while the device is the current one: stream 0 is of that."""
        with cupy.cuda.Device(self.device.index):
            yield Stream(torch.cuda.current_stream(self.device).cuda_stream)
