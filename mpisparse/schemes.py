"""Schemes by name: each is a record of options, checked when made, and a few lines that put the step's parts together."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mpisparse.agree import Inputs
from mpisparse.aside import gradient_aside
from mpisparse.baselines import CyclicTopK, HardThreshold, Picker, RandomK, SampledTopK, Sidco, TopK, UnionChooser
from mpisparse.blend import Blend
from mpisparse.codecs import CODECS
from mpisparse.errors import ConfigurationError, check_choice, suggest
from mpisparse.exclusive import ExclusiveChooser
from mpisparse.mass import MassScale
from mpisparse.parts import Clock, Parts
from mpisparse.predictive.demand import Demand
from mpisparse.predictive.nets import Nets
from mpisparse.predictive.scorer import Predicted, validation
from mpisparse.reference import PRODUCTS, SCORES
from mpisparse.score import Average, Corrected, Magnitude
from mpisparse.selector import PARTITIONERS, ExclusiveSelector
from mpisparse.speculative.granularity import Filter
from mpisparse.speculative.influence import Influence, Probe
from mpisparse.speculative.policy import Fixed, Learned, Policy, Rule, Schedule
from mpisparse.speculative.step import Rules, SpeculativeStep
from mpisparse.speculative.weights import Tolerance
from mpisparse.step import DenseStep, SparseStep, Stats
from mpisparse.threshold import CONTROLLERS

SEGMENT_NBYTES = 1 << 30
RULES = {"product": PRODUCTS, "importance": SCORES}


class Step(Protocol):
    """One step of a scheme; `run` is collective. Gradients that come before it are the scorer's to add."""

    @property
    def scorer(self) -> Magnitude: ...
    @property
    def scale(self) -> float: ...
    def observe(self, metric: float) -> None: ...
    @property
    def deferred(self) -> bool: ...
    @property
    def draining(self) -> bool: ...
    def check_by_hand(self) -> None: ...
    def adopt(self, optimizer: Any) -> None: ...
    def run(self, inputs: Inputs, clock: Clock) -> Stats: ...
    def used(self) -> NDArray[np.bool_] | None: ...
    def finish(self, stats: Stats) -> Stats: ...
    def note_loss(self, loss: float) -> None: ...
    def drain(self) -> Iterator[NDArray[np.bool_] | None]: ...
    def global_weights(self) -> AbstractContextManager[None]: ...
    def close(self) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def check(self, state: dict[str, Any]) -> None: ...
    def load(self, state: dict[str, Any]) -> None: ...


def check_density(density: object) -> float:
    """Return the density as a float in (0, 1] or say what is wrong with it."""
    if isinstance(density, bool) or not isinstance(density, int | float):
        raise ConfigurationError(f"density must be a number in (0, 1], got {density!r}")
    if not 0.0 < density <= 1.0:
        hint = f"; for {density:g} % pass {density / 100:g}" if 1.0 < density <= 100.0 else ""
        raise ConfigurationError(f"density must be in (0, 1], got {density!r}{hint}")
    return float(density)


@dataclass(frozen=True)
class Options:
    """What every scheme takes.

    density: share of all elements selected in a step. codec: how finely values are sent.
    accumulate: "step" reads p.grad in step(); "backward" takes each gradient as backward makes it.
    nonfinite: "raise" an error on all ranks, or "skip" the step on all ranks (accumulate="step" only).
    beta: with a momentum codec, the share of what is selected now in what is sent.
    segment_nbytes: the largest single message.
    """

    density: float = 0.001
    codec: str = "fp32"
    accumulate: str = "step"
    nonfinite: str = "raise"
    beta: float = 0.7
    segment_nbytes: int = SEGMENT_NBYTES
    on_device: ClassVar[bool] = False  # whether all its parts work on a CUDA device's memory

    def __post_init__(self) -> None:
        check_density(self.density)
        check_choice("codec", self.codec, CODECS)
        check_choice("accumulate", self.accumulate, ("step", "backward"))
        check_choice("nonfinite", self.nonfinite, ("raise", "skip"))
        if self.nonfinite == "skip" and self.accumulate == "backward":
            raise ConfigurationError(
                'nonfinite="skip" needs accumulate="step": during backward a non-finite value is already added when it is '
                "seen, and cannot be taken back"
            )
        check_share("beta", self.beta)
        check_whole("segment_nbytes", self.segment_nbytes, 1)

    @property
    def needs_whole_gradient(self) -> bool:
        """Tell whether a step's gradient may not come in parts."""
        return False

    def build(self, parts: Parts) -> Step:
        """Put the step together."""
        raise NotImplementedError

    def values(self) -> dict[str, Any]:
        """The options as plain values, by which ranks and states are compared; of a callable, that there is one."""
        return {key: True if callable(value) else value for key, value in vars(self).items()}


