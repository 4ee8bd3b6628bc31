"""Schemes by name: each is a record of options, checked when made, and a few lines that put the step's parts together."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from mpisparse.agree import Inputs
from mpisparse.baselines import CyclicTopK, HardThreshold, Picker, RandomK, SampledTopK, Sidco, TopK, UnionChooser
from mpisparse.blend import Blend
from mpisparse.codecs import CODECS
from mpisparse.errors import ConfigurationError, check_choice, suggest
from mpisparse.exclusive import ExclusiveChooser
from mpisparse.parts import Clock, Parts
from mpisparse.score import Average, Corrected, Magnitude
from mpisparse.selector import PARTITIONERS, ExclusiveSelector
from mpisparse.step import DenseStep, SparseStep, Stats
from mpisparse.threshold import CONTROLLERS

SEGMENT_NBYTES = 1 << 30


class Step(Protocol):
    """One step of a scheme; `run` is collective. Gradients that come before it are the scorer's to add."""

    @property
    def scorer(self) -> Magnitude: ...
    def run(self, inputs: Inputs, clock: Clock) -> Stats: ...
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
class Sparse(Options):
    """Selection in exclusive partitions, re-balanced, with a threshold found online.

    scorer: "magnitude" of the accumulator, or "average", a moving one of the gradients' magnitudes with the rate alpha.
    compensate: what is not sent stays in the residual; False drops it.
    controller: "tail" finds the threshold of every step inside it; "paper" scales it between steps.
    partitioner: "best" re-balances at once; "paper" moves one block a step. blocks: None for the default.
    reduce: "owner" sums in rank order at the partition's owner; "allreduce" leaves it to MPI (fp32 only).
    """

    scorer: str = "magnitude"
    alpha: float = 0.9
    compensate: bool = True
    controller: str = "tail"
    partitioner: str = "best"
    blocks: int | None = None
    reduce: str = "owner"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("scorer", self.scorer, ("magnitude", "average"))
        check_share("alpha", self.alpha)
        check_flag("compensate", self.compensate)
        check_choice("controller", self.controller, CONTROLLERS)
        check_choice("partitioner", self.partitioner, PARTITIONERS)
        check_choice("reduce", self.reduce, ("owner", "allreduce"))
        if self.blocks is not None:
            check_whole("blocks", self.blocks, 1)
        if self.reduce == "allreduce" and self.codec != "fp32":
            raise ConfigurationError(f'reduce="allreduce" sums float32: codec must be "fp32", got {self.codec!r}')

    @property
    def needs_whole_gradient(self) -> bool:
        return self.scorer == "average"

    def build(self, parts: Parts) -> Step:
        return self.put_together(parts)

    def put_together(self, parts: Parts, *, mask: str = "score", exact: bool = False) -> SparseStep:
        """The step of these options, with what a scheme adds to them."""
        if self.scorer == "average":
            scorer: Magnitude = Average(parts.residual, parts.backend, parts.layout.slots, self.alpha)
        else:
            scorer = Magnitude(parts.residual, parts.backend)
        selector = ExclusiveSelector(
            len(parts.residual),
            parts.exchange.size,
            controller=self.controller,
            partitioner=self.partitioner,
            blocks=self.blocks,
            reads_region=self.accumulate == "backward" or mask != "score" or exact,
            prior=scorer.prior if self.compensate else 0.0,
        )
        codec = CODECS[self.codec]
        return SparseStep(
            parts,
            scorer=scorer,
            chooser=ExclusiveChooser(parts, scorer, selector, mask=mask, exact=exact),
            codec=codec if self.reduce == "owner" else None,
            blend=Blend(self.beta) if codec.blended else None,
            compensate=self.compensate,
        )


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
        return self.put_together(parts, mask="gradient" if mask == "gradient" else "score", exact=self.percentile == "exact")


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
