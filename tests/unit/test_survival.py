"""Ranks die at chosen moments of a training under mpirun --with-ft ulfm; the others go on and lose nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import emulator
import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpisparse
from mpisparse.comm import mpi
from mpisparse.comm.exchange import Exchange
from mpisparse.errors import ConfigurationError
from mpisparse.model.survivors import check_mirror
from mpisparse.schemes import configure
from tests.survival import oracle

SPARSE = {"density": 0.02}
needs_ulfm = pytest.mark.skipif(not mpi.knows_ulfm(), reason="ULFM NOT TESTED: this MPI is not Open MPI, or lacks it")
needs_compiler = pytest.mark.skipif(not emulator.available(), reason="no C++ compiler to build the emulator with")
EARLY, LATE = ("roll call", "before commit", "reduce"), ("agree", "after commit", "return")
OWN = {**SPARSE, "masks": "own"}
STALE = {**SPARSE, "staleness": 1}
EARLY_BUCKETS = {"overlap": True, "bucket_mb": 0.004}  # three of them


def deaths(*phases: str) -> list[dict[str, Any]]:
    """Ranks 0, 2 and 1 die, one step after the other; rank 3 never does."""
    return [
        {"rank": rank, "step": 2 + i, "phase": phase} for i, (rank, phase) in enumerate(zip((0, 2, 1), phases, strict=False))
    ]


@needs_ulfm
@pytest.mark.parametrize(
    ("scheme", "options", "phases"),
    [
        ("exdyna", SPARSE, ("after commit", "save", "reduce")),
        ("exdyna", STALE, ("reduce", "save", "before commit")),
        *(
            pytest.param(scheme, options, phases, marks=pytest.mark.slow)
            for scheme, options in (
                ("exdyna", STALE),
                ("exdyna", {**STALE, "codec": "int8"}),
                ("exdyna", {**STALE, "scorer": "average"}),
                ("exdyna", {**OWN, "staleness": 2}),
                ("exdyna", {**STALE, "codec": "momentum-int8"}),
                ("exdyna", {**SPARSE, **EARLY_BUCKETS}),
                ("exdyna", {**SPARSE, **EARLY_BUCKETS, "codec": "int8"}),
                ("dense", EARLY_BUCKETS),
                ("dense", {**EARLY_BUCKETS, "codec": "int4"}),
                ("drift", {"density": 0.05, "staleness": 1}),
                ("drift", {"density": 1.0, "staleness": 1}),
                ("drift", {"density": 1.0, "staleness": 1, "every": 2}),
                ("drift", {"density": 0.05, "staleness": 1, "every": 2}),
            )
            for phases in (("call 1", "after commit", "call 5"), ("roll call", "backward", "call 3"))
        ),
        pytest.param("drift", {"density": 0.05, "staleness": 1}, ("saved", "save", "exception"), marks=pytest.mark.slow),
        *(
            pytest.param(scheme, options, phases, marks=pytest.mark.slow)
            for scheme in ("exdyna", "momentum", "topk", "cltk", "threshold", "sidco", "dgc")
            for options, phases in ((SPARSE, EARLY), (SPARSE, LATE))
        ),
        pytest.param("exdyna", SPARSE, ("unite", "exception", "return"), marks=pytest.mark.slow),
        pytest.param("exdyna", SPARSE, ("saved", "save", "backward"), marks=pytest.mark.slow),
        pytest.param("exdyna", {**SPARSE, "codec": "int8"}, EARLY, marks=pytest.mark.slow),
        pytest.param("exdyna", {**SPARSE, "codec": "int8"}, LATE, marks=pytest.mark.slow),
        pytest.param("exdyna", {**SPARSE, "accumulate": "backward"}, ("before commit", "reduce"), marks=pytest.mark.slow),
        pytest.param("exdyna", {**SPARSE, "scorer": "average"}, ("before commit", "reduce"), marks=pytest.mark.slow),
        pytest.param("exdyna", {**SPARSE, "compensate": False}, ("before commit", "reduce"), marks=pytest.mark.slow),
        pytest.param("exdyna", OWN, ("before commit", "return"), marks=pytest.mark.slow),
        pytest.param("topk", OWN, ("after commit", "backward"), marks=pytest.mark.slow),
        pytest.param("randomk", SPARSE, EARLY, marks=pytest.mark.slow),
        pytest.param("randomk", SPARSE, ("agree", "after commit", "unite"), marks=pytest.mark.slow),
        pytest.param("dense", {}, ("allreduce", "before commit", "roll call"), marks=pytest.mark.slow),
        pytest.param("dense", {"codec": "int4"}, ("reduce", "after commit", "unite"), marks=pytest.mark.slow),
        pytest.param("drift", {"density": 0.05}, ("reduce", "after commit", "return"), marks=pytest.mark.slow),
        pytest.param("drift", {"density": 0.05, "by": "groups"}, ("before commit", "return"), marks=pytest.mark.slow),
        pytest.param("drift", {"density": 1.0, "every": 2}, ("reduce", "roll call"), marks=pytest.mark.slow),
        pytest.param("drift", {"density": 1.0}, ("return", "before commit"), marks=pytest.mark.slow),
        pytest.param("diloco", {"every": 1, "codec": "int8"}, ("reduce", "after commit"), marks=pytest.mark.slow),
        pytest.param("sparseloco", {"every": 1}, ("unite", "before commit"), marks=pytest.mark.slow),
        pytest.param("demo", {"density": 0.05}, ("unite", "after commit"), marks=pytest.mark.slow),
    ],
)
def test_the_living_go_on(scheme: str, options: dict[str, Any], phases: tuple[str, ...], tmp_path: Path) -> None:
    plan = {"scheme": scheme, "options": options, "steps": 7, "deaths": deaths(*phases), "save": "save" in phases}
    if "save" in phases:  # steps 2 and 5 end with a checkpoint
        plan["deaths"][1]["step"], plan["deaths"][2]["step"] = 5, 6
    ranks = len(phases) + 1
    done = oracle.started(tmp_path, ranks, plan)
    assert done.returncode == 0, done.stderr
    oracle.check(tmp_path, ranks, plan)
    assert "of norm" in done.stderr


@needs_ulfm
@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("dense", {**EARLY_BUCKETS, "codec": "int4"}),
        pytest.param("exdyna", STALE, marks=pytest.mark.slow),
        pytest.param("drift", {"density": 1.0, "staleness": 1}, marks=pytest.mark.slow),
    ],
)
def test_the_living_go_on_between_hosts(scheme: str, options: dict[str, Any], tmp_path: Path) -> None:
    """There, exchanges in flight are many short messages."""
    phases = ("call 3", "after commit", "call 4")
    plan = {"scheme": scheme, "options": options, "steps": 7, "deaths": deaths(*phases), "apart": True}
    done = oracle.started(tmp_path, 4, plan)
    assert done.returncode == 0, done.stderr
    oracle.check(tmp_path, 4, plan)


@needs_ulfm
@needs_compiler
@pytest.mark.parametrize(
    ("scheme", "options", "phases"),
    [
        ("exdyna", {**SPARSE, "codec": "int8"}, ("reduce", "before commit")),
        *(
            pytest.param(scheme, options, phases, marks=pytest.mark.slow)
            for scheme, options, phases in (
                ("exdyna", {**STALE, "codec": "momentum-int8"}, ("call 1", "after commit")),
                ("exdyna", {**SPARSE, **EARLY_BUCKETS}, ("roll call", "call 3")),
                ("exdyna", OWN, ("before commit", "return")),
                ("momentum", SPARSE, LATE),
                ("topk", SPARSE, EARLY),
                ("sidco", SPARSE, ("unite", "return")),
                ("dense", {"codec": "int4"}, ("reduce", "after commit", "unite")),
                ("drift", {"density": 0.05}, ("reduce", "return")),
                ("drift", {"density": 1.0}, ("reduce", "roll call")),
                ("drift", {"density": 0.05, "staleness": 1}, ("call 1", "after commit")),
                ("sparseloco", {"every": 1}, ("unite", "before commit")),
                ("demo", {"density": 0.05}, ("unite", "after commit")),
            )
        ),
    ],
)
def test_the_living_go_on_with_models_on_devices(
    scheme: str, options: dict[str, Any], phases: tuple[str, ...], tmp_path: Path
) -> None:
    plan = {"scheme": scheme, "options": options, "steps": 6, "deaths": deaths(*phases), "device": True}
    done = oracle.started(tmp_path, len(phases) + 1, plan)
    assert done.returncode == 0, done.stderr
    oracle.check(tmp_path, len(phases) + 1, plan)


@needs_ulfm
def test_a_death_before_buckets_have_an_order(tmp_path: Path) -> None:
    """In the first step some of the living have heard of the order before the death, and some have not."""
    deaths = [{"rank": 1, "step": 0, "phase": "order"}]
    plan = {"scheme": "dense", "options": EARLY_BUCKETS, "steps": 4, "deaths": deaths, "save": False}
    done = oracle.started(tmp_path, 4, plan)
    assert done.returncode == 0, done.stderr
    oracle.check(tmp_path, 4, plan)


@needs_ulfm
@pytest.mark.parametrize("device", [False, pytest.param(True, marks=needs_compiler)], ids=["cpu", "device"])
@pytest.mark.parametrize(
    ("scheme", "options", "phase", "ranks", "mirror"),
    [
        ("exdyna", SPARSE, "reduce", 3, 2),
        *(
            pytest.param(scheme, options, phase, ranks, mirror, marks=pytest.mark.slow)
            for scheme, options in (
                ("exdyna", SPARSE), ("topk", SPARSE), ("drift", {"density": 0.05, "codec": "fp32"}),
                ("drift", {"density": 1.0, "codec": "fp32", "every": 3}),
            )
            for phase, ranks, mirror in (("before commit", 2, 1), ("after commit", 4, 3), ("backward", 3, 2))
        ),
    ],
)  # fmt: skip
def test_another_rank_goes_on_with_a_copy(
    scheme: str, options: dict[str, Any], phase: str, ranks: int, mirror: int, device: bool, tmp_path: Path
) -> None:
    plan = {"scheme": scheme, "options": options, "steps": 7, "mirror": mirror, "device": device}
    plan["deaths"] = [{"rank": 1, "step": 4, "phase": phase}]
    done = oracle.started(tmp_path, ranks, plan)
    assert done.returncode == 0, done.stderr
    oracle.check(tmp_path, ranks, plan)
    for end in oracle.ends(tmp_path).values():
        assert end["told"][0]["kept"] > 0
    row = oracle.read(tmp_path / "step-3-0.npz")
    part, n = 2 % mirror, len(row["mean"])  # that set out after step 2
    assert row["mirrored"] == 4 * ((part + 1) * n // mirror - part * n // mirror)


@needs_ulfm
@pytest.mark.parametrize(
    ("phase", "step", "words", "options"),
    [
        ("exit", 3, "the end of the program", SPARSE),
        *(
            pytest.param(phase, step, words, options, marks=pytest.mark.slow)
            for phase, step, words, options in (
                ("interrupt", 3, "the end of the program", SPARSE),
                ("start", -1, "ending all ranks", SPARSE),
                ("exit", 3, "the end of the program", STALE),
                ("exit", 3, "the end of the program", {**SPARSE, **EARLY_BUCKETS}),
            )
        ),
    ],
)
def test_a_rank_that_leaves_ends_all(phase: str, step: int, words: str, options: dict[str, Any], tmp_path: Path) -> None:
    plan = {"scheme": "exdyna", "options": options, "steps": 7, "deaths": [{"rank": 1, "step": step, "phase": phase}]}
    done = oracle.started(tmp_path, 3, plan)
    assert done.returncode != 0
    assert "watchdog" not in done.stderr, "ranks waited until it ended them; mpirun reports another code than its 87"
    assert words in done.stderr
    assert not oracle.ends(tmp_path)


@pytest.mark.parametrize(
    ("scheme", "words"),
    [("exdyna", "--with-ft ulfm"), ("predictive", "choose exdyna"), ("dgc", "--with-ft ulfm")],
)
def test_what_cannot_survive_is_refused(scheme: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        mpisparse.GradientSync(torch.nn.Linear(3, 2), scheme=scheme, on_failure="shrink", comm=MPI.COMM_SELF)
    with pytest.raises(ConfigurationError, match="on_failure"):
        mpisparse.GradientSync(torch.nn.Linear(3, 2), scheme=scheme, on_failure="ignore", comm=MPI.COMM_SELF)
    with pytest.raises(ConfigurationError, match="leave it out"):
        mpisparse.GradientSync(torch.nn.Linear(3, 2), scheme="dgc", clip=1.0, on_failure="shrink", comm=MPI.COMM_SELF)


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("topk", {"hierarchy": "node"}),
        ("exdyna", {"hierarchy": "node"}),
        ("drift", {"dense_steps": 3}),
        ("drift", {"masks": "own", "staleness": 1}),
    ],
)
def test_options_that_cannot_survive_are_refused(scheme: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"with {next(iter(options))}=.*leave it out"):
        mpisparse.GradientSync(torch.nn.Linear(3, 2), scheme=scheme, on_failure="shrink", comm=MPI.COMM_SELF, **options)


@pytest.mark.parametrize(
    ("scheme", "options", "words"),
    [
        ("dense", {"codec": "int8"}, "all of it is delivered"),
        ("topk", {"masks": "own"}, "does not hear which"),
        ("exdyna", {"compensate": False}, "nothing waits"),
        ("exdyna", {"staleness": 1}, "what is in flight"),
        ("drift", {"staleness": 1}, "what is in flight"),
        ("exdyna", {"overlap": True}, "what is in flight"),
        ("exdyna", {}, "of use with on_failure"),
    ],
)
def test_what_cannot_be_copied_is_refused(scheme: str, options: dict[str, Any], words: str) -> None:
    exchange = Exchange(MPI.COMM_SELF)
    on_failure = "abort" if words.startswith("of use") else "shrink"
    with pytest.raises(ConfigurationError, match=words):
        check_mirror(exchange, scheme, configure(scheme, **options), 3, on_failure)
    with pytest.raises(ConfigurationError, match="mirror must be a whole number >= 1"):
        check_mirror(exchange, scheme, configure(scheme, **options), 0, on_failure)


def test_the_program_ends_as_ever_where_no_rank_may_die() -> None:
    leave = sys.exit
    mpisparse.GradientSync(torch.nn.Linear(3, 2), comm=MPI.COMM_SELF).close()
    assert sys.exit is leave


@pytest.mark.parametrize(
    ("codec", "mean", "sound"),
    [
        ("fp32", (4.0, 0.0), True), ("fp32", (4.001, 0.0), False), ("fp32", (4.0, 1.0), False), ("int8", (4.0, 0.0), True),
        ("int8", (4.001, 0.0), False),
    ],
)  # fmt: skip
def test_the_oracle_notices_a_wrong_mean(codec: str, mean: tuple[float, float], sound: bool, tmp_path: Path) -> None:
    plan = {"scheme": "exdyna", "options": {"codec": codec}, "steps": 1, "deaths": []}
    had = {"residual": (3.0, 1.0), "owed": (3.0, 1.0), "added": (1.0, 1.0)}
    done = {"mean": mean, "weights": mean, "after": (0.0, 2.0), "owed": (0.0, 2.0)}
    (tmp_path / "end-0.json").write_text('{"told": []}')
    np.savez(tmp_path / "had-0-0.npz", **{name: np.array(values, dtype=np.float32) for name, values in had.items()})
    arrays = {name: np.array(values, dtype=np.float32) for name, values in done.items()}
    np.savez(tmp_path / "step-0-0.npz", **arrays, group=np.array([0]))
    if sound:
        oracle.check(tmp_path, 1, plan)
        return
    with pytest.raises(AssertionError):
        oracle.check(tmp_path, 1, plan)
