"""Every option of every scheme changes something that a user sees: a run with it differs from the same run without.

A run gives bits: weights, residuals and statistics of every step, and whatever was refused. The same options give the same
bits twice, so that a difference is the option's. The guard below finds options that no line of the table sets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from autos import SLOW, script
from mpi4py import MPI
from ranks import seeded
from torch import nn

import mpisparse
from mpisparse.names import SCHEMES

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3), pytest.mark.filterwarnings("ignore")]

STEPS = 10
NEVER_FINITE = 5  # the step whose gradient is not, where a case asks for that


def net(width: int) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(30, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 20))


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = (torch.randn(8, 30, generator=seeded(rank, step)) * (1 + rank)).to(next(model.parameters()).dtype)
    return (model(x) - x[:, :20].sin()).square().mean()


@dataclasses.dataclass(frozen=True)
class Case:
    """An option of a scheme with two values of it, None for its default; `given` are other options that it needs.

    scheme: also those that have it from the same class are covered. dtype: of the weights. broken: one gradient is not
    finite. metrics: what is observed. needed: without the option it is refused.
    """

    scheme: str
    option: str
    value: Any
    other: Any = None
    given: tuple[tuple[str, Any], ...] = ()
    dtype: torch.dtype = torch.float32
    broken: bool = False
    metrics: tuple[float, ...] = ()
    width: int = 40
    needed: bool = False


def case(
    scheme: str, option: str, value: Any, other: Any = None, *, more: dict[str, Any] | None = None, **given: Any
) -> Case:
    return Case(scheme, option, value, other, tuple(given.items()), **(more or {}))


PROBED = {"probe": "held out", "granularity": "fine", "staleness": 0}
QUICK = {"history": 3, "validate_every": 5, "publish_after": 1}
FLAT, RISING = (1.0, 1.0, 1.001, 1.0, 1.0), (1.0, 1.05, 1.2, 1.5, 2.0)
K = functools.partial(case, "predictive", more={"metrics": FLAT}, **QUICK)
FALL = functools.partial(case, "predictive", more={"metrics": RISING}, **QUICK)

CASES = [
    # of all schemes
    case("exdyna", "density", 0.2),
    case("exdyna", "codec", "int8"),
    case("exdyna", "accumulate", "backward"),
    case("exdyna", "nonfinite", "skip", more={"broken": True}),
    case("exdyna", "beta", 0.3, codec="momentum-int8"),
    case("exdyna", "segment_nbytes", 64),
    case("drift", "buffers", "average", "own"),
    case("exdyna", "hierarchy", "node"),
    case("exdyna", "density_warmup", 4),
    case("exdyna", "density_from", 0.5, density_warmup=4),
    case("exdyna", "overlap", True),
    case("exdyna", "bucket_mb", 0.002, 0.004, overlap=True),
    case("exdyna", "staleness", 1),
    # exclusive partitions
    case("exdyna", "controller", "paper"),
    case("exdyna", "partitioner", "static"),
    case("exdyna", "blocks", 3),
    case("exdyna", "reduce", "allreduce"),
    case("exdyna", "masks", "own"),
    case("exdyna", "scorer", "average"),
    case("exdyna", "alpha", 0.1, scorer="average"),
    case("exdyna", "compensate", False),
    case("momentum", "mask", "gradient"),
    case("momentum", "percentile", "exact"),
    # predictive
    case("predictive", "rule", "importance", **QUICK),
    case("predictive", "percentile", "exact", **QUICK),
    case("predictive", "history", 4, 3, validate_every=5, publish_after=1),
    case("predictive", "features", "all", **QUICK),
    case("predictive", "nets", "shared", **QUICK),
    case("predictive", "validation", "other", **QUICK),
    case("predictive", "validate_every", 6, history=3),
    case("predictive", "publish_after", 2, history=3, validate_every=5),
    case("predictive", "refresh", "step", history=3, validate_every=5),
    case("predictive", "budget", 0.5, **QUICK),
    case("predictive", "learning_rate", 0.1, **QUICK),
    case("predictive", "seed", 1, **QUICK),
    case("predictive", "compensate", False, **QUICK),
    case("predictive", "rescale", True, compensate=False, **QUICK),
    case("predictive", "scale_cap", 1.5, compensate=False, rescale=True, **QUICK),
    K("adapt_k", False),
    K("k_patience", 3),
    K("k_factor", 2.0),
    K("k_most", 1.5),
    K("k_slow", 0.0001),
    FALL("k_least", 0.8),
    FALL("k_fast", 0.3),
    # speculative
    case("speculative", "staleness", 2),
    case("speculative", "epsilon", 0.1, **PROBED),
    case("speculative", "influence", "update", granularity="fine", probe="held out"),
    case("speculative", "scored", "after", granularity="fine"),
    case("speculative", "average_rate", 0.1, granularity="fine"),
    case("speculative", "probe", "held out", granularity="fine", influence="update"),
    case("speculative", "probe_every", 3, epsilon=0.1, **PROBED),
    case("speculative", "threshold", 1e-6, granularity="fine"),
    case("speculative", "granularity", "fine"),
    case("speculative", "largest", 1000, granularity="coarse"),
    case("speculative", "horizon", 10),
    case("speculative", "budget", 100, granularity="rule"),
    case("speculative", "reward", "seconds", granularity="learned"),
    case("speculative", "learner", "state", granularity="learned"),
    case("speculative", "confidence", "half", granularity="rule"),
    case("speculative", "server", "rank0"),
    case("speculative", "average", "received", compensate=False),
    case("speculative", "tolerance", 1e-6),
    case("speculative", "measure", "relative"),
    case("speculative", "per", "layer"),
    case("speculative", "compensate", False),
    case("speculative", "seed", 1, granularity="learned"),
    # drift
    case("drift", "dense_steps", 4),
    case("drift", "dense_codec", "sign", dense_steps=4),
    case("drift", "every", 3),
    case("drift", "spread", False, density=1.0, every=3),
    case("drift", "by", "groups"),
    case("drift", "rate", 0.5),
    case("drift", "staleness", 1),
    case("drift", "remainder", True, more={"dtype": torch.bfloat16, "needed": True}),
    case("drift", "controller", "paper"),
    case("drift", "partitioner", "static"),
    case("drift", "blocks", 3),
    case("drift", "masks", "own"),
    case("drift", "granularity", "coarse", "fine", masks="granular"),
    case("drift", "average", "received", masks="own"),
    case("drift", "server", "rank0", masks="own"),
    case("drift", "scorer", "average"),
    case("drift", "history", 4, 3, validate_every=5, scorer="predicted", validation="held out"),
    case("drift", "features", "all", validate_every=5, history=3, scorer="predicted", validation="held out"),
    case("drift", "nets", "shared", validate_every=5, history=3, scorer="predicted", validation="held out"),
    case("drift", "validation", "other", scorer="predicted", validate_every=5, history=3),
    case("drift", "validate_every", 6, history=3, scorer="predicted", validation="held out"),
    # baselines
    case("topk", "compensate", False),
    case("topk", "masks", "own"),
    case("randomk", "seed", 1),
    case("threshold", "threshold", 0.01),
    case("dgc", "factor", 0.5),
    case("dgc", "clip", 0.1),
    case("dgc", "warm_up", 5),
    case("dgc", "seed", 1, more={"width": 200}),  # it samples where there is much to sample from
    case("diloco", "every", 4),
    case("diloco", "outer_rate", 0.5, every=4),
    case("diloco", "outer_momentum", 0.5, every=4),
    case("sparseloco", "chunk", 100, every=4),
    case("sparseloco", "feedback", 0.5, every=4),
    case("sparseloco", "outer_rate", 0.5, every=4),
    case("demo", "decay", 0.5),
    case("demo", "chunk", 8),
]


def functions(model: nn.Module) -> dict[str, Callable[[], Any]]:
    """The callables that the table names."""
    return {
        "held out": lambda: loss_of(model, 77, 0),
        "other": lambda: loss_of(model, 78, 0).square(),
        "half": lambda: 0.5,
    }


def made(this: Case, model: nn.Module, value: Any) -> mpisparse.GradientSync:
    named = functions(model)
    options: dict[str, Any] = dict(this.given)
    if this.scheme == "predictive":
        options.setdefault("validation", "held out")
    if "density" not in options and this.option not in ("density", "threshold") and this.scheme not in ("dense", "diloco"):
        options["density"] = 0.05
    if value is not None:
        options[this.option] = value
    options = {key: named.get(given, given) if isinstance(given, str) else given for key, given in options.items()}
    return mpisparse.GradientSync(model, scheme=this.scheme, **options)


def observed(comm: MPI.Intracomm, this: Case, value: Any) -> str:
    """A digest of all that a user sees of a run; collective."""
    seen = hashlib.sha256()
    model = net(this.width).to(this.dtype)
    try:
        sync = made(this, model, value)
    except mpisparse.ConfigurationError as error:
        if value is not None or not this.needed:
            raise  # a case that is refused shows nothing
        return str(error)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = mpisparse.attach(optimizer, sync)
    with contextlib.suppress(AttributeError):  # its share of the cores changes when the thread rests, and no bit
        seen.update(str(sync._aggregator.works.scorer.background._cores).encode())  # type: ignore[attr-defined]
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, comm.rank, step)
        if this.broken and step == NEVER_FINITE:
            loss = loss * float("nan")
        sync.note_loss(float(loss.detach()))
        loss.backward()
        for p in model.parameters():
            if p.grad is not None and not (this.broken and step == NEVER_FINITE):
                p.grad.mul_(0.5)  # has no effect where gradients were taken during backward
        try:
            optimizer.step()
        except mpisparse.GradientError as error:
            seen.update(str(error).split("|")[-1].encode())
            break
        stats = {key: each for key, each in dataclasses.asdict(sync.stats).items() if key not in ("seconds", "details")}
        seen.update(repr((sync.density, sync.k, stats)).encode())
        for tensor in (*model.parameters(), sync.residual):
            seen.update(tensor.detach().float().numpy().tobytes())
        if step < len(this.metrics):
            sync.observe(this.metrics[step])
    with sync.global_weights():
        for buffer in model.buffers():
            seen.update(buffer.double().numpy().tobytes())
    seen.update(repr(sync.state_dict(copy=False).get("step.policy")).encode())  # what a policy has learnt shows later
    handle.remove()
    sync.close()
    return seen.hexdigest()


BEFORE: dict[tuple[Any, ...], list[str]] = {}  # results of runs without an option, by everything but the option


def without(comm: MPI.Intracomm, this: Case) -> list[str]:
    """The ranks' digests of a run with the other value; run once for all cases that agree in the rest. Collective."""
    named = None if this.other is None else (this.option, this.other)
    free = this.option in ("density", "threshold")  # which have no density beside them
    key = (this.scheme, this.given, named, free, this.dtype, this.broken, this.metrics, this.width)
    if key not in BEFORE:
        BEFORE[key] = comm.allgather(observed(comm, this, this.other))
    return BEFORE[key]


