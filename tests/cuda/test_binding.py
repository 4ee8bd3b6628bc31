"""The binding to CuPy, with a stand-in for CuPy: what is compiled and how, and on which stream kernels are launched.

Its names and arguments are CuPy's; what they do, the emulator does. That CuPy itself takes them is tested with CuPy, as far
as it goes without a driver. A GPU's own answer is in test_gpu.py.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import struct
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks import CHECKS, Device
from emulator import RUBBISH, Emulator, available
from mpi4py import MPI

from mpisparse.backends import device
from mpisparse.backends.cuda.backend import CudaBackend
from mpisparse.comm import device_memory
from mpisparse.comm.exchange import Exchange
from mpisparse.errors import ConfigurationError

STREAM = 77
CUBIN = struct.pack("<16x16x2Q4x2x4H2x", 64, 0, 1, 1, 0, 0).ljust(65, b"\0")  # an ELF file with one segment of a byte


class NVRTCError(Exception):
    pass


class StandIn:
    """The CuPy functions that the binding calls, with a record of their arguments."""

    def __init__(self) -> None:
        self.emulator = Emulator(lazy=True)
        self.options: tuple[str, ...] = ()
        self.loaded = b""
        self.streams: set[int] = set()
        self.current: list[int] = []
        self.waits: list[int] = []
        self.fails = False
        self.architectures = [75, 80, 90]
        self.compiled = 0

    def modules(self) -> dict[str, types.ModuleType]:
        cupy, cuda = types.ModuleType("cupy"), types.ModuleType("cupy.cuda")
        cuda.nvrtc = types.SimpleNamespace(
            NVRTCError=NVRTCError,
            createProgram=lambda text, name, headers, names: text,
            compileProgram=self._compile,
            getVersion=lambda: (13, 0),
            getSupportedArchs=lambda: self.architectures,
            getPTX=lambda program: ".version 9.0",
            getCUBIN=lambda program: CUBIN[:-1],  # as CuPy does
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
        cupy.asarray = self.emulator.mpi_view
        return {"cupy": cupy, "cupy.cuda": cuda}

    def note(self, stream: int) -> None:
        """Every launch is on torch's stream, with the device the current one."""
        assert self.current == [1]
        self.streams.add(stream)

    def synchronize(self) -> None:
        self.waits.append(STREAM)
        self.emulator.flush()

    def _compile(self, program: str, options: tuple[str, ...]) -> None:
        self.options = options
        self.compiled += 1
        if self.fails:
            raise NVRTCError


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandIn]:
    if not available():
        pytest.skip("no C++ compiler to build the emulator with")
    cupy = StandIn()
    monkeypatch.setenv("MPISPARSE_CACHE", str(tmp_path / "cache"))
    for name, module in cupy.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "mpisparse.backends.cuda.binding", raising=False)
    empty = torch.empty

    def allocate(n: int, dtype: torch.dtype, device: Any = None, pin_memory: bool = False) -> torch.Tensor:
        return empty(n, dtype=dtype).fill_(RUBBISH) if device is None else cupy.emulator.empty(n, dtype)

    monkeypatch.setattr(torch, "empty", allocate)
    stream = types.SimpleNamespace(cuda_stream=STREAM, synchronize=cupy.synchronize)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    device.load_backend.cache_clear()
    yield cupy
    device.load_backend.cache_clear()
    sys.modules.pop("mpisparse.backends.cuda.binding", None)


