"""Which kernels run: by name, by environment, or the fastest available; and the warning if there are none."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mpisparse
from mpisparse.backends import device, numpy_backend
from mpisparse.backends.flat import on_device
from mpisparse.errors import ConfigurationError
from mpisparse.schemes import SCHEMES

# Prints the backend or the error, then warnings. Torch is slow to load and hardly needed to choose: a module stands in.
SCRIPT = """
import sys, types, warnings
sys.modules["torch"] = torch = types.ModuleType("torch")
torch.Tensor, torch.get_num_threads = types.SimpleNamespace(numpy=None), lambda: 2
{before}
from mpisparse import device, errors
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        print(device.load_backend().name)
        assert device.load_backend() is device.load_backend()
    except errors.ConfigurationError as error:
        print("error:", error)
for warning in caught:
    print("warning:", warning.category.__name__, warning.message)
{after}
"""
WITHOUT_NATIVE = 'sys.modules["mpisparse._cpu"] = None'


def load(before: str = "", after: str = "", **variables: str) -> list[str]:
    """Load the kernels in a fresh process with some MPISPARSE_* variables; returns its output lines."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MPISPARSE_")}
    code = SCRIPT.format(before=before, after=after)
    done = subprocess.run(
        [sys.executable, "-c", code], env={**clean, **variables}, stdout=subprocess.PIPE, check=True, text=True, timeout=900
    )
    return done.stdout.splitlines()


@pytest.fixture
def cpu() -> Any:
    return pytest.importorskip("mpisparse._cpu", exc_type=ImportError)


def test_the_fastest_there_are(cpu: Any) -> None:
    after = "from mpisparse import _cpu; print(_cpu.isa())"
    assert load(after=after) == ["native", cpu.isas()[-1]]
    assert load(after=after, MPISPARSE_BACKEND="native", MPISPARSE_ISA="generic") == ["native", "generic"]


def test_numpy_is_chosen() -> None:
    """There is no warning, even without native kernels."""
    after = "assert 'mpisparse._cpu' not in sys.modules or sys.modules['mpisparse._cpu'] is None"
    assert load(before=WITHOUT_NATIVE, after=after, MPISPARSE_BACKEND="numpy") == ["numpy"]


def test_missing_kernels_give_one_warning() -> None:
    name, warning = load(before=WITHOUT_NATIVE)
    assert name == "numpy"
    assert warning.startswith("warning: UserWarning mpisparse runs without its native kernels, because")
    assert "several times longer" in warning
    assert warning.endswith("MPISPARSE_BACKEND=numpy silences this.")


def test_missing_kernels_that_were_asked_for_are_an_error() -> None:
    (error,) = load(before=WITHOUT_NATIVE, MPISPARSE_BACKEND="native")
    assert error.startswith("error: native kernels were asked for but cannot be loaded (")


def test_unknown_names(cpu: Any) -> None:
    (error,) = load(MPISPARSE_BACKEND="nativ")
    assert error == "error: unknown backend (MPISPARSE_BACKEND) 'nativ'; did you mean 'native'? choose from: native, numpy"
    (error,) = load(MPISPARSE_ISA="avx3")
    names = ", ".join(sorted(cpu.isas()))
    assert error.startswith("error: unknown instruction set (MPISPARSE_ISA) 'avx3'; ")
    assert error.endswith(f"choose from: {names}")


def test_a_name_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPISPARSE_BACKEND", "nonsense")
    assert device.load_backend("numpy") is numpy_backend
    with pytest.raises(ConfigurationError, match=r"unknown backend .* 'cuda'; choose from: native, numpy"):
        device.load_backend("cuda")


def test_native_kernels_take_torchs_threads(cpu: Any) -> None:
    """As many as torch has when they are loaded, then as many as torch has in the last step."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(5)
        device._native()
        assert cpu.threads() == 5
        torch.set_num_threads(3)
        model = torch.nn.Linear(4, 4)
        sync = mpisparse.GradientSync(model, density=0.5)
        model(torch.ones(1, 4)).sum().backward()
        sync.step()
        sync.close()
        assert cpu.threads() == 3
    finally:
        torch.set_num_threads(before)
        cpu.use_threads(before)


def test_native_calls_make_no_python_frames(cpu: Any) -> None:
    backend = device.load_backend("native")
    in_python = [name for name, f in vars(backend).items() if hasattr(f, "__code__")]
    assert in_python == []


def imported(file: Path) -> set[str]:
    """The modules, and names in modules, that a file imports anywhere, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import, which this test does not resolve"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return names


def test_production_code_does_not_import_the_oracle() -> None:
    """Only the choice of the backend may import the NumPy backend, and only that its nets."""
    root = Path(mpisparse.__file__).parent
    importers: dict[str, set[str]] = {"numpy_backend": set(), "numpy_nets": set()}
    for file in root.rglob("*.py"):
        for module, found in importers.items():
            if f"mpisparse.backends.{module}" in imported(file):
                found.add(file.relative_to(root).as_posix())
    assert importers == {"numpy_backend": {"backends/device.py"}, "numpy_nets": {"backends/numpy_backend.py"}}


def test_host_arrays_go_to_a_device_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nobody waits for the copy; on the host they are the same memory."""
    values, asked = np.zeros(3, dtype=np.float32), list[object]()
    assert on_device(values, torch.device("cpu")).data_ptr() == values.ctypes.data

    class Staged:
        def pin_memory(self) -> Staged:
            asked.append("pinned")
            return self

        def to(self, device: torch.device, *, non_blocking: bool) -> Staged:
            asked.append((device, non_blocking))
            return self

    monkeypatch.setattr(torch, "from_numpy", lambda given: Staged())
    on_device(values, torch.device("cuda", 1))
    assert asked == ["pinned", (torch.device("cuda", 1), True)]


def test_the_documented_lists_of_schemes_are_those_of_the_code() -> None:
    text = (Path(__file__).parents[2] / "docs" / "howto" / "gpu.md").read_text()
    section = text.split("## Which schemes")[1].split("\n## ")[0]
    there, on_host = (set(re.findall(r"`([a-z]+)`", part)) for part in section.split("These run on the host only"))
    own = {name: SCHEMES[name] for name in SCHEMES if SCHEMES[name].__module__.startswith("mpisparse.")}
    assert there == {name for name, options in own.items() if options.on_device}
    assert on_host == {name for name, options in own.items() if not options.on_device}
