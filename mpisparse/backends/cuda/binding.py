"""The only module that imports cupy: compile the kernels with NVRTC, launch them on torch's current stream.

Memory is torch's: its allocator follows the current stream, so freed memory is not reused too early. CuPy's own RawModule
would add -ftz=true to the options and flush denormals, so this calls NVRTC directly and loads the cubin.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import cupy
import numpy as np
import torch
from cupy.cuda import nvrtc

from mpisparse.backends.cuda import cache, source
from mpisparse.backends.cuda.launcher import BLOCK, SCAN
from mpisparse.errors import ConfigurationError


@functools.cache
def compile_cubin(capability: str) -> bytes:
    """Compile the kernels for a compute capability such as "90"; needs no GPU."""
    return _whole(_compiled(f"sm_{capability}", nvrtc.getCUBIN))


@functools.cache
def compile_for(capability: str) -> bytes:
    """Take the kernels for a GPU from the cache on disk, or compile them and put them there.

    NVRTC does not know GPUs that are newer: they get PTX for the newest that it knows, which the driver translates.
    """
    known = nvrtc.getSupportedArchs() if hasattr(nvrtc, "getSupportedArchs") else [int(capability)]
    older = [arch for arch in known if arch < int(capability)]
    if int(capability) not in known and not older:
        least = min(known)
        raise ConfigurationError(f"NVRTC compiles for compute capability {least} and newer, the GPU has {capability}")
    chosen = f"sm_{capability}" if int(capability) in known else f"compute_{max(older)}"
    key = (source.joined(), *_options(chosen), str(nvrtc.getVersion()))
    if chosen.startswith("sm_"):
        return cache.fetch(key, lambda: compile_cubin(capability))
    return cache.fetch(key, lambda: _compiled(chosen, nvrtc.getPTX))


def versions() -> tuple[tuple[int, int], int]:
    """The versions of NVRTC and of the driver."""
    major, minor = nvrtc.getVersion()
    return (major, minor), int(cupy.cuda.runtime.driverGetVersion())


def _options(architecture: str) -> tuple[str, ...]:
    return (f"--gpu-architecture={architecture}", *source.EXACT, *source.defines(), "-std=c++17")


def _compiled(architecture: str, get: Callable[[Any], Any]) -> bytes:
    program = nvrtc.createProgram(source.joined(), "mpisparse.cu", (), ())
    try:
        nvrtc.compileProgram(program, _options(architecture))
        made = get(program)
        return made.encode() if isinstance(made, str) else bytes(made)
    except nvrtc.NVRTCError as error:
        raise ConfigurationError(f"NVRTC does not compile the kernels: {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


def _whole(cubin: bytes) -> bytes:
    """Put back the zero byte that CuPy takes from a cubin's end, as if it ended a string: its headers must be whole."""
    segments, sections = struct.unpack_from("<2Q", cubin, 32)  # of the ELF header: where these tables begin,
    a_segment, of_segments, a_section, of_sections = struct.unpack_from("<4H", cubin, 54)  # and their entries
    return cubin.ljust(max(segments + a_segment * of_segments, sections + a_section * of_sections), b"\0")


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
            self.module.load(compile_for(cupy.cuda.Device().compute_capability))
        self.functions: dict[str, Any] = {}

    @property
    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    @property
    def stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=self.device)

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def mark(self) -> Callable[[], object]:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        wait: Callable[[], object] = event.synchronize
        return wait

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
            yield Stream(self.stream)