def check_whole(name: str, value: object, least: int) -> None:
    """Raise unless value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name} must be a whole number >= {least}, got {value!r}")


def check_flag(name: str, value: object) -> None:
    """Raise unless value is True or False."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} must be True or False, got {value!r}")


def check_positive(name: str, value: object) -> None:
    """Raise unless value is None or a finite number above 0."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf):
        raise ConfigurationError(f"{name} must be a number above 0, got {value!r}")


def check_share(name: str, value: object) -> None:
    """Raise unless value is a number in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value <= 1.0:
        raise ConfigurationError(f"{name} must be a number in (0, 1], got {value!r}")


@dataclass(frozen=True)
class Dense(Options):
    """All elements in one Allreduce."""

    on_device = True
    density: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.density != 1.0:
            raise ConfigurationError(f'scheme "dense" sends everything: density must be 1, got {self.density!r}')
        if self.codec != "fp32":
            raise ConfigurationError(f'scheme "dense" sends float32 only: codec must be "fp32", got {self.codec!r}')

    def build(self, parts: Parts) -> Step:
        return DenseStep(parts)


@dataclass(frozen=True)
class Partitioned(Options):
    """Selection in exclusive partitions, re-balanced, with a threshold found online.

    controller: "tail" finds the threshold of every step inside it; "paper" scales it between steps; "fixed" keeps that of
    the first step. partitioner: "best" re-balances at once; "paper" moves one block a step; "static" keeps even shares.
    blocks: None for the default.
    reduce: "owner" sums in rank order at the partition's owner; "allreduce" leaves it to MPI (fp32 only).
    """

    controller: str = "tail"
    partitioner: str = "best"
    blocks: int | None = None
    reduce: str = "owner"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("controller", self.controller, CONTROLLERS)
        check_choice("partitioner", self.partitioner, PARTITIONERS)
        check_choice("reduce", self.reduce, ("owner", "allreduce"))
        if self.blocks is not None:
            check_whole("blocks", self.blocks, 1)
        if self.reduce == "allreduce" and self.codec != "fp32":
            raise ConfigurationError(f'reduce="allreduce" sums float32: codec must be "fp32", got {self.codec!r}')

    def put_together(
        self, parts: Parts, scorer: Magnitude, *, keep: bool, mask: str = "score", exact: bool = False,
        mass: MassScale | None = None, demand: Demand | None = None,
    ) -> SparseStep:  # fmt: skip
        """The step of these options, with what a scheme adds to them; `keep`: what is not sent stays in the residual."""
        selector = ExclusiveSelector(
            len(parts.residual),
            parts.exchange.size,
            controller=self.controller,
            partitioner=self.partitioner,
            blocks=self.blocks,
            reads_region=self.accumulate == "backward" or mask != "score" or exact,
            prior=scorer.prior if keep else 0.0,
        )
        codec = CODECS[self.codec]
        return SparseStep(
            parts,
            scorer=scorer,
            chooser=ExclusiveChooser(parts, scorer, selector, mask=mask, exact=exact),
            codec=codec if self.reduce == "owner" else None,
            blend=Blend(self.beta) if codec.blended else None,
            compensate=keep,
            mass=mass,
            demand=demand,
        )


