"""The selections of other methods, with this project's exchange."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mpisparse.core.aggregator import Aggregator
from mpisparse.core.records import Parts
from mpisparse.errors import ConfigurationError, check_choice
from mpisparse.schemes.companion import Scheme, Site
from mpisparse.schemes.options import Keeping, check_positive, check_whole
from mpisparse.schemes.partitioned import each_its_own, feedback
from mpisparse.select.own import ByPicker
from mpisparse.select.pickers import CyclicTopK, HardThreshold, Picker, RandomK, SampledTopK, Sidco, TopK, UnionSelection
from mpisparse.select.scorers import Corrected, Magnitude, Scorer
from mpisparse.wire.codecs import CODECS
from mpisparse.wire.reduction import ByOwner


@dataclass(frozen=True)
class Baseline(Keeping):
    """Another method's selection with this project's exchange."""

    remembering = ""

    def picker(self, parts: Parts) -> Picker:
        """How a rank chooses."""
        raise NotImplementedError

    def scorer(self, parts: Parts) -> Scorer:
        """The scorer, which accumulates."""
        return Magnitude(parts.residual, parts.backend)

    def build(self, parts: Parts, site: Site | None = None) -> Scheme:
        return Scheme(self.united(parts))

    def united(self, parts: Parts) -> Aggregator:
        """The aggregator in which all ranks send what any of them picked."""
        codec = CODECS[self.codec]
        return Aggregator(
            parts,
            scorer=self.scorer(parts),
            selection=UnionSelection(self.picker(parts), parts.held, parts.backend),
            reducer=ByOwner(codec),
            stages=feedback(keep=self.compensate, blend=self.beta if codec.blended else None),
        )


@dataclass(frozen=True)
class Local(Baseline):
    """Every rank picks for itself.

    masks: "union": all ranks send what any of them picked; "own": each rank sends its own elements to owners, who add them.
    """

    masks: str = "union"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("masks", self.masks, ("union", "own"))

    def build(self, parts: Parts, site: Site | None = None) -> Scheme:
        if self.masks == "union":
            return super().build(parts, site)
        chooser = ByPicker(self.picker(parts), parts.held)
        return Scheme(each_its_own(self, parts, self.scorer(parts), chooser, keep=self.compensate))


@dataclass(frozen=True)
class LocalTopK(Local):
    """Every rank's k largest."""

    on_device = True

    def picker(self, parts: Parts) -> Picker:
        return TopK(parts.backend)


@dataclass(frozen=True)
class CyclicLocalTopK(Baseline):
    """One rank's k largest, sent by all ranks; the ranks take turns."""

    on_device = True

    def picker(self, parts: Parts) -> Picker:
        return CyclicTopK(parts.backend, parts.exchange.rank, parts.exchange.size)


@dataclass(frozen=True)
class SharedRandomK(Baseline):
    """Select k elements at random, the same on all ranks.

    seed: seed of the random numbers; the step is added to it.
    """

    on_device = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("seed", self.seed, 0)

    def picker(self, parts: Parts) -> Picker:
        return RandomK(self.seed, parts.held)


@dataclass(frozen=True)
class FixedThreshold(Local):
    """Select all elements that reach a fixed threshold.

    threshold: the threshold; None takes the one that gives each rank k elements in the first step.
    """

    on_device = True
    threshold: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("threshold", self.threshold)

    def without_effect(self) -> dict[str, str]:
        fixed = {} if self.threshold is None else {"density": "a given threshold decides what is sent; give one of them"}
        return super().without_effect() | fixed

    def picker(self, parts: Parts) -> Picker:
        return HardThreshold(parts.backend, self.threshold, self.density, parts.held)


@dataclass(frozen=True)
class StatisticalThreshold(Local):
    """Each rank's own threshold, from exponentials fitted in stages to the tail of its accumulator."""

    on_device = True

    def picker(self, parts: Parts) -> Picker:
        return Sidco(parts.backend, parts.held)


@dataclass(frozen=True)
class DeepGradientCompression(Local):
    """Local top-k by a sample of an accumulator of momentum; the optimizer must then have no momentum of its own.

    factor: factor of the momentum.
    clip: largest norm of the gradient of all ranks, of which each rank gets 1 / sqrt(ranks).
    warm_up: steps over which the density falls from 0.25 to the set one.
    seed: seed of the sample; the step is added to it.
    """

    on_device = True
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
        if self.clip is not None and self.hierarchy != "flat":
            raise ConfigurationError(
                f"clip does not work with hierarchy={self.hierarchy!r}: a rank of a node has a shard of a sum, not its own "
                "gradient; clip that before sync.step()"
            )

    @property
    def mortal(self) -> str:
        shared = "clip is shared out among the ranks of the start; leave it out"
        return super().mortal or ("" if self.clip is None else shared)

    @property
    def needs_whole_gradient(self) -> bool:
        return True

    def picker(self, parts: Parts) -> Picker:
        return SampledTopK(parts.backend, self.seed, self.warm_up)

    def scorer(self, parts: Parts) -> Scorer:
        clip = None if self.clip is None else self.clip / math.sqrt(parts.exchange.size)
        return Corrected(parts.residual, parts.backend, parts.slots, self.factor, clip)
