"""A whole GradientSync on the emulated device: the same bits as on the CPU on every rank, after every step."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from emulator import Emulator, available
from mpi4py import MPI
from ranks import PATHS, bits, loss_of, seeded, small

import mpisparse
from mpisparse.backends.cuda.backend import CudaBackend
from mpisparse.backends.device import load_backend, local_device
from mpisparse.comm import device_memory
from mpisparse.comm.exchange import local_rank
from mpisparse.comm.mpi import cuda_awareness
from mpisparse.model import construction

pytestmark = pytest.mark.mpi

STEPS = 4
CPU = torch.device("cpu")


@pytest.fixture
def device(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Emulator:
    """Give every new GradientSync an emulated device; the first rank compiles for all."""
    if not available():
        pytest.skip("no C++ compiler to build the emulator with")
    if comm.rank == 0:
        Emulator(block=64, scan=64)
    comm.Barrier()
    emulator = Emulator(block=64, scan=64, order="shuffled", seed=comm.rank)
    monkeypatch.setattr(construction, "load_backend", lambda device: CudaBackend(emulator))
    monkeypatch.setattr(device_memory, "synchronize", emulator.synchronize)
    monkeypatch.setattr(device_memory, "mpi_view", emulator.mpi_view)
    return emulator


@contextlib.contextmanager
def model_computes(emulator: Emulator | None) -> Iterator[None]:
    """Do at once what is launched here: the model's own work, which the emulator does not see, is in the same stream."""
    if emulator is None:
        yield
        return
    emulator.flush()
    emulator.lazy = False
    try:
        yield
    finally:
        emulator.lazy = True


@contextlib.contextmanager
def nothing_on_the_host(sync: mpisparse.GradientSync) -> Iterator[None]:
    """Refuse NumPy access to the residual and the published gradient on the device, as a GPU would."""
    vectors = (
        [sync.residual, *(run.buffer for run in sync._gradients.published.runs)] if sync._backend.name == "cuda" else []
    )
    mine = {t.untyped_storage().data_ptr() for t in vectors}
    plain = torch.Tensor.numpy

    def numpy(tensor: torch.Tensor, **kwargs: Any) -> Any:
        assert tensor.untyped_storage().data_ptr() not in mine, "a vector of the device is read on the host"
        return plain(tensor, **kwargs)

    torch.Tensor.numpy = numpy  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.numpy = plain  # type: ignore[method-assign]


def train(
    comm: MPI.Intracomm, place: torch.device = CPU, *, emulator: Emulator | None = None, **options: Any
) -> tuple[list[bytes], dict[str, Any]]:
    """Train some steps; returns published gradients, residuals and counts of each, and the final state."""
    model = small()
    if options.pop("half", False):
        model[0].half()
    model.to(place)
    sync = mpisparse.GradientSync(model, **options)
    seen = []
    for step in range(STEPS):
        with model_computes(emulator):
            model.zero_grad(set_to_none=step % 2 == 0)
            generator = seeded(comm.rank, step)
            grads = [torch.randn(p.shape, generator=generator).pow(3).to(place, p.dtype) for p in model.parameters()]
            torch.autograd.backward(list(model.parameters()), grads)
        with nothing_on_the_host(sync):
            sync.step()
        if emulator is not None:
            emulator.flush()
        values = sync.stats.bytes_received - sync.stats.index_bytes - sync.stats.control_bytes  # indices have other forms
        stats = repr((sync.stats.threshold, sync.stats.workloads, sync.stats.borders, values))
        means = [p.grad.cpu() for p in model.parameters() if p.grad is not None]  # in flight there are none at first
        seen.append(bits(means) + bits([sync.residual.cpu()]) + stats.encode())
    state = sync.state_dict()
    sync.close()
    return seen, {key: v.cpu() if isinstance(v, torch.Tensor) else v for key, v in state.items()}


def assert_same_run(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, place: torch.device = CPU, *, emulator: Emulator | None = None,
    **options: Any,
) -> None:  # fmt: skip
    """Assert that a run on the device, emulated or real, equals the one on the CPU."""
    on_device, state = train(comm, place, emulator=emulator, **options)
    monkeypatch.setattr(construction, "load_backend", lambda device: load_backend())
    on_host, expected = train(comm, **options)
    assert [a == b for a, b in zip(on_device, on_host, strict=True)] == [True] * STEPS
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        same = torch.equal(state[key], value) if isinstance(value, torch.Tensor) else plain(state[key]) == plain(value)
        assert same, key


def plain(value: Any) -> Any:
    """A state with bytes in place of arrays and tensors, to compare."""
    if isinstance(value, torch.Tensor):
        return plain(value.numpy())
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return list(map(plain, value))
    return (value.dtype.str, value.tobytes()) if isinstance(value, np.ndarray) else value


