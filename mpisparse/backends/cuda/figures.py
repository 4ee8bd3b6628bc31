"""Resources that the compiled kernels use: registers, spills, shared memory, occupancy.

`python -m mpisparse.backends.cuda.figures [SM ...]` prints the table of docs/results/gpu.md; it needs nvcc and no GPU.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpisparse.backends.cuda import source
from mpisparse.backends.cuda.launcher import BLOCK, SCAN
from mpisparse.backends.protocol import FEW_BITS, GROUP
from mpisparse.errors import ConfigurationError


@dataclass(frozen=True)
class Multiprocessor:
    """Limits of a multiprocessor: resident threads and blocks, bytes of shared memory; all have 65,536 registers."""

    threads: int
    blocks: int
    shared: int


CHIPS = {
    75: Multiprocessor(1024, 16, 64 << 10),
    80: Multiprocessor(2048, 32, 164 << 10),
    90: Multiprocessor(2048, 32, 228 << 10),
    100: Multiprocessor(2048, 32, 228 << 10),
    120: Multiprocessor(1536, 24, 100 << 10),
}
GROUPED = {"encode_int8", "encode_fp16", *(f"{verb}_{codec}" for verb in ("encode", "pack") for codec in FEW_BITS)}
REGISTERS, REGISTER_UNIT, WARP_UNIT, SHARED_UNIT, SHARED_RESERVED = 65_536, 256, 4, 128, 1024


@dataclass(frozen=True)
class Figures:
    """Resources of one kernel on one chip."""

    kernel: str
    sm: int
    registers: int
    spilled: int
    shared: int

    @property
    def block(self) -> int:
        """Threads per block."""
        return SCAN if self.kernel == "scan_counts" else GROUP if self.kernel in GROUPED else BLOCK

    @property
    def occupancy(self) -> float:
        """Resident threads as a share of the multiprocessor's limit."""
        chip, warps = CHIPS[self.sm], self.block // 32
        a_warp = -(-self.registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
        by_registers = REGISTERS // a_warp // WARP_UNIT * WARP_UNIT // warps
        by_shared = chip.shared // (-(-self.shared // SHARED_UNIT) * SHARED_UNIT + SHARED_RESERVED)
        blocks = min(chip.blocks, chip.threads // self.block, by_registers, by_shared)
        return blocks * self.block / chip.threads


def compile_text(text: str, options: Sequence[str]) -> str:
    """Compile a source with nvcc; return the PTX if there is any, else its output."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise ConfigurationError("nvcc is not on PATH; it comes with the CUDA toolkit")
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "kernels.cu").write_text(text)
        done = subprocess.run([nvcc, *options, "kernels.cu"], cwd=place, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigurationError(f"nvcc does not compile the kernels:\n{done.stderr}")
        made = Path(place) / "kernels.ptx"
        return made.read_text() if made.exists() else done.stderr + done.stdout


def ptx(sm: int) -> str:
    """Compile the kernels to PTX."""
    return compile_text(source.joined(), ["-ptx", f"-arch=compute_{sm}", *source.EXACT, *source.defines()])


def measure(chips: Sequence[int]) -> list[Figures]:
    """Compile for all chips and parse the assembler's report on every kernel."""
    targets = [f"-gencode=arch=compute_{sm},code=sm_{sm}" for sm in chips]
    options = ["-fatbin", *targets, "-Xptxas=-v", "-o", "kernels.fatbin", *source.EXACT, *source.defines()]
    said = compile_text(source.joined(), options)
    pattern = (
        r"Compiling entry function '(\w+)' for 'sm_(\d+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers(?:[^\n]*?(\d+) bytes smem)?"
    )
    return [
        Figures(kernel, int(sm), int(registers), int(stores) + int(loads), int(shared or 0))
        for kernel, sm, stores, loads, registers, shared in re.findall(pattern, said, re.DOTALL)
    ]


def table(figures: Sequence[Figures]) -> str:
    """Format registers and occupancy in per cent as a Markdown table, kernels by chips."""
    chips = sorted({f.sm for f in figures})
    by_place = {(f.kernel, f.sm): f for f in figures}
    lines = [
        "| kernel | threads | shared memory, bytes |" + "".join(f" sm_{sm} |" for sm in chips),
        "|---|---|---|" + "---|" * len(chips),
    ]
    for kernel in sorted({f.kernel for f in figures}):
        row = [by_place[kernel, sm] for sm in chips]
        cells = "".join(f" {f.registers}, {100 * f.occupancy:.0f} % |" for f in row)
        lines.append(f"| {kernel} | {row[0].block} | {row[0].shared} |{cells}")
    return "\n".join([*lines, "", f"Spilled bytes, all kernels on all chips: {sum(f.spilled for f in figures)}"])


if __name__ == "__main__":
    print(table(measure([int(sm) for sm in sys.argv[1:]] or list(CHIPS))))