@pytest.mark.parametrize("this", CASES, ids=lambda this: f"{this.scheme}-{this.option}")
def test_an_option_has_an_effect(comm: MPI.Intracomm, this: Case) -> None:
    changed = comm.allgather(observed(comm, this, this.value))
    assert changed != without(comm, this), f"{this.option}={this.value!r} changes nothing that a user sees"


@pytest.mark.parametrize("scheme", sorted({this.scheme for this in CASES}))
def test_the_same_options_give_the_same_run(comm: MPI.Intracomm, scheme: str) -> None:
    """Otherwise differences would prove nothing."""
    for this in [this for this in CASES if this.scheme == scheme and this.option != "reward"][::8]:
        assert comm.allgather(observed(comm, this, this.other)) == without(comm, this)


def test_auto_without_weights_is_another_run(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a slow link that is given: auto chooses by times."""
    script(monkeypatch)[:] = [SLOW]
    this = case("auto", "weights", False, more={"width": 400})
    assert comm.allgather(observed(comm, this, this.value)) != without(comm, this)


def definer(scheme: str, option: str) -> type:
    """The first class in which an option was declared."""
    return next(kind for kind in reversed(SCHEMES[scheme].__mro__) if option in vars(kind).get("__annotations__", {}))


def test_every_option_of_every_scheme_has_a_case() -> None:
    covered = {(definer(this.scheme, this.option), this.option) for this in CASES}
    ours = [scheme for scheme in SCHEMES if SCHEMES[scheme].__module__.startswith("mpisparse.")]  # not what tests register
    ours.remove("auto")  # it chooses by times: test_auto.py has its options
    every = {(definer(scheme, field.name), field.name) for scheme in ours for field in dataclasses.fields(SCHEMES[scheme])}
    assert covered >= every, f"no case in CASES sets {sorted(option for _, option in every - covered)}"
