"""The kernels compiled by NVIDIA's compilers and by clang, if installed; none needs a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import debian
import pytest
from emulator import kernels_in

from mpisparse.backends.cuda import figures, source

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")


def assert_exact(ptx: str) -> None:
    """No instruction flushes denormals, fuses a product with a sum, or divides or multiplies approximately."""
    floats = set(re.findall(r"\b(?:add|sub|mul|div|fma|rcp|sqrt)\.[\w.]*f32", ptx))
    assert floats <= {
        "add.f32",
        "sub.f32",
        "mul.f32",
        "add.rn.f32",
        "sub.rn.f32",
        "mul.rn.f32",
        "div.rn.f32",
        "sqrt.rn.f32",
    }, floats
    assert ".ftz" not in ptx


@needs_nvcc
def test_nvcc_compiles_for_all_chips_without_spills() -> None:
    found = figures.measure(list(figures.CHIPS))
    names = kernels_in(source.joined())
    assert {(f.kernel, f.sm) for f in found} == {(name, sm) for name in names for sm in figures.CHIPS}
    assert [f for f in found if f.spilled] == []
    assert all(f.registers > 0 and 0.5 <= f.occupancy <= 1.0 for f in found)
    assert figures.table(found).count("\n") > len(names)


@needs_nvcc
def test_nvcc_keeps_the_arithmetic() -> None:
    assert_exact(figures.ptx(90))


@needs_nvcc
def test_spills_would_be_seen() -> None:
    text = 'extern "C" __global__ void __launch_bounds__(1024, 2) much(float* x) { float y[64];\n'
    text += "for (int i = 0; i < 64; ++i) y[i] = x[i * 7 + threadIdx.x]; __syncthreads();\n"
    text += "for (int i = 0; i < 64; ++i) x[i * 3 + threadIdx.x] = y[i] * y[63 - i]; }"
    said = figures.compile_text(text, ["-cubin", "-arch=sm_80", "-Xptxas=-v"])
    assert int(re.findall(r"(\d+) bytes spill stores", said)[0]) > 0


def test_occupancy() -> None:
    """Occupancy is limited by registers, shared memory, threads or blocks."""
    assert figures.Figures("take", 80, 32, 0, 0).occupancy == 1.0
    assert figures.Figures("take", 80, 40, 0, 0).occupancy == 0.75  # 65536 / (40 x 32) = 51.2, 48 warps in blocks of 8
    assert figures.Figures("take", 75, 64, 0, 0).occupancy == 1.0
    assert figures.Figures("take", 120, 32, 0, 20_000).occupancy == 4 * 256 / 1536
    assert figures.Figures("scan_counts", 120, 32, 0, 0).occupancy == 1024 / 1536


CLANG = ("clang++-19", "clang++")
FRONT_END = (
    "-x cuda --cuda-device-only --cuda-gpu-arch=sm_75 -nocudainc -nocudalib -Wno-unknown-cuda-version -std=c++17 -O2 -S"
)


@pytest.fixture(scope="module")
def clang() -> str:
    """A second front end for CUDA, from Debian if it is not here."""
    reason = "" if any(map(shutil.which, CLANG)) else debian.install("clang-19")
    found = next(filter(None, map(shutil.which, CLANG)), None)
    if found is None:
        pytest.skip(f"clang is not here: {reason}")
    return found


def with_clang(clang: str, text: str, directory: Path) -> tuple[str, str]:
    """The PTX of kernels, and what the compiler said."""
    kernels, ptx = directory / "kernels.cu", directory / "kernels.ptx"
    kernels.write_text(text)
    header = ("-include", str(Path(__file__).with_name("clang.hpp")))
    exact = ("-ffp-contract=off", "-Xclang", "-target-feature", "-Xclang", "+ptx78", "-Wall", "-Wno-pass-failed")
    command = [clang, *FRONT_END.split(), *header, *exact, *source.defines(), str(kernels), "-o", str(ptx)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ptx.read_text() if ended.returncode == 0 else "", ended.stderr


def test_clang_compiles_all_kernels(clang: str, tmp_path: Path) -> None:
    """Without a warning, and with the arithmetic as it is written."""
    ptx, said = with_clang(clang, source.joined(), tmp_path)
    assert said == ""
    assert set(re.findall(r"\.entry (\w+)", ptx)) == set(kernels_in(source.joined()))
    assert_exact(ptx)


def test_clang_would_tell(clang: str, tmp_path: Path) -> None:
    """What another front end might take: a name that is not there, and a variable that is not used."""
    ptx, said = with_clang(clang, source.joined().replace("atomicMin(flag", "atomicMin(flags"), tmp_path)
    assert (ptx, "undeclared identifier 'flags'" in said) == ("", True)
    assert "unused variable" in with_clang(clang, source.joined() + "\n__device__ void f() { int x; }", tmp_path)[1]


def test_nvrtc_compiles_through_cupy() -> None:
    nvrtc = pytest.importorskip("cupy", reason="CuPy is not installed").cuda.nvrtc
    try:
        nvrtc.getVersion()
    except Exception as error:
        pytest.skip(f"CuPy finds no NVRTC: {error}")
    from mpisparse.backends.cuda.binding import compile_cubin

    for sm in ("80", "90"):
        assert compile_cubin(sm)[:4] == b"\x7fELF"
    program = nvrtc.createProgram(source.joined(), "mpisparse.cu", (), ())
    nvrtc.compileProgram(program, ("--gpu-architecture=compute_90", *source.EXACT, *source.defines(), "-std=c++17"))
    assert_exact(nvrtc.getPTX(program).decode())