def test_a_model_on_a_gpu_has_cuda_kernels(stand_in: StandIn) -> None:
    backend = device.load_backend(device=torch.device("cuda", 1))
    assert isinstance(backend, CudaBackend)
    assert stand_in.loaded == CUBIN
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
    monkeypatch.setattr(
        sys.modules["cupy"], "asarray", lambda t: viewed.append(t.data_ptr()) or stand_in.emulator.mpi_view(t)
    )
    backend = device.load_backend(device=torch.device("cuda", 1))
    comm = Exchange(MPI.COMM_SELF)
    sent = backend.from_host(np.arange(12, dtype=np.uint8))
    received = comm.allgatherv(sent, [12], [0])
    assert isinstance(received, torch.Tensor)
    assert received.data_ptr() != sent.data_ptr()
    assert backend.to_host(received).tolist() == list(range(12))
    assert viewed == [sent.data_ptr(), received.data_ptr()]
    assert stand_in.waits == [STREAM]
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
        assert backend.to_host(received).tolist() == list(range(12))
    total = backend.empty(3, np.float32)
    comm.allreduce(backend.from_host(np.arange(3, dtype=np.float32)), total)
    assert comm.allreduce_(total) is total
    assert backend.to_host(total).tolist() == [0, 1, 2]
    comm.close()