@dataclass(frozen=True)
class Sparse(Partitioned):
    """By one score for every element.

    scorer: "magnitude" of the accumulator, or "average", a moving one of the gradients' magnitudes with the rate alpha.
    compensate: what is not sent stays in the residual; False drops it.
    """

    scorer: str = "magnitude"
    alpha: float = 0.9
    compensate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("scorer", self.scorer, ("magnitude", "average"))
        check_share("alpha", self.alpha)
        check_flag("compensate", self.compensate)

    @property
    def needs_whole_gradient(self) -> bool:
        return self.scorer == "average"

    def build(self, parts: Parts) -> Step:
        return self.put_together(parts, self.make_scorer(parts), keep=self.compensate)

    def make_scorer(self, parts: Parts) -> Magnitude:
        """What matters."""
        if self.scorer == "average":
            return Average(parts.residual, parts.backend, parts.layout.slots, self.alpha)
        return Magnitude(parts.residual, parts.backend)


@dataclass(frozen=True)
class Exdyna(Sparse):
    """The magnitude of the accumulator against a threshold that gives the set density in every step."""

    on_device = True


@dataclass(frozen=True)
class Momentum(Sparse):
    """The moving average of each element's gradient magnitude against its percentile; int8 with momentum.

    mask: "average" selects by the average itself; "gradient" by the accumulator (which is the gradient if compensate is
    False) against the average's percentile. None: "average" if what is not sent is kept, else "gradient".
    percentile: "estimate" by counts, or "exact" by gathering and sorting all averages, for tests.
    """

    on_device = True
    density: float = 0.1
    codec: str = "momentum-int8"
    scorer: str = "average"
    mask: str | None = None
    percentile: str = "estimate"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scorer != "average":
            raise ConfigurationError(
                f'scheme "momentum" scores by a moving average: scorer must be "average", got {self.scorer!r}'
            )
        if self.mask is not None:
            check_choice("mask", self.mask, ("average", "gradient"))
        check_choice("percentile", self.percentile, ("estimate", "exact"))

    def build(self, parts: Parts) -> Step:
        mask = self.mask or ("average" if self.compensate else "gradient")
        mask = "gradient" if mask == "gradient" else "score"
        exact = self.percentile == "exact"
        return self.put_together(parts, self.make_scorer(parts), keep=self.compensate, mask=mask, exact=exact)


