"""The names of schemes, codecs and drivers, for those who must check them without torch or MPI."""

from __future__ import annotations

SCHEMES = (
    "dense", "exdyna", "momentum", "predictive", "speculative", "topk", "cltk", "randomk", "threshold", "sidco", "dgc",
)  # fmt: skip
CODECS = ("fp32", "fp16", "bf16", "int8", "momentum-int8", "momentum-fp32")


def codecs_of(scheme: str) -> tuple[str, ...]:
    """The codecs that a scheme takes."""
    if scheme == "dense":
        return ("fp32",)
    return tuple(codec for codec in CODECS if scheme != "speculative" or not codec.startswith("momentum"))


DRIVERS = ("mpio",)  # of checkpoints
FREE_OPTIONS = ("density", "segment_nbytes", "nonfinite")  # of a scheme, that may differ from those of a saved state
