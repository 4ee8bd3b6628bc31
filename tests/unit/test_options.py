"""Options are checked on construction: an error says what was expected, what came and what to do."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
from typing import Any

import pytest

import mpisparse
from mpisparse.errors import ConfigurationError, GradientError, NonFiniteGradientError, suggest
from mpisparse.schemes import SCHEMES, configure, takes
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
    ({"accumulate": "backwards"}, ["unknown accumulate 'backwards'", "did you mean 'backward'?", "backward, step"]),
    ({"accumulate": None}, ["unknown accumulate None", "choose from: backward, step"]),
    ({"nonfinite": "rise"}, ["unknown nonfinite 'rise'", "did you mean 'raise'?", "choose from: raise, skip"]),
    ({"nonfinite": "skip", "accumulate": "backward"}, ['nonfinite="skip" needs accumulate="step"', "taken back"]),
    ({"segment_nbytes": 0}, ["segment_nbytes must be a whole number >= 1", "got 0"]),
    ({"segment_nbytes": 1e9}, ["segment_nbytes must be a whole number >= 1", "got 1000000000.0"]),
    ({"segment_nbytes": True}, ["segment_nbytes must be a whole number >= 1", "got True"]),
]
BAD_EXDYNA = [
    ({"codec": "int9"}, ["unknown codec 'int9'", "did you mean 'int8'?", "choose from: bf16, fp16, fp32, int2, int4, int8"]),
    ({"codec": 8}, ["unknown codec 8; choose from: bf16, fp16, fp32, int2, int4, int8"]),
    ({"codec": "int9", "reduce": "allreduce"}, ["unknown codec 'int9'; choose from: fp32"]),
    ({"compensate": "none"}, ["compensate must be True or False, got 'none'; pass False"]),
    ({"compensate": "residual"}, ["compensate must be True or False, got 'residual'; pass True"]),
    ({"compensate": "scale"}, ["compensate must be True or False, got 'scale'"]),
    ({"compensate": "False"}, ["compensate must be True or False, got 'False'; write false on the command line"]),
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
        ["unknown option 'zzz' for scheme \"exdyna\"; choose from: accumulate, alpha, beta, blocks, bucket_mb, buffers"],
    ),
]
BAD_DENSE = [
    ({"codec": "int9"}, ["unknown codec 'int9'", "did you mean 'int8'?"]),
    ({"codec": 8}, ["unknown codec 8; choose from: bf16"]),
    ({"density": 0.1}, ['scheme "dense" sends everything', "density must be 1", "got 0.1"]),
    ({"codec": "momentum-int8"}, ['scheme "dense" leaves momentum to the optimizer', "without momentum-"]),
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


@pytest.mark.parametrize(
    ("scheme", "options", "said"),
    [
        ("exdyna", {"every": 3}, "option 'every' is not for scheme \"exdyna\": gradients are exchanged in every step"),
        ("predictive", {"staleness": 1}, 'in flight it is scheme "exdyna" with scorer="predicted"'),
        ("momentum", {"staleness": 1}, 'in flight it is scheme "exdyna" with scorer="average"'),
        ("speculative", {"masks": "owners"}, "a rank moves ahead by what it has chosen itself"),
        ("drift", {"tolerance": 0.1}, "ranks train on weights of their own and so are ahead at all times"),
        ("exdyna", {"scorer": "predicted", "hierarchy": "node"}, "it learns from whole parameters"),
        ("drift", {"masks": "own", "hierarchy": "node"}, "they send other elements"),
        ("drift", {"scorer": "average", "hierarchy": "node"}, "fits no other layout of nodes"),
        ("drift", {"by": "groups", "masks": "own"}, "the groups that their owners select for all ranks"),
        ("drift", {"by": "groups", "scorer": "average"}, "has a score for each element"),
    ],
)
def test_options_of_other_schemes_and_pairs_that_cannot_be(scheme: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        configure(scheme, **options)


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


# Options that would change nothing

MOMENTUM_CODEC = 'does not blend what is sent with what was sent before; choose a momentum codec, such as "momentum-int8"'
IDLE: list[
    tuple[str, dict[str, Any], dict[str, Any], str]
] = [  # the last option has no effect, unless those after it are given
    ("exdyna", {"beta": 0.5}, {"codec": "momentum-fp32"}, f'beta has no effect: codec "fp32" {MOMENTUM_CODEC}'),
    ("topk", {"beta": 0.5}, {"codec": "momentum-int8"}, "beta has no effect"),
    ("exdyna", {"beta": 0.7}, {"codec": "momentum-int8"}, "beta has no effect"),  # its default too
    ("exdyna", {"alpha": 0.5}, {"scorer": "average"}, 'it is the rate of scorer "average"; choose that, or leave it out'),
    ("momentum", {"percentile": "exact", "controller": "paper"}, {"percentile": "estimate"}, "without a controller"),
    ("predictive", {"percentile": "exact", "controller": "tail"}, {"percentile": "estimate"}, "without a controller"),
    ("predictive", {"scale_cap": 2.0}, {"compensate": False, "rescale": True}, "it limits the factors of rescale=True"),
    ("predictive", {"compensate": False, "scale_cap": 2.0}, {"rescale": True}, "scale_cap has no effect"),
    ("predictive", {"refresh": "step", "budget": 0.5}, {"refresh": "slices"}, 'budget has no effect: refresh="step" waits'),
    ("predictive", {"refresh": "step", "publish_after": 2}, {"refresh": "slices"}, "publish_after has no effect"),
    *[
        (scheme, {"masks": "own", name: value}, {"masks": "owners"}, f'{name} has no effect: masks="own" sorts')
        for scheme in ("exdyna", "momentum", "predictive")
        for name, value in {"controller": "paper", "partitioner": "paper", "blocks": 7, "reduce": "owner"}.items()
    ],
    ("momentum", {"masks": "own", "percentile": "exact"}, {"masks": "owners"}, 'percentile has no effect: masks="own"'),
    *[
        ("predictive", {"adapt_k": False, f"k_{name}": value}, {"adapt_k": True}, f"k_{name} has no effect: adapt_k=False")
        for name, value in {"patience": 3, "factor": 2, "least": 0.5, "most": 2, "slow": 0.01, "fast": 0.1}.items()
    ],
    ("exdyna", {"history": 3}, {"scorer": "predicted"}, 'history has no effect: it is for the nets of scorer "predicted"'),
    ("exdyna", {"features": "all"}, {"scorer": "predicted"}, "features has no effect: it is for the nets of scorer"),
    ("drift", {"nets": "shared"}, {"scorer": "predicted"}, "nets has no effect: it is for the nets of scorer"),
    ("exdyna", {"probe": float}, {"scorer": "influence"}, 'probe has no effect: it is for scorer "influence"'),
    ("drift", {"scorer": "influence", "probe_every": 3}, {"probe": float}, "probe_every has no effect: there is no probe"),
    ("drift", {"validate_every": 8}, {"scorer": "predicted"}, "validate_every has no effect"),
    ("drift", {"masks": "own", "granularity": "fine"}, {"masks": "granular"}, 'it says how masks="granular" selects'),
    ("drift", {"masks": "granular", "blocks": 3}, {"masks": "owners"}, 'blocks has no effect: masks="granular" sorts'),
    ("drift", {"server": "rank0"}, {"masks": "own"}, "server has no effect: all ranks send the same elements"),
    ("drift", {"density": 1.0, "scorer": "average"}, {"density": 0.1}, "scorer has no effect: density 1 selects nothing"),
    ("speculative", {"scorer": "average", "scored": "after"}, {"scorer": "influence"}, "scored has no effect"),
    ("threshold", {"threshold": 0.1, "density": 0.01}, {"threshold": None}, "density has no effect: a given threshold"),
    ("speculative", {"granularity": "fine", "horizon": 9}, {"granularity": "schedule"}, 'granularity "schedule" or "rule"'),
    ("speculative", {"granularity": "learned", "horizon": 9}, {"granularity": "rule"}, "horizon has no effect"),
    ("speculative", {"granularity": "fine", "budget": 9}, {"granularity": "coarse"}, "budget has no effect"),
    ("speculative", {"granularity": "fine", "largest": 9}, {"granularity": "hybrid"}, "largest has no effect"),
    (
        "speculative",
        {"reward": "seconds"},
        {"granularity": "learned"},
        'reward has no effect: it is for granularity "learned"',
    ),
    (
        "speculative",
        {"confidence": float},
        {"granularity": "rule"},
        'confidence has no effect: it is for granularity "rule"',
    ),
    ("speculative", {"epsilon": 0.1}, {"probe": float}, "epsilon has no effect: without a probe or a threshold"),
    ("speculative", {"epsilon": 0.1}, {"threshold": 0.1}, "epsilon has no effect"),
    ("speculative", {"probe_every": 3}, {"probe": float}, "probe_every has no effect: there is no probe"),
    ("speculative", {"probe_every": 3}, {"granularity": "learned"}, "probe_every has no effect"),
    ("speculative", {"threshold": 0.1, "seed": 3}, {"probe": float}, "seed has no effect: nothing is random"),
    ("speculative", {"staleness": 0, "tolerance": 0.1}, {"staleness": 1}, "tolerance has no effect: at staleness 0"),
    ("speculative", {"staleness": 0, "measure": "relative"}, {"staleness": 2}, "measure has no effect"),
    ("speculative", {"staleness": 0, "per": "layer"}, {"staleness": 2}, "per has no effect"),
    ("speculative", {"tolerance": 0.0, "per": "layer"}, {"tolerance": 0.1}, "per has no effect: a tolerance of 0"),
    ("speculative", {"tolerance": math.inf, "measure": "relative"}, {"tolerance": 0.1}, "measure has no effect"),
]


@pytest.mark.parametrize(("scheme", "options", "needed", "said"), IDLE)
def test_what_would_have_no_effect_is_refused(
    scheme: str, options: dict[str, Any], needed: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)) as caught:
        configure(scheme, **options)
    assert str(caught.value).startswith(f"{list(options)[-1]} has no effect: ")
    assert str(caught.value).endswith(", or leave it out")
    configure(scheme, **{**options, **needed})


@pytest.mark.parametrize("scheme", ["dense", "drift"])
def test_no_codec_that_the_scheme_does_not_take_is_named(scheme: str) -> None:
    with pytest.raises(ConfigurationError, match="beta has no effect") as caught:
        configure(scheme, beta=0.5)
    assert '"momentum-' not in str(caught.value)


def test_what_is_not_given_is_not_refused() -> None:
    """Whatever the default; None counts as not given."""
    for scheme in SCHEMES:
        configure(scheme)
    assert configure("speculative", granularity="fine", budget=None, confidence=None, largest=None)
    assert configure("threshold", threshold=0.1, density=None)


def test_options_without_effect_are_options() -> None:
    """Names of options without effect are real options, for every scheme and every value of what they depend on."""
    for scheme, given in (
        *((scheme, {}) for scheme in SCHEMES),
        *((scheme, {**options, **needed}) for scheme, options, needed, _ in IDLE),
    ):
        made = configure(scheme, **given)
        assert set(made.without_effect()) <= {field.name for field in dataclasses.fields(made)}


WITH_COMPENSATE = [scheme for scheme in SCHEMES if takes(scheme, "compensate")]


@pytest.mark.parametrize("scheme", WITH_COMPENSATE)
def test_compensate_has_one_type(scheme: str) -> None:
    assert [type(configure(scheme, compensate=value).compensate) for value in (True, False)] == [bool, bool]  # type: ignore[attr-defined]
    for word, value in {"none": False, "residual": True}.items():
        with pytest.raises(ConfigurationError, match=f"compensate must be True or False, got {word!r}; pass {value}"):
            configure(scheme, compensate=word)


def test_what_an_earlier_version_called_compensate() -> None:
    for word, now in {"residual": (True, False), "scale": (False, True), "none": (False, False)}.items():
        values = SCHEMES["predictive"].upgraded({"compensate": word})
        assert (values["compensate"], values["rescale"]) == now
    with pytest.raises(ConfigurationError, match="got 'scale'; pass compensate=False, rescale=True"):
        configure("predictive", compensate="scale")
    with pytest.raises(ConfigurationError, match="rescale=True lets what is sent stand for the rest"):
        configure("predictive", rescale=True)


@pytest.mark.parametrize(
    ("scheme", "options", "hint"),
    [
        ("exdyna", {"compensat": False}, "did you mean 'compensate'? "),
        ("exdyna", {"compensat": "none"}, ""),  # compensate could not be that
        ("predictive", {"compensat": False}, "did you mean 'compensate'? "),
        ("exdyna", {"tolerence": 0.1}, ""),  # an option of another scheme
        ("speculative", {"tolerence": 0.1}, "did you mean 'tolerance'? "),
        ("speculative", {"averag": "received", "compensate": False}, "did you mean 'average'? "),  # which needs the other
        ("exdyna", {"block": 7.5}, ""),
        ("dense", {"betta": 0.5}, ""),  # it would have no effect
        ("exdyna", {"alfa": 0.5}, ""),
        ("exdyna", {"alfa": 0.5, "scorer": "average"}, "did you mean 'alpha'? "),
        ("speculative", {"densty": 0.5, "threshold": 1e-6, "granularity": "fine"}, ""),
        ("exdyna", {"block": 7}, "did you mean 'blocks'? "),
    ],
)
def test_only_what_fits_is_suggested(scheme: str, options: dict[str, Any], hint: str) -> None:
    name = next(iter(options))
    with pytest.raises(ConfigurationError) as caught:
        configure(scheme, **options)
    assert f"unknown option '{name}' for scheme \"{scheme}\"; {hint}choose from: accumulate" in str(caught.value)


def test_no_scorer_that_the_scheme_does_not_take_is_suggested() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown scorer 'magnitud'; choose from: average$"):
        configure("momentum", scorer="magnitud")
    with pytest.raises(ConfigurationError, match="scorer must be \"average\", got 'magnitude'"):
        configure("momentum", scorer="magnitude")
    with pytest.raises(ConfigurationError, match="did you mean 'magnitude'"):
        configure("exdyna", scorer="magnitud")


def test_schemes_without_momentum_take_plain_codecs() -> None:
    plain = ["fp32", "fp16", "bf16", "int8", "int4", "int2", "sign"]
    expected = dict.fromkeys(("dense", "drift", "diloco", "sparseloco", "demo", "auto"), plain)
    for scheme in SCHEMES:
        assert configure(scheme).codecs() == expected.get(scheme, plain + [f"momentum-{name}" for name in plain])


def test_public_names() -> None:
    names = {
        "ConfigurationError",
        "GradientError",
        "GradientSync",
        "NonFiniteGradientError",
        "Stats",
        "__version__",
        "aggregator",
        "attach",
        "checkpoint",
        "codecs",
        "device",
        "errors",
        "exchange",
        "register_codec",
        "register_scheme",
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
assert "mpisparse.comm.exchange" not in sys.modules
"""


# Each name before those whose import brings it along
FIRST_USE = """
import sys
import mpisparse
homes = {"codecs": "wire.codecs", "device": "backends.device", "exchange": "comm.exchange"}
for name in ("errors", "codecs", "device", "exchange", "schemes", "checkpoint"):
    home = f"mpisparse.{homes.get(name, name)}"
    assert home in sys.modules or name not in vars(mpisparse)
    assert getattr(mpisparse, name) is sys.modules[home]
assert all(getattr(mpisparse, name) is not None for name in mpisparse.__all__)
assert "mpi4py.MPI" not in sys.modules, "a name starts MPI"
assert mpisparse.checkpoint.save and mpisparse.device.local_device and mpisparse.exchange.local_rank() == 0
assert "mpi4py.MPI" in sys.modules
assert not sys.modules["torch"].cuda.is_initialized(), "a GPU was touched"
"""


def test_names_are_there_on_first_use() -> None:
    subprocess.run([sys.executable, "-c", FIRST_USE], check=True, timeout=900)


def test_importing_starts_no_mpi() -> None:
    """--help works on a login node."""
    subprocess.run([sys.executable, "-c", LATE], check=True, timeout=900)