@dataclass(frozen=True)
class Predictive(Partitioned):
    """Importance, predicted by small nets from an element's last gradients, together with magnitude; int8; adaptive k.

    rule: "product" of importance and magnitude, or "importance" alone (magnitude decides between equals).
    percentile: "estimate" selects by counts, "exact" by gathering and sorting all keys, for tests.
    history: gradients that a net sees. validation: a callable that returns the loss of a held-out batch, taken every
    validate_every steps. publish_after: steps after which what was given to the thread is used. budget: the
    thread's share of this rank's cores. learning_rate: of the nets. seed: of samples and nets.
    compensate: "residual" keeps what is not sent, "scale" lets what is sent stand for it (at most scale_cap times), "none"
    drops it. adapt_k, k_patience, k_factor, k_least, k_most, k_slow, k_fast: see mpisparse.predictive.demand.
    """

    codec: str = "int8"
    rule: str = "product"
    percentile: str = "estimate"
    history: int = 4
    validation: Callable[[], Any] | None = None
    validate_every: int = 32
    publish_after: int = 4
    budget: float = 0.1
    learning_rate: float = 0.01
    seed: int = 0
    compensate: str = "residual"
    scale_cap: float = 4.0
    adapt_k: bool = True
    k_patience: int = 2
    k_factor: float = 1.5
    k_least: float = 0.25
    k_most: float = 4.0
    k_slow: float = 0.002
    k_fast: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("rule", self.rule, RULES)
        check_choice("percentile", self.percentile, ("estimate", "exact"))
        check_choice("compensate", self.compensate, ("residual", "scale", "none"))
        check_whole("history", self.history, 3)
        if self.history > 5:
            raise ConfigurationError(f"history must be 3, 4 or 5 gradients, got {self.history}")
        if self.validation is not None and not callable(self.validation):
            raise ConfigurationError(f"validation must be a callable that returns a loss, got {self.validation!r}")
        check_whole("validate_every", self.validate_every, self.history + 1)
        check_whole("publish_after", self.publish_after, 1)
        check_share("budget", self.budget)
        check_whole("seed", self.seed, 0)
        check_flag("adapt_k", self.adapt_k)
        check_whole("k_patience", self.k_patience, 1)
        for name in ("learning_rate", "scale_cap", "k_factor", "k_least", "k_most", "k_slow", "k_fast"):
            check_positive(name, getattr(self, name))
        if self.k_factor <= 1 or not self.k_least <= 1 <= self.k_most or self.k_slow > self.k_fast:
            raise ConfigurationError(
                "adaptive k needs k_factor > 1, k_least <= 1 <= k_most and k_slow <= k_fast, got "
                f"{self.k_factor}, {self.k_least}, {self.k_most}, {self.k_slow}, {self.k_fast}"
            )

    @property
    def needs_whole_gradient(self) -> bool:
        return True

    def build(self, parts: Parts) -> Step:
        layout, seed, key = parts.layout, (self.seed, parts.exchange.rank), RULES[self.rule]
        if self.validation is None:
            warnings.warn(
                'scheme "predictive" without validation= learns to foretell the accumulator\'s magnitude, not what helps '
                "most: pass a callable that returns the loss of a held-out batch",
                stacklevel=4,
            )
            validate = None
        else:
            validate = validation(
                layout, functools.partial(gradient_aside, parts.model, layout.params, self.validation, "validation")
            )
        scorer = Predicted(
            parts.residual,
            parts.backend,
            layout,
            nets=Nets(parts.backend, layout.ends, self.history, key=key, rate=self.learning_rate, seed=seed),
            key=key,
            every=self.validate_every,
            delay=self.publish_after,
            cores=self.budget * torch.get_num_threads(),
            seed=seed,
            validate=validate,
        )
        names = [field.name for field in dataclasses.fields(Demand)]
        options = {name: getattr(self, f"k_{name}") for name in names if hasattr(self, f"k_{name}")}
        return self.put_together(
            parts,
            scorer,
            keep=self.compensate == "residual",
            exact=self.percentile == "exact",
            mass=MassScale(layout.ends, self.scale_cap) if self.compensate == "scale" else None,
            demand=Demand(**options) if self.adapt_k else None,
        )


GRANULARITIES = {"fine": 1.0, "hybrid": 0.5, "coarse": 0.0}


