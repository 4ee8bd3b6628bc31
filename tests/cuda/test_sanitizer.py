"""Every check again under the address sanitizer, which also catches reads beyond an array."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from emulator import COMPILER, available

HERE = Path(__file__).parent

# Reads one element too far, which changes no result; then all checks, which must not.
SCRIPT = """
import sys
sys.path[:0] = {paths!r}
from checks import CHECKS, Device
from emulator import Emulator
from mpisparse.backends.cuda.backend import CudaBackend
import numpy as np

if "planted" in sys.argv:
    text = 'extern "C" __global__ void far(float* x) {{ if (x[8] == 1.5f) x[0] = 1.0f; }}'
    emulator = Emulator(block=32, scan=32, text=text, sanitize="address")
    emulator.launch("far", 1, 32, [np.uint64(CudaBackend(emulator).empty(8, np.float32).data_ptr())])
else:
    for order in ("forward", "shuffled"):
        emulator = Emulator(block=64, scan=64, order=order, sanitize="address")
        for name, check in CHECKS.items():
            for n in (0, 1, 2047, 2049):
                check(Device(CudaBackend(emulator)), n)
    print("clean")
"""


def sanitized(*args: str) -> subprocess.CompletedProcess[str]:
    """Run the script in a process that loads the sanitizer first."""
    library = subprocess.run([COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": library.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "OMP_NUM_THREADS": "1",
    }
    code = SCRIPT.format(paths=[str(HERE), str(HERE.parent)])
    return subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, check=False, env=environment, timeout=1800
    )


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason="no C++ compiler to build the emulator with")
def test_no_kernel_reads_or_writes_beyond_its_arrays() -> None:
    planted = sanitized("planted")
    assert planted.returncode != 0
    assert "AddressSanitizer" in planted.stderr
    clean = sanitized()
    assert clean.returncode == 0, clean.stderr[-3000:]
    assert clean.stdout == "clean\n"
