"""MPI and device memory: whether MPI accepts it, how mpi4py passes it, and which device a rank gets."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch
from emulator import DeviceBuffer
from mpi4py import MPI

from mpisparse.backends import device
from mpisparse.comm import mpi
from mpisparse.comm.exchange import Exchange, local_rank
from mpisparse.comm.mpi import cuda_awareness
from mpisparse.errors import ConfigurationError
from mpisparse.runtime.settings import Settings
from mpisparse.runtime.setup import build_together

VARIABLES = ("MPISPARSE_CUDA_AWARE", "MPICH_GPU_SUPPORT_ENABLED", "MPIR_CVAR_ENABLE_GPU")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_mpi4py_takes_cuda_arrays() -> None:
    sent, received = np.arange(5, dtype=np.float32), np.zeros(5, dtype=np.float32)
    MPI.COMM_SELF.Allgatherv(DeviceBuffer(sent), [DeviceBuffer(received), ([20], [0]), MPI.BYTE])
    np.testing.assert_array_equal(received, sent)
    MPI.COMM_SELF.Allreduce(MPI.IN_PLACE, DeviceBuffer(received), op=MPI.SUM)
    np.testing.assert_array_equal(received, sent)


@pytest.mark.parametrize(
    ("library", "variables", "usable"),
    [
        ("Open MPI v5", {"MPISPARSE_CUDA_AWARE": "1"}, True),
        ("CRAY MPICH version 8", {"MPISPARSE_CUDA_AWARE": "0", "MPICH_GPU_SUPPORT_ENABLED": "1"}, False),
        ("CRAY MPICH version 8", {"MPICH_GPU_SUPPORT_ENABLED": "1"}, True),
        ("CRAY MPICH version 8", {"MPICH_GPU_SUPPORT_ENABLED": "0"}, False),
        ("MPICH Version: 5.0", {"MPIR_CVAR_ENABLE_GPU": "0"}, False),
    ],
)
def test_variables_decide(monkeypatch: pytest.MonkeyPatch, library: str, variables: dict[str, str], usable: bool) -> None:
    monkeypatch.setattr(mpi.MPI, "Get_library_version", lambda: library)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = cuda_awareness()
    assert found.usable is usable
    name, value = next(iter(variables.items()))
    assert str(found).startswith(f"{'yes' if usable else 'no'}: {name}={value}; ")
    comm = Exchange(MPI.COMM_SELF)
    assert comm.cuda_aware is usable
    comm.close()


@pytest.mark.parametrize("answer", [0, 1])
def test_mpi_is_asked(monkeypatch: pytest.MonkeyPatch, answer: int) -> None:
    library = types.SimpleNamespace(MPIX_Query_cuda_support=lambda: answer)
    monkeypatch.setattr(mpi.ctypes, "CDLL", lambda path: library)
    assert cuda_awareness().usable is bool(answer)
    assert cuda_awareness().why == f"MPIX_Query_cuda_support() is {answer}"


def test_variables_of_another_mpi_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Job scripts set the variables of all MPI libraries."""
    monkeypatch.setattr(mpi.MPI, "Get_library_version", lambda: "Open MPI v5")
    monkeypatch.setattr(mpi.ctypes, "CDLL", lambda path: types.SimpleNamespace(MPIX_Query_cuda_support=lambda: 0))
    monkeypatch.setenv("MPICH_GPU_SUPPORT_ENABLED", "1")
    monkeypatch.setenv("MPIR_CVAR_ENABLE_GPU", "1")
    assert not cuda_awareness().usable


def test_an_mpi_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi.ctypes, "CDLL", lambda path: types.SimpleNamespace())
    assert not cuda_awareness().usable
    assert "MPISPARSE_CUDA_AWARE=1" in cuda_awareness().why


def test_a_wrong_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPISPARSE_CUDA_AWARE", "yes")
    with pytest.raises(ConfigurationError, match=r"unknown MPISPARSE_CUDA_AWARE 'yes'; choose from: 0, 1"):
        cuda_awareness()


def test_devices_by_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert [device.local_device(rank).index for rank in range(4)] == [0, 1, 0, 1]
    assert [d.index for d in chosen] == [0, 1, 0, 1]
    assert local_rank(MPI.COMM_SELF) == 0


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigurationError, match=r"finds no CUDA device \(CUDA_VISIBLE_DEVICES=\)"):
        device.local_device(0)


def test_training_on_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match=r"r0 \| torch .* finds no CUDA device"):
        build_together(Settings(device="cuda"))
    with pytest.raises(ConfigurationError, match="unknown device 'gpu'; did you mean 'cpu'"):
        Settings(device="gpu")