@dataclass(frozen=True)
class Speculative(Options):
    """Every rank moves its own influential weights at once; the exchange is a few steps late, and corrects.

    staleness: steps from sending to the global update; 0: at once, and no update ahead of it.
    epsilon: the perturbation in the influence, epsilon |g| + epsilon^2 h / 2. rate: of new values in its rolling average.
    probe: returns the loss of a batch, from which h is estimated every probe_every steps. None: h is 0.
    threshold: of the influence; None: the one that gives the set density.
    granularity: "fine" (weights), "coarse" (layers), "hybrid" (half of the layers fine), or by "schedule" (coarse to fine in
    `horizon` steps), by "rule" (progress, confidence, byte budget of a step), or "learned" (reward: loss decrease per
    "bytes" or, which is not deterministic, per "seconds").
    largest: a layer of more elements is never taken whole; None: 4 times what the density gives.
    confidence: returns a number in [0, 1] for "rule"; None: exp(-loss).
    server: who sums: the "owners" of regions, or "rank0".
    average: over "all" ranks, or those that sent an element ("received"; needs compensate=False).
    tolerance: the distance from the global weights beyond which a weight returns to them; measure: "absolute" or
    "relative"; per: "weight" or "layer". compensate: what is not sent stays in the residual; False drops it.
    seed: of random signs, samples and the learned policy.
    """

    density: float = 0.01
    staleness: int = 1
    epsilon: float = 1e-3
    rate: float = 0.5
    probe: Callable[[], Any] | None = None
    probe_every: int = 50
    threshold: float | None = None
    granularity: str = "schedule"
    largest: int | None = None
    horizon: int = 1000
    budget: int | None = None
    reward: str = "bytes"
    confidence: Callable[[], float] | None = None
    server: str = "owners"
    average: str = "all"
    tolerance: float = 1e-3
    measure: str = "absolute"
    per: str = "weight"
    compensate: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("staleness", 0), ("probe_every", 1), ("horizon", 1), ("seed", 0)):
            check_whole(name, getattr(self, name), least)
        for name in ("budget", "largest"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        check_share("rate", self.rate)
        check_positive("epsilon", self.epsilon)
        check_positive("threshold", self.threshold)
        check_flag("compensate", self.compensate)
        check_choice("granularity", self.granularity, (*GRANULARITIES, "schedule", "rule", "learned"))
        check_choice("reward", self.reward, ("bytes", "seconds"))
        check_choice("server", self.server, ("owners", "rank0"))
        check_choice("average", self.average, ("all", "received"))
        check_choice("measure", self.measure, ("absolute", "relative"))
        check_choice("per", self.per, ("weight", "layer"))
        if isinstance(self.tolerance, bool) or not isinstance(self.tolerance, int | float) or not self.tolerance >= 0:
            raise ConfigurationError(f"tolerance must be a number >= 0, got {self.tolerance!r}")
        for name in ("probe", "confidence"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise ConfigurationError(f"{name} must be a function without arguments, got {getattr(self, name)!r}")
        if self.average == "received" and self.compensate:
            raise ConfigurationError(
                'average="received" needs compensate=False: with residuals kept, what arrives late would count several times'
            )
        if CODECS[self.codec].blended:
            raise ConfigurationError(
                f'scheme "speculative" sends each rank\'s own elements, which codec {self.codec!r} cannot blend; '
                'choose "fp32", "fp16", "bf16" or "int8"'
            )
        if self.nonfinite == "skip" and self.staleness:
            raise ConfigurationError(
                'nonfinite="skip" needs staleness=0: other ranks have gone on when they hear of a non-finite gradient'
            )

    def policy(self) -> Policy:
        """How fine."""
        if self.granularity in GRANULARITIES:
            return Fixed(GRANULARITIES[self.granularity])
        if self.granularity == "schedule":
            return Schedule(self.horizon)
        if self.granularity == "rule":
            return Rule(self.horizon, self.budget)
        return Learned(seed=self.seed, per_second=self.reward == "seconds", patience=max(100, 2 * self.probe_every))

    def most_whole(self) -> int | None:
        """The largest layer that may be taken whole: one that the byte budget of a step pays for."""
        limits = [limit for limit in (self.largest, self.budget and max(1, self.budget // 4)) if limit is not None]
        return min(limits, default=None)

    def build(self, parts: Parts) -> Step:
        epsilon = self.epsilon
        return SpeculativeStep(
            parts,
            Rules(
                staleness=self.staleness,
                tolerance=Tolerance(self.tolerance, relative=self.measure == "relative", by_layer=self.per == "layer"),
                compensate=self.compensate,
                received=self.average == "received",
                one_server=self.server == "rank0",
                probe_every=self.probe_every,
                timed=self.reward == "seconds",
            ),
            codec=CODECS[self.codec],
            influence=Influence(parts.layout.size, rate=self.rate, epsilon=epsilon),
            filter_=Filter(
                parts.layout.slots, parts.backend, largest=self.most_whole(), threshold=self.threshold, seed=self.seed
            ),
            policy=self.policy(),
            probe=Probe(parts.model, parts.layout, self.probe, epsilon=epsilon, seed=self.seed) if self.probe else None,
            confidence=self.confidence,
        )


@dataclass(frozen=True)
class Baseline(Options):
    """What others choose, with this project's exchange around it. compensate: what is not sent stays in the residual."""

    compensate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("compensate", self.compensate)

    def picker(self, parts: Parts) -> Picker:
        """How a rank chooses."""
        raise NotImplementedError

    def scorer(self, parts: Parts) -> Magnitude:
        """What adds up."""
        return Magnitude(parts.residual, parts.backend)

    def build(self, parts: Parts) -> Step:
        scorer, codec = self.scorer(parts), CODECS[self.codec]
        return SparseStep(
            parts,
            scorer=scorer,
            chooser=UnionChooser(parts, scorer, self.picker(parts)),
            codec=codec,
            blend=Blend(self.beta) if codec.blended else None,
            compensate=self.compensate,
        )


@dataclass(frozen=True)
class LocalTopK(Baseline):
    """Every rank's k largest; all send the union of them."""

    def picker(self, parts: Parts) -> Picker:
        return TopK()


@dataclass(frozen=True)
class CyclicLocalTopK(Baseline):
    """One rank's k largest, in turn, for all."""

    def picker(self, parts: Parts) -> Picker:
        return CyclicTopK(parts.exchange.rank, parts.exchange.size)


@dataclass(frozen=True)
class SharedRandomK(Baseline):
    """k elements by lot, the same on all ranks. seed: of the lot, with the step."""

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("seed", self.seed, 0)

    def picker(self, parts: Parts) -> Picker:
        return RandomK(self.seed)


@dataclass(frozen=True)
class FixedThreshold(Baseline):
    """All that reach a fixed threshold; None: the one that gives each rank k in the first step."""

    threshold: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("threshold", self.threshold)

    def picker(self, parts: Parts) -> Picker:
        return HardThreshold(parts.backend, self.threshold, self.density)


@dataclass(frozen=True)
class StatisticalThreshold(Baseline):
    """Each rank's own threshold, by exponentials fitted to the tail of its accumulator in stages."""

    def picker(self, parts: Parts) -> Picker:
        return Sidco(parts.backend)


@dataclass(frozen=True)
class DeepGradientCompression(Baseline):
    """Local top-k by a sample of an accumulator of momentum; the optimizer must then have no momentum of its own.

    factor: of the momentum. clip: the largest norm of all ranks' gradient, of which a rank gets 1 / sqrt(ranks).
    warm_up: steps over which the density falls from 0.25 to the set one. seed: of the sample, with the step.
    """

    factor: float = 0.9
    clip: float | None = None
    warm_up: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.factor, bool) or not isinstance(self.factor, int | float) or not 0.0 <= self.factor < 1.0:
            raise ConfigurationError(f"factor must be a number in [0, 1), got {self.factor!r}")
        check_positive("clip", self.clip)
        check_whole("warm_up", self.warm_up, 0)
        check_whole("seed", self.seed, 0)
        if self.clip is not None and self.accumulate == "backward":
            raise ConfigurationError('clip needs accumulate="step": during backward the gradient\'s norm is not known yet')

    @property
    def needs_whole_gradient(self) -> bool:
        return True

    def picker(self, parts: Parts) -> Picker:
        return SampledTopK(parts.backend, self.seed, self.warm_up)

    def scorer(self, parts: Parts) -> Magnitude:
        clip = None if self.clip is None else self.clip / math.sqrt(parts.exchange.size)
        return Corrected(parts.residual, parts.backend, parts.layout.slots, self.factor, clip)


SCHEMES: dict[str, type[Options]] = {
    "dense": Dense,
    "exdyna": Exdyna,
    "momentum": Momentum,
    "predictive": Predictive,
    "speculative": Speculative,
    "topk": LocalTopK,
    "cltk": CyclicLocalTopK,
    "randomk": SharedRandomK,
    "threshold": FixedThreshold,
    "sidco": StatisticalThreshold,
    "dgc": DeepGradientCompression,
}


def configure(scheme: str, **options: Any) -> Options:
    """Make a scheme's options from names and values; None means the scheme's default for density and codec."""
    check_choice("scheme", scheme, SCHEMES)
    kind = SCHEMES[scheme]
    known = [f.name for f in dataclasses.fields(kind)]
    for name in options:
        if name not in known:
            raise ConfigurationError(f'unknown option {name!r} for scheme "{scheme}"; {suggest(name, known)}')
    defaults = {"density", "codec"}
    return kind(**{name: value for name, value in options.items() if value is not None or name not in defaults})


def takes(scheme: str, option: str) -> bool:
    """Tell whether a scheme has an option."""
    return any(field.name == option for field in dataclasses.fields(SCHEMES[scheme]))
