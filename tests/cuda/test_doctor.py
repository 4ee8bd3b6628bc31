"""mpisparse doctor --gpu on an emulated device: what it checks, what it writes, and that it notices wrong bits."""

from __future__ import annotations

import importlib
import json
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from emulator import Emulator, available

from mpisparse.backends.cuda import source
from mpisparse.backends.cuda.backend import CudaBackend
from mpisparse.backends.device import load_backend
from mpisparse.errors import ConfigurationError
from mpisparse.runtime import cli, gpu_report
from mpisparse.runtime.gpu_checks import CHECKS

emulated = pytest.mark.skipif(not available(), reason="no C++ compiler to build the emulator with")


def doctor(monkeypatch: pytest.MonkeyPatch, file: Path, backend: CudaBackend) -> int:
    """The command, on a small scale."""
    monkeypatch.setattr(gpu_report, "local_device", lambda rank: torch.device("cpu"))
    monkeypatch.setattr(gpu_report, "load_backend", lambda name=None, device=None: load_backend(name) if name else backend)
    monkeypatch.setattr(gpu_report, "facts", lambda device: {"device": "emulator"})
    monkeypatch.setattr(gpu_report, "tests", lambda: ["not run", "there is no GPU"])
    monkeypatch.setattr(gpu_report, "ELEMENTS", 5000)
    monkeypatch.setattr(gpu_report, "SIZES", (1, 33, 3000))
    monkeypatch.setattr(gpu_report, "ROUNDS", 2)
    return cli.main(["doctor", "--gpu", str(file)])


@emulated
def test_one_file_with_bits_and_bandwidths(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    emulator = Emulator(block=64, scan=64)
    assert doctor(monkeypatch, tmp_path / "gpu.json", CudaBackend(emulator)) == 0
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["device"] == "emulator"
    assert report["checks"] == dict.fromkeys(CHECKS, "same")
    for record in report["kernels"]:
        assert np.isclose(record["GB_per_s"], record["bytes"] / record["ms"] / 1e6)
    first = {record["kernel"]: record["bytes"] for record in report["kernels"]}
    assert (first["plain addition"], first["accumulate_select"]) == (12 * 5000, 12.25 * 5000)
    assert report["launch_us"] > 0 < report["wait_us"]
    assert "the same bits as the host; all of it is in" in capsys.readouterr().out
    assert emulator.damaged == 0


@emulated
def test_wrong_bits_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = source.joined().replace("rintf(", "truncf(")
    backend = CudaBackend(Emulator(block=64, scan=64, text=text))
    assert doctor(monkeypatch, tmp_path / "gpu.json", backend) == 1
    checks = json.loads((tmp_path / "gpu.json").read_text())["checks"]
    assert [name for name, said in checks.items() if said != "same"] == ["codecs"]
    assert "does not compute the host's bits: codecs" in capsys.readouterr().out


def test_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what torch and CUDA would tell of a device."""
    pytest.importorskip("cupy", reason="CuPy is not installed: bin/setup --dev could not get it")
    binding = importlib.import_module("mpisparse.backends.cuda.binding")
    monkeypatch.setattr(binding, "versions", lambda: ((13, 0), 13010))
    device = types.SimpleNamespace(name="NVIDIA H100", major=9, minor=0, total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda which: device)
    found = gpu_report.facts(torch.device("cuda", 0))
    assert list(found) == list(gpu_report.ROWS)
    assert (found["device"], found["capability"], found["nvrtc"], found["driver"]) == (
        "NVIDIA H100",
        "9.0",
        "(13, 0)",
        13010,
    )
    assert json.loads(json.dumps(found)) == found


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match="finds no CUDA device"):
        gpu_report.run(tmp_path / "gpu.json")
    assert not (tmp_path / "gpu.json").exists()


def test_tests_of_a_checkout_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU they are skipped, and the file says so."""
    ended = gpu_report.tests()
    assert ended[0] == "passed"
    assert "skipped" in ended[-1]
