"""Options are checked when they are made: an error says what was expected, what came and what to do."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import pytest

import mpisparse
from mpisparse.errors import ConfigurationError, GradientError, NonFiniteGradientError, suggest
from mpisparse.schemes import SCHEMES, configure
from mpisparse.schemes.dense import Dense
from mpisparse.schemes.partitioned import Exdyna

BAD = [
    ({"density": 0}, ["density must be in (0, 1]", "got 0"]),
    ({"density": 0.0}, ["density must be in (0, 1]", "got 0.0"]),
    ({"density": -0.1}, ["density must be in (0, 1]", "got -0.1"]),
    ({"density": 1.5}, ["density must be in (0, 1]", "got 1.5", "for 1.5 % pass 0.015"]),
    ({"density": 3}, ["density must be in (0, 1]", "got 3", "for 3 % pass 0.03"]),
    ({"density": 200}, ["density must be in (0, 1]", "got 200"]),
    ({"density": math.nan}, ["density must be in (0, 1]", "got nan"]),
    ({"density": math.inf}, ["density must be in (0, 1]", "got inf"]),
    ({"density": True}, ["density must be a number in (0, 1]", "got True"]),
    ({"density": "x"}, ["density must be a number in (0, 1]", "got 'x'"]),
    ({"density": "0.01"}, ["density must be a number in (0, 1]", "got '0.01'"]),
    ({"codec": "int9"}, ["unknown codec 'int9'", "did you mean 'int8'?", "choose from: bf16, fp16, fp32, int8"]),
    ({"codec": 8}, ["unknown codec 8", "choose from: bf16, fp16, fp32, int8"]),
    ({"accumulate": "backwards"}, ["unknown accumulate 'backwards'", "did you mean 'backward'?", "backward, step"]),
    ({"accumulate": None}, ["unknown accumulate None", "choose from: backward, step"]),
    ({"nonfinite": "rise"}, ["unknown nonfinite 'rise'", "did you mean 'raise'?", "choose from: raise, skip"]),
    ({"nonfinite": "skip", "accumulate": "backward"}, ['nonfinite="skip" needs accumulate="step"', "taken back"]),
    ({"segment_nbytes": 0}, ["segment_nbytes must be a whole number >= 1", "got 0"]),
    ({"segment_nbytes": 1e9}, ["segment_nbytes must be a whole number >= 1", "got 1000000000.0"]),
    ({"segment_nbytes": True}, ["segment_nbytes must be a whole number >= 1", "got True"]),
]
BAD_EXDYNA = [
    ({"controller": "tails"}, ["unknown controller 'tails'", "did you mean 'tail'?", "choose from: fixed, paper, tail"]),
    ({"partitioner": "bset"}, ["unknown partitioner 'bset'", "did you mean 'best'?", "choose from: best, paper"]),
    ({"reduce": "all-reduce"}, ["unknown reduce 'all-reduce'", "did you mean 'allreduce'?", "allreduce, owner"]),
    ({"reduce": "allreduce", "codec": "int8"}, ['reduce="allreduce" sums float32', 'codec must be "fp32"', "got 'int8'"]),
    ({"blocks": 0}, ["blocks must be a whole number >= 1", "got 0"]),
    ({"blocks": 2.5}, ["blocks must be a whole number >= 1", "got 2.5"]),
    (
        {"densty": 0.1},
        ["unknown option 'densty' for scheme \"exdyna\"", "did you mean 'density'?", "choose from: accumulate,"],
    ),
    (
        {"zzz": 1},
        ["unknown option 'zzz' for scheme \"exdyna\"; choose from: accumulate, alpha, beta, blocks, codec, compensate"],
    ),
]
BAD_DENSE = [
    ({"density": 0.1}, ['scheme "dense" sends everything', "density must be 1", "got 0.1"]),
    ({"codec": "int8"}, ['scheme "dense" sends float32 only', 'codec must be "fp32"', "got 'int8'"]),
    ({"controller": "tail"}, ["unknown option 'controller' for scheme \"dense\"", "choose from: accumulate"]),
]


@pytest.mark.parametrize(
    ("scheme", "options", "said"),
    [("exdyna", *case) for case in BAD + BAD_EXDYNA] + [("dense", *case) for case in BAD + BAD_DENSE],
)
def test_bad_values(scheme: str, options: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        configure(scheme, **options)
    for part in said:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        ("exdina", "unknown scheme 'exdina'; did you mean 'exdyna'? "),
        ("?", "unknown scheme '?'; choose"),
        (None, "None; choose"),
    ],
)
def test_unknown_schemes(scheme: Any, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        configure(scheme)
    assert said in str(caught.value)
    assert f"choose from: {', '.join(sorted(SCHEMES))}" in str(caught.value)


def test_only_shares_in_percent_get_a_hint() -> None:
    for density in (0, -1, 101, math.nan):
        with pytest.raises(ConfigurationError, match="density must be in") as caught:
            configure("exdyna", density=density)
        assert "%" not in str(caught.value)


def test_good_values() -> None:
    assert configure("exdyna") == Exdyna(density=0.001, codec="fp32", accumulate="step", nonfinite="raise")
    assert configure("exdyna", density=None, codec=None) == Exdyna()
    assert configure("exdyna", density=1, codec="int8", blocks=7).density == 1
    assert configure("exdyna", density=1e-9, reduce="allreduce").density == 1e-9
    assert configure("dense") == configure("dense", density=1, codec="fp32") == Dense()
    assert configure("exdyna", accumulate="backward", controller="paper", partitioner="paper", segment_nbytes=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        configure("dense").density = 0.5  # type: ignore[misc]


def test_errors_are_what_callers_catch() -> None:
    assert issubclass(ConfigurationError, ValueError)
    assert issubclass(NonFiniteGradientError, GradientError)
    assert issubclass(NonFiniteGradientError, FloatingPointError)
    assert suggest("alfa", ["beta", "alpha"]) == "did you mean 'alpha'? choose from: alpha, beta"
    assert suggest("x", ["beta", "alpha"]) == "choose from: alpha, beta"


def test_public_names() -> None:
    names = {
        "ConfigurationError",
        "GradientError",
        "GradientSync",
        "NonFiniteGradientError",
        "Stats",
        "__version__",
        "attach",
        "checkpoint",
        "codecs",
        "device",
        "errors",
        "exchange",
        "schemes",
    }
    assert names <= set(dir(mpisparse))
    assert dir(mpisparse) == sorted(mpisparse.__all__)
    assert mpisparse.ConfigurationError is ConfigurationError
    with pytest.raises(AttributeError, match="module 'mpisparse' has no attribute 'GradientSink'"):
        _ = mpisparse.GradientSink


LATE = """
import sys
import mpisparse
assert not {"torch", "numpy", "mpi4py"} & set(sys.modules), "importing mpisparse is not free"
assert dir(mpisparse)
import mpisparse.schemes
assert mpisparse.schemes.configure("exdyna", density=0.5).density == 0.5
assert "mpi4py.MPI" not in sys.modules, "importing mpisparse.schemes starts MPI"
assert "mpisparse.exchange" not in sys.modules
"""


# What starts MPI comes last, and each name before those whose import brings it along
FIRST_USE = """
import sys
import mpisparse
for name in ("errors", "codecs", "device", "exchange", "schemes", "checkpoint"):
    assert f"mpisparse.{name}" in sys.modules or name not in vars(mpisparse)
    assert ("mpi4py.MPI" in sys.modules) == (name in ("schemes", "checkpoint")), name
    assert getattr(mpisparse, name) is sys.modules[f"mpisparse.{name}"]
assert all(getattr(mpisparse, name) is not None for name in mpisparse.__all__)
assert mpisparse.checkpoint.save and mpisparse.device.local_device and mpisparse.exchange.local_rank() == 0
assert not sys.modules["torch"].cuda.is_initialized(), "a GPU was touched"
"""


def test_names_are_there_on_first_use() -> None:
    subprocess.run([sys.executable, "-c", FIRST_USE], check=True, timeout=300)


def test_importing_starts_no_mpi() -> None:
    """--help works on a login node."""
    subprocess.run([sys.executable, "-c", LATE], check=True, timeout=60)
