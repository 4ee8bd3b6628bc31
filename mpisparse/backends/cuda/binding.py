"""The only module that imports cupy: compile the kernels with NVRTC, launch them on torch's current stream.

Memory is torch's: its allocator follows the current stream, so freed memory is not reused too early. CuPy's own RawModule
would add -ftz=true to the options and flush denormals, so this calls NVRTC directly and loads the cubin.
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

from mpisparse.backends.cuda import source
from mpisparse.backends.cuda.launcher import BLOCK, SCAN
from mpisparse.errors import ConfigurationError


@functools.cache
def compile_cubin(capability: str) -> bytes:
    """Compile the kernels for a compute capability such as "90"; needs no GPU."""
    options = (f"--gpu-architecture=sm_{capability}", *source.EXACT, *source.defines(), "-std=c++17")
    program = nvrtc.createProgram(source.joined(), "mpisparse.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        raise ConfigurationError(f"NVRTC does not compile the kernels: {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


def mpi_view(tensor: torch.Tensor) -> Any:
    """View a tensor of a CUDA device as a CuPy array, which mpi4py takes as a device buffer."""
    return cupy.asarray(tensor)


class Stream(NamedTuple):
    """A stream of torch's; CuPy only asks a stream for its address."""

    ptr: int


class CupyLauncher:
    """One CUDA device; launches go to torch's current stream on it."""

    block, scan = BLOCK, SCAN

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)
        with cupy.cuda.Device(self.device.index):
            self.module = cupy.cuda.function.Module()
            self.module.load(compile_cubin(cupy.cuda.Device().compute_capability))
        self.functions: dict[str, Any] = {}

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=self.device)

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def launch(self, name: str, grid: int, block: int, args: Sequence[np.generic]) -> None:
        if name not in self.functions:
            self.functions[name] = self.module.get_function(name)
        with self._current() as stream:
            self.functions[name]((grid,), (block,), tuple(args), stream=stream)

    @contextlib.contextmanager
    def _current(self) -> Iterator[Stream]:
        """Make the device current, since stream 0 belongs to the current device; yield torch's current stream."""
        with cupy.cuda.Device(self.device.index):
            yield Stream(torch.cuda.current_stream(self.device).cuda_stream)
