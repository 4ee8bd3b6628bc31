"""The machine code of the kernels: loops, and what is in them. NVRTC and nvdisasm are on PyPI; neither needs a GPU."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

WIDTHS = {"": 1, "64": 2, "128": 4}  # registers of a load or store


def nvdisasm() -> str | None:
    """Find the disassembler: installed as a Python package, or with the CUDA toolkit."""
    packages = Path(sysconfig.get_path("purelib")) / "nvidia"
    found = sorted(packages.glob("*/bin/nvdisasm"))
    return str(found[-1]) if found else shutil.which("nvdisasm")


def missing() -> str:
    """Say what is not installed, or nothing."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy and NVRTC are not installed: bin/setup --dev could not get them"
    return "" if nvdisasm() else "nvdisasm is not installed: bin/setup --dev could not get it"


@dataclass(frozen=True)
class Loop:
    """The instructions of a loop, from its label to the branch back to it."""

    code: tuple[str, ...]

    def count(self, pattern: str) -> int:
        return sum(re.search(pattern, line) is not None for line in self.code)

    def loads_before_the_first_wait(self) -> int:
        """Count the loads from global memory that are issued before an instruction needs the result of one."""
        loaded: set[int] = set()
        loads = 0
        for line in self.code:
            target, read = registers(line)
            if read & loaded:
                break
            if re.search(r"\bLDG?\.E", line):
                loads, loaded = loads + 1, loaded | target
        return loads


def registers(line: str) -> tuple[set[int], set[int]]:
    """Return the registers that an instruction writes and reads; those of an address count as two neighbours."""
    name, _, rest = re.sub(r"^@!?U?P\w+\s+", "", line).partition(" ")
    operands = [text.strip() for text in rest.split(",")]
    stores = name.startswith(("ST", "BRA", "ISETP", "FSETP"))
    width = WIDTHS[(re.search(r"\.(64|128)\b", name) or ["", ""])[1]] if name.startswith(("LD", "ST")) else 1
    written = set() if stores else _numbers(operands[0], width)
    read = set()
    for operand in operands if stores else operands[1:]:
        wide = 2 if "[" in operand else width if name.startswith("ST") else 1
        read |= _numbers(operand, wide)
    return written, read


def _numbers(operand: str, width: int) -> set[int]:
    return {int(r) + i for r in re.findall(r"(?<![UP\w])R(\d+)", operand) for i in range(width)}


def loops(cubin: bytes, kernel: str, place: Path) -> list[Loop]:
    """Disassemble a kernel and return its innermost loops."""
    file = place / "kernels.cubin"
    file.write_bytes(cubin)
    text = subprocess.run([str(nvdisasm()), "-c", str(file)], capture_output=True, text=True, check=True).stdout
    section = next(part for part in re.split(r"\.section\s+\.text\.", text) if part.startswith(f"{kernel},"))
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in section.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            code.append(instruction[1])
    ends = [(labels[m[1]], i + 1) for i, line in enumerate(code) if (m := re.search(r"BRA.*`\((\.L\w+)\)", line))]
    back = [(begin, end) for begin, end in ends if begin < end]
    inner = [(b, e) for b, e in back if not any((b, e) != (x, y) and b <= x and y <= e for x, y in back)]
    return [Loop(tuple(code[begin:end])) for begin, end in inner]
