"""Virtual workers, each with an emulated device of its own: whole steps of several ranks in one process."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from emulator import Emulator, plain
from mpisparse.backends.cuda.backend import CudaBackend
from mpisparse.backends.device import load_backend
from mpisparse.comm import device_memory
from mpisparse.comm.virtual import VirtualComm, run_virtual

# Modules that ask for the backend of a device.
ASKING = ("mpisparse.model.construction", "mpisparse.integrations.bucket", "mpisparse.optim.onebit")


class Devices:
    """An emulated device for each thread that asks for one: `mine()`. on: whether models are on it, or on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.settings = settings
        self.on = True
        self._local = threading.local()
        for name in ASKING:
            monkeypatch.setattr(importlib.import_module(name), "load_backend", self._load)
        monkeypatch.setattr(device_memory, "synchronize", lambda tensor: tensor.emulator.synchronize(tensor))
        monkeypatch.setattr(device_memory, "mpi_view", lambda tensor: plain(tensor).numpy())

    def aware(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Give device buffers to the transport."""
        monkeypatch.setattr(VirtualComm, "cuda_aware", True)

    def mine(self) -> Emulator:
        """This thread's device."""
        if not hasattr(self._local, "backend"):
            self._local.backend = CudaBackend(Emulator(**self.settings), load_backend(), pooled=True)
        emulator: Emulator = self._local.backend.launcher
        return emulator

    @contextlib.contextmanager
    def model_computes(self) -> Iterator[None]:
        """Do at once what is launched here: the model's own work, which the emulator does not see, is in the same stream."""
        device = self.mine()
        device.flush()
        before, device.lazy = device.lazy, False
        try:
            yield
        finally:
            device.lazy = before

    def _load(self, name: str | None = None, device: torch.device | None = None) -> Any:
        if device is None or not self.on:
            return load_backend(name)
        self.mine()
        return self._local.backend


def differing(
    monkeypatch: pytest.MonkeyPatch, size: int, cases: Iterable[Any], trained: Callable[[Devices, VirtualComm, Any], Any]
) -> list[Any]:
    """The cases in which workers train otherwise on devices, whose streams are lazy, than on the CPU."""
    wrong = []
    for case in cases:
        devices, runs = Devices(monkeypatch, block=64, scan=64, lazy=True), list[Any]()
        for devices.on in (True, False):
            runs.append(run_virtual(size, lambda comm, case=case, devices=devices: trained(devices, comm, case)))
        if runs[0] != runs[1]:
            wrong.append(case)
    return wrong