CASES: list[dict[str, Any]] = [
    {"density": 0.01},
    {"density": 0.05, "codec": "int8"},
    {"density": 0.05, "codec": "fp16", "partitioner": "paper", "controller": "paper"},
    {"density": 0.05, "codec": "bf16", "half": True},
    {"density": 1.0},
    {"density": 0.05, "reduce": "allreduce"},
    {"scheme": "momentum", "density": 0.05},
    {"scheme": "momentum", "density": 0.05, "compensate": False, "percentile": "exact"},
    {"scheme": "exdyna", "density": 0.02, "scorer": "average", "codec": "momentum-fp32"},
    {"scheme": "dense"},
]
QUICK = [0, 3, 6, 9]
NAMES = ["-".join(map(str, case.values())) for case in CASES]


@pytest.mark.parametrize("accumulate", PATHS)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(case, id=name, marks=[] if i in QUICK else [pytest.mark.slow])
        for i, (case, name) in enumerate(zip(CASES, NAMES, strict=True))
    ],
)
@pytest.mark.singles
def test_the_same_bits_as_on_the_cpu(
    comm: MPI.Intracomm, device: Emulator, monkeypatch: pytest.MonkeyPatch, accumulate: str, options: dict[str, Any]
) -> None:
    assert_same_run(comm, monkeypatch, accumulate=accumulate, **options)
    assert device.launches
    assert device.damaged == 0


@pytest.mark.cuda
@pytest.mark.parametrize("aware", ["0", "1"], ids=["staged", "cuda-aware"])
@pytest.mark.parametrize("accumulate", PATHS)
@pytest.mark.parametrize("options", CASES, ids=NAMES)
def test_the_same_bits_on_a_gpu(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, accumulate: str, options: dict[str, Any], aware: str
) -> None:
    if aware == "1" and not cuda_awareness().usable:
        pytest.skip(f"MPI takes no device buffers: {cuda_awareness().why}")
    monkeypatch.setenv("MPISPARSE_CUDA_AWARE", aware)
    assert_same_run(comm, monkeypatch, local_device(local_rank(comm)), accumulate=accumulate, **options)


@pytest.mark.parametrize("segment_nbytes", [1 << 30, 64])
@pytest.mark.parametrize("codec", ["fp32", pytest.param("int8", marks=pytest.mark.slow)])
def test_device_buffers_straight_into_mpi(
    comm: MPI.Intracomm, device: Emulator, monkeypatch: pytest.MonkeyPatch, codec: str, segment_nbytes: int
) -> None:
    """MPI is declared CUDA-aware; the emulator's device memory is host memory, so any MPI can read it."""
    monkeypatch.setenv("MPISPARSE_CUDA_AWARE", "1")
    assert_same_run(comm, monkeypatch, density=0.05, codec=codec, segment_nbytes=segment_nbytes)
    assert device.waits >= (3 if comm.size > 1 else 1) * STEPS, "what MPI reads must be written by then"


LAZY = [CASES[i] for i in (0, 1, 6)]


@pytest.mark.parametrize("aware", ["0", "1"], ids=["staged", "cuda-aware"])
@pytest.mark.parametrize("accumulate", PATHS)
@pytest.mark.parametrize("options", LAZY, ids=lambda case: "-".join(map(str, case.values())))
@pytest.mark.singles
def test_a_stream_that_does_nothing_until_someone_waits(
    comm: MPI.Intracomm, device: Emulator, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], accumulate: str,
    aware: str,
) -> None:  # fmt: skip
    """Launches and copies are done as late as a GPU could do them; the bits are the same."""
    monkeypatch.setenv("MPISPARSE_CUDA_AWARE", aware)
    device.lazy = True
    assert_same_run(comm, monkeypatch, emulator=device, accumulate=accumulate, **options)
    assert device.damaged == 0


LATE = {"density": 0.05, "staleness": 1}
BUCKETS = {"overlap": True, "bucket_mb": 0.001}
SPARSE_BUCKETS = {**BUCKETS, "density": 0.05}


