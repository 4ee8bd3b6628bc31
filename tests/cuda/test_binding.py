"""The binding to CuPy, with a stand-in for CuPy: what is compiled and how, and on which stream kernels are launched.

Its names and arguments are CuPy's; what they do, the emulator does. That CuPy itself takes them is tested with CuPy, as far
as it goes without a driver. A GPU's own answer is in test_gpu.py.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from checks import CHECKS, Device
from emulator import DeviceBuffer, Emulator, available
from mpi4py import MPI

from mpisparse.backends import device
from mpisparse.backends.cuda.backend import CudaBackend
from mpisparse.comm.exchange import Exchange
from mpisparse.errors import ConfigurationError

STREAM = 77


class NVRTCError(Exception):
    pass


class StandIn:
    """The CuPy functions that the binding calls, with a record of their arguments."""

    def __init__(self) -> None:
        self.emulator = Emulator()
        self.options: tuple[str, ...] = ()
        self.loaded = b""
        self.streams: set[int] = set()
        self.current: list[int] = []
        self.waits: list[int] = []
        self.fails = False

    def modules(self) -> dict[str, types.ModuleType]:
        cupy, cuda = types.ModuleType("cupy"), types.ModuleType("cupy.cuda")
        cuda.nvrtc = types.SimpleNamespace(
            NVRTCError=NVRTCError,
            createProgram=lambda text, name, headers, names: text,
            compileProgram=self._compile,
            getCUBIN=lambda program: b"cubin",
            getProgramLog=lambda program: "line 1: no",
            destroyProgram=lambda program: None,
        )
        stand_in = self

        class CudaDevice:
            compute_capability = "90"

            def __init__(self, index: int = 0) -> None:
                self.index = index

            def __enter__(self) -> None:
                stand_in.current.append(self.index)

            def __exit__(self, *error: object) -> None:
                stand_in.current.pop()

        class Module:
            def load(self, cubin: bytes) -> None:
                stand_in.loaded = cubin

            def get_function(self, name: str) -> Any:
                def call(grid: tuple[int], block: tuple[int], args: tuple[Any, ...], *, stream: Any) -> None:
                    stand_in.note(stream.ptr)
                    stand_in.emulator.launch(name, *grid, *block, args)

                return call

        cuda.Device = CudaDevice
        cuda.function = types.SimpleNamespace(Module=Module)
        cupy.cuda = cuda
        cupy.asarray = lambda tensor: DeviceBuffer(tensor.numpy())
        return {"cupy": cupy, "cupy.cuda": cuda}

    def note(self, stream: int) -> None:
        """Every launch is on torch's stream, with the device the current one."""
        assert self.current == [1]
        self.streams.add(stream)

    def _compile(self, program: str, options: tuple[str, ...]) -> None:
        self.options = options
        if self.fails:
            raise NVRTCError


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    if not available():
        pytest.skip("no C++ compiler to build the emulator with")
    cupy = StandIn()
    for name, module in cupy.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "mpisparse.backends.cuda.binding", raising=False)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda n, dtype, device=None, pin_memory=False: empty(n, dtype=dtype))
    stream = types.SimpleNamespace(cuda_stream=STREAM, synchronize=lambda: cupy.waits.append(STREAM))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    device.load_backend.cache_clear()
    yield cupy
    device.load_backend.cache_clear()
    sys.modules.pop("mpisparse.backends.cuda.binding", None)


def test_a_model_on_a_gpu_has_cuda_kernels(stand_in: StandIn) -> None:
    backend = device.load_backend(device=torch.device("cuda", 1))
    assert isinstance(backend, CudaBackend)
    assert stand_in.loaded == b"cubin"
    assert "--gpu-architecture=sm_90" in stand_in.options
    assert {"-ftz=false", "-fmad=false", "-prec-div=true"} <= set(stand_in.options)
    for check in ("select", "scattered", "codecs", "accumulate"):
        CHECKS[check](Device(backend), 1000)
    assert stand_in.streams == {STREAM}
    tensor = torch.arange(5, dtype=torch.float32)
    assert backend.array_of(tensor) is tensor


