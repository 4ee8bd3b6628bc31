"""The source of the kernels: all *.cu files joined, common.cu first, and the options to compile it with."""

from __future__ import annotations

from pathlib import Path

from mpisparse.backends.cuda.launcher import BLOCK, SCAN
from mpisparse.errors import ConfigurationError

# Keep denormals (no -ftz=true) and fuse no product with a sum, for the same bits as the CPU kernels.
EXACT = ("-ftz=false", "-fmad=false", "-prec-div=true")


def directory() -> Path:
    """Find the sources: inside the package, or next to it in a checkout."""
    package = Path(__file__).parents[2]
    for place in (package / "kernels", package.parent / "kernels"):
        if (place / "common.cu").is_file():
            return place
    raise ConfigurationError(f"the CUDA kernels are neither in {package} nor next to it; install mpisparse again")


def joined() -> str:
    """Return one source with all kernels."""
    place = directory()
    files = [place / "common.cu", *sorted(f for f in place.glob("*.cu") if f.name != "common.cu")]
    return "\n".join(file.read_text() for file in files)


def defines(block: int = BLOCK, scan: int = SCAN) -> tuple[str, ...]:
    """Return the block sizes as compiler options."""
    return (f"-DBLOCK={block}", f"-DSCAN={scan}")