def test_all_staged_memory_is_pinned(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """What MPI sends and what it receives, of every collective that may be staged."""
    monkeypatch.setenv("MPISPARSE_CUDA_AWARE", "0")
    backend = device.load_backend(device=torch.device("cuda", 1))
    empty_pinned, pinned = device_memory.empty_pinned, []

    def allocate(count: int, like: torch.Tensor) -> Any:
        pinned.append(empty_pinned(count, like))
        return pinned[-1]

    monkeypatch.setattr(device_memory, "empty_pinned", allocate)
    comm = Exchange(MPI.COMM_SELF)
    given: list[Any] = []
    monkeypatch.setattr(comm, "_call", lambda name, *buffers, **options: given.extend(buffers))
    values = backend.from_host(np.zeros(12, dtype=np.uint8))
    comm.allgatherv(values, [12], [0])
    comm.alltoallv(values, [12], [0])
    comm.allreduce(values, backend.empty(12, np.uint8))
    buffers = [b[0] if isinstance(b, list) else b for b in given]
    assert len(pinned) == len(buffers) == 6
    assert all(np.shares_memory(a, b) for a, b in zip(buffers, pinned, strict=True))
    comm.close()


@pytest.mark.parametrize("kind", ["waiting", "polling"])
def test_mpi_is_called_in_the_context_of_the_device(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A thread's current device may be another one than the model's."""
    monkeypatch.setenv("MPISPARSE_CUDA_AWARE", "1")
    backend = device.load_backend(device=torch.device("cuda", 1))
    values = backend.from_host(np.ones(12, dtype=np.float32))
    inside: list[torch.device] = []
    seen: list[list[torch.device]] = []

    @contextlib.contextmanager
    def current(device: torch.device) -> Iterator[None]:
        inside.append(device)
        yield
        inside.pop()

    monkeypatch.setattr(device_memory, "current", current)
    first = Exchange(MPI.COMM_SELF)
    comm = first.polling() if kind == "polling" else first
    name = "Iallreduce" if kind == "polling" else "Allreduce"
    reduce = getattr(comm.comm, name)
    spy = types.SimpleNamespace(**{name: lambda *args, **options: (seen.append(list(inside)), reduce(*args, **options))[1]})
    whole, comm.comm = comm.comm, spy
    comm.allreduce_(values)
    comm.comm = whole
    assert seen == [[values.device]]
    assert not inside
    if comm is not first:
        comm.close()
    first.close()


def test_the_context_is_that_of_torch() -> None:
    assert isinstance(device_memory.current(torch.device("cuda", 1)), torch.cuda.device)
    with device_memory.current(torch.device("cpu")):
        pass


def exchange_something(backend: CudaBackend, aware: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send what a kernel has just been launched to write, and let another read what arrives."""
    monkeypatch.setenv("MPISPARSE_CUDA_AWARE", aware)
    comm = Exchange(MPI.COMM_SELF)
    try:
        for call in (comm.allgatherv, comm.alltoallv):
            values = backend.from_host(np.arange(12, dtype=np.float32))
            backend.divide(values, 2)
            received = call(backend.view_as(values, np.uint8), [48], [0])
            assert isinstance(received, torch.Tensor)
            halves = backend.view_as(received, np.float32)
            backend.divide(halves, 2)
            assert backend.to_host(halves).tolist() == (np.arange(12) / 4).tolist()
        total = backend.empty(3, np.float32)
        backend.divide(values, 2)
        comm.allreduce(values[:3], total)
        comm.allreduce_(total)
        assert backend.to_host(total).tolist() == [0, 0.25, 0.5]
    finally:
        comm.close()


@pytest.mark.parametrize("aware", ["0", "1"])
def test_nothing_is_read_before_it_is_written(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, aware: str) -> None:
    """The stream does nothing until someone waits for it."""
    exchange_something(device.load_backend(device=torch.device("cuda", 1)), aware, monkeypatch)
    assert stand_in.emulator.damaged == 0


BUGS = {  # name: (function, what stands there, what is put there, whether MPI is CUDA-aware)
    "synchronize does nothing": (
        device_memory.synchronize, "torch.cuda.current_stream(tensor.device).synchronize()", "pass", "1",
    ),
    "the copy to pinned memory is not waited for": (
        device_memory.to_pinned, ".copy_(tensor)", ".copy_(tensor, non_blocking=True)", "0",
    ),
    "the copy to the host is not waited for": (
        CudaBackend.to_host, "array.cpu()", 'array.to("cpu", non_blocking=True)', "1",
    ),
    "staged memory goes the wrong way": (
        device_memory.from_pinned, "target.copy_(torch.from_numpy(values), non_blocking=True)",
        "torch.from_numpy(values).copy_(target)", "0",
    ),
    "memory to be staged goes the wrong way": (
        device_memory.to_pinned, "torch.from_numpy(staged).copy_(tensor)", "tensor.copy_(torch.from_numpy(staged))", "0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_of_copies_are_noticed(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    function, old, new, aware = BUGS[bug]
    text = textwrap.dedent(inspect.getsource(function))
    assert old in text, f"{bug}: the code has changed, plant this bug anew"
    names: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + text.replace(old, new), function.__globals__, names)
    owner = CudaBackend if function is CudaBackend.to_host else device_memory
    monkeypatch.setattr(owner, function.__name__, names[function.__name__])
    backend = device.load_backend(device=torch.device("cuda", 1))
    with pytest.raises(AssertionError):
        exchange_something(backend, aware, monkeypatch)


def load_anew() -> None:
    """Load the kernels as another process would."""
    sys.modules["mpisparse.backends.cuda.binding"].compile_cubin.cache_clear()
    sys.modules["mpisparse.backends.cuda.binding"].compile_for.cache_clear()
    device.load_backend.cache_clear()
    device.load_backend(device=torch.device("cuda", 1))


def test_compiled_kernels_are_kept(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device.load_backend(device=torch.device("cuda", 1))
    load_anew()
    assert (stand_in.compiled, stand_in.loaded) == (1, CUBIN)
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    load_anew()
    assert (stand_in.compiled, stand_in.loaded) == (2, CUBIN), "what is damaged is compiled again"
    monkeypatch.setattr(sys.modules["mpisparse.backends.cuda.binding"].source, "EXACT", ("-ftz=false",))
    load_anew()
    assert stand_in.compiled == 3, "other options"
    monkeypatch.setenv("MPISPARSE_CACHE", str(file / "below-a-file"))
    load_anew()
    assert (stand_in.compiled, stand_in.loaded) == (4, CUBIN), "where nothing can be written"


def test_a_gpu_that_nvrtc_does_not_know(stand_in: StandIn) -> None:
    stand_in.architectures = [75, 80]
    device.load_backend(device=torch.device("cuda", 1))
    assert "--gpu-architecture=compute_80" in stand_in.options
    assert stand_in.loaded == b".version 9.0"
    stand_in.architectures = [100, 120]
    with pytest.raises(ConfigurationError, match="NVRTC compiles for compute capability 100 and newer, the GPU has 90"):
        load_anew()


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