@pytest.mark.parametrize(
    "options",
    [
        LATE,
        {**LATE, "masks": "own", "codec": "int8"},
        SPARSE_BUCKETS,
        {**SPARSE_BUCKETS, "masks": "own"},
        {**BUCKETS, "scheme": "dense"},
    ],
    ids=["owners", "own", "buckets", "buckets-own", "buckets-dense"],
)
@pytest.mark.singles
def test_a_delivery_in_flight_does_not_touch_the_device(
    comm: MPI.Intracomm, device: Emulator, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Its thread would have no part in the order of the device's stream."""
    device.lazy, device.thread = True, threading.get_ident()
    assert_same_run(comm, monkeypatch, emulator=device, **options)
    assert device.damaged == 0


def test_only_what_is_selected_comes_to_the_host(comm: MPI.Intracomm, device: Emulator) -> None:
    """With 100,000 elements at density 0.001 a later step copies only some bytes per selected element, and counts."""
    model = torch.nn.ParameterList([torch.zeros(200, 500)])
    sync = mpisparse.GradientSync(model, density=0.001)
    moved = []
    for step in range(3):
        model.zero_grad()
        torch.autograd.backward(model[0], torch.randn(200, 500, generator=seeded(comm.rank, step)))
        before = device.copied_in + device.copied_out
        sync.step()
        moved.append(device.copied_in + device.copied_out - before)
    selected, blocks = sync.stats.selected, len(sync._aggregator.state()["edges"])
    sync.close()
    assert moved[-1] < 40 * selected + 3 * 16 * blocks + 20_000 < 4 * 100_000 / 3


def test_a_value_that_is_not_finite(comm: MPI.Intracomm, device: Emulator) -> None:
    """All ranks raise the same error, though the device reports it later."""
    for accumulate in PATHS:
        model = small()
        sync = mpisparse.GradientSync(model, density=0.05, accumulate=accumulate)
        loss = loss_of(model, seeded(comm.rank, 0))
        if comm.rank == comm.size - 1:
            model[2].weight.register_hook(lambda grad: grad + torch.where(torch.arange(50) == 7, torch.inf, 0.0))
        loss.backward()
        with pytest.raises(
            mpisparse.NonFiniteGradientError, match=rf"rank {comm.size - 1} has .* in 2.weight \(flat index 1557\)"
        ):
            sync.step()
        sync.close()


def test_two_models_on_one_device(comm: MPI.Intracomm, device: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share the kernels, but each reports only its own non-finite values."""
    shared = CudaBackend(device)
    monkeypatch.setattr(construction, "load_backend", lambda device: shared)
    models = [small(), small()]
    first, second = (mpisparse.GradientSync(model, density=0.05, accumulate="backward") for model in models)
    if comm.rank == comm.size - 1:
        models[0][2].weight.register_hook(lambda grad: grad + torch.where(torch.arange(50) == 7, torch.inf, 0.0))
    for model in models:
        loss_of(model, seeded(comm.rank, 0)).backward()
    second.step()
    with pytest.raises(mpisparse.NonFiniteGradientError, match=rf"rank {comm.size - 1} has .* \(flat index 1557\)"):
        first.step()
    first.close()
    second.close()


@pytest.mark.parametrize("options", [{"scheme": "momentum", "density": 0.05}, {"density": 0.01}], ids=["momentum", "exdyna"])
def test_frozen_midway(
    comm: MPI.Intracomm, device: Emulator, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Waiting values are stored and restored on the device with the bits of the CPU."""
    runs = []
    for on_device in (True, False):
        if not on_device:
            monkeypatch.setattr(construction, "load_backend", lambda device: load_backend())
        model = small()
        sync = mpisparse.GradientSync(model, **options)
        seen = []
        for step in range(6):
            model[0].weight.requires_grad_(step not in (2, 3))
            model.zero_grad()
            loss_of(model, seeded(comm.rank, step)).backward()
            with nothing_on_the_host(sync):
                sync.step()
            seen.append(bits([*(p.grad for p in model.parameters()), sync.residual]))
        runs.append(seen)
        sync.close()
    assert runs[0] == runs[1]
    assert device.damaged == 0


def test_other_schemes_say_that_they_run_on_the_host(comm: MPI.Intracomm, device: Emulator) -> None:
    with pytest.raises(mpisparse.ConfigurationError, match='scheme "auto" runs on the host only'):
        mpisparse.GradientSync(small(), scheme="auto")


def test_resume(comm: MPI.Intracomm, device: Emulator) -> None:
    """A state saved on the device resumes on the device with the same bits."""
    runs = []
    for stop in (False, True):
        model = small()
        make: Callable[[], Any] = functools.partial(mpisparse.GradientSync, model, scheme="momentum", density=0.05)
        sync = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            if stop and step == 2:
                state = sync.state_dict()
                sync.close()
                sync = make()
                sync.load_state_dict(state)
            optimizer.zero_grad()
            loss_of(model, seeded(comm.rank, step)).backward()
            sync.step()
            optimizer.step()
        runs.append(bits(model.parameters()) + bits([sync.residual]))
        sync.close()
    assert runs[0] == runs[1]
    assert np.isfinite(sync.residual.numpy()).all()