def test_a_cuda_aware_mpi_gets_cupys_views(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is sent and of what is received, when the stream has come to its end."""
    monkeypatch.setenv("MPISPARSE_CUDA_AWARE", "1")
    viewed = []
    monkeypatch.setattr(sys.modules["cupy"], "asarray", lambda t: viewed.append(t.data_ptr()) or DeviceBuffer(t.numpy()))
    backend = device.load_backend(device=torch.device("cuda", 1))
    comm = Exchange(MPI.COMM_SELF)
    sent = backend.from_host(np.arange(12, dtype=np.uint8))
    received = comm.allgatherv(sent, [12], [0])
    assert isinstance(received, torch.Tensor)
    assert received.data_ptr() != sent.data_ptr()
    assert received.tolist() == list(range(12))
    assert viewed == [sent.data_ptr(), received.data_ptr()]
    assert stand_in.waits == [STREAM] * 2
    values = backend.from_host(np.ones(3, dtype=np.float32))
    assert comm.allreduce_(values) is values
    assert viewed[2:] == [values.data_ptr()]
    comm.close()


def test_another_mpi_gets_pinned_memory(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPISPARSE_CUDA_AWARE", "0")
    monkeypatch.setattr(sys.modules["cupy"], "asarray", None)
    backend = device.load_backend(device=torch.device("cuda", 1))
    comm = Exchange(MPI.COMM_SELF)
    for call in (comm.allgatherv, comm.alltoallv):
        received = call(backend.from_host(np.arange(12, dtype=np.uint8)), [12], [0])
        assert isinstance(received, torch.Tensor)
        assert received.tolist() == list(range(12))
    total = backend.empty(3, np.float32)
    comm.allreduce(backend.from_host(np.arange(3, dtype=np.float32)), total)
    assert comm.allreduce_(total) is total
    assert total.tolist() == [0, 1, 2]
    comm.close()


def test_kernels_that_do_not_compile(stand_in: StandIn) -> None:
    stand_in.fails = True
    with pytest.raises(ConfigurationError, match="NVRTC does not compile the kernels: line 1: no"):
        device.load_backend(device=torch.device("cuda", 1))


def test_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "mpisparse.backends.cuda.binding", raising=False)
    with pytest.raises(ConfigurationError, match=r"on cuda:0, but CuPy cannot be imported .*install mpisparse\[cuda13\]"):
        device.load_backend(device=torch.device("cuda", 0))


def complaint(call: Callable[[], Any]) -> str:
    """Return CuPy's error for a call whose arguments it accepted."""
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(caught.value)


def test_cupy_itself_takes_what_the_binding_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy accepts names, arguments and streams; its only error is the missing driver. Warnings are errors here."""
    cupy: Any = pytest.importorskip("cupy", reason="CuPy is not installed: bin/setup --dev could not get it")
    if torch.cuda.is_available():
        pytest.skip("there is a driver: test_gpu.py has the device itself")
    monkeypatch.delitem(sys.modules, "mpisparse.backends.cuda.binding", raising=False)
    binding = importlib.import_module("mpisparse.backends.cuda.binding")
    gpu = torch.device("cuda", 0)
    assert "InsufficientDriver" in complaint(lambda: binding.CupyLauncher(gpu))
    monkeypatch.setattr(cupy.cuda, "Device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=STREAM))
    launcher = object.__new__(binding.CupyLauncher)
    kind = cupy.cuda.function.Function
    launcher.device, launcher.module, launcher.functions = gpu, cupy.cuda.function.Module(), {"take": kind.__new__(kind)}
    tensor = types.SimpleNamespace(
        __cuda_array_interface__={"shape": (4,), "typestr": "|u1", "data": (256, False), "strides": None, "version": 2}
    )
    arguments = [np.uint64(8), np.int64(1), np.uint32(2), np.float32(3)]
    assert "cudaErrorInsufficientDriver" in complaint(lambda: launcher.launch("take", 1, 256, arguments))
    assert "cudaErrorInsufficientDriver" in complaint(lambda: binding.mpi_view(tensor))
    assert "libcuda" in complaint(lambda: launcher.launch("put", 1, 256, []))
