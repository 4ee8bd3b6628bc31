"""The kernels' source: all *.cu joined, the common part first, and the options to compile it with."""

from __future__ import annotations

from pathlib import Path

from mpisparse.backends.cuda.launcher import BLOCK, SCAN
from mpisparse.errors import ConfigurationError

# Denormals are kept (no -ftz=true) and no product is fused with a sum: the bits are those of the CPU kernels.
EXACT = ("-ftz=false", "-fmad=false", "-prec-div=true")


def directory() -> Path:
    """Where the sources are: in the package, or beside it in a checkout."""
    package = Path(__file__).parents[2]
    for place in (package / "kernels", package.parent / "kernels"):
        if (place / "common.cu").is_file():
            return place
    raise ConfigurationError(f"the CUDA kernels are neither in {package} nor beside it; install mpisparse again")


def joined() -> str:
    """One source with all kernels."""
    place = directory()
    files = [place / "common.cu", *sorted(f for f in place.glob("*.cu") if f.name != "common.cu")]
    return "\n".join(file.read_text() for file in files)


def defines(block: int = BLOCK, scan: int = SCAN) -> tuple[str, ...]:
    """The sizes of blocks as compilers take them."""
    return (f"-DBLOCK={block}", f"-DSCAN={scan}")
