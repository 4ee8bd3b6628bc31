"""Influential weights move at once; the exchange comes later, and corrects."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mpisparse.core.aggregator import Aggregator
from mpisparse.core.records import Parts
from mpisparse.core.stages import Dropped, LateDropped
from mpisparse.errors import ConfigurationError, check_choice
from mpisparse.names import BLENDED
from mpisparse.schemes.companion import Scheme, Site
from mpisparse.schemes.options import KEPT, Options, check_flag, check_positive, check_share, check_whole
from mpisparse.schemes.speculative.companion import Speculating
from mpisparse.schemes.speculative.granularity import Filter
from mpisparse.schemes.speculative.influence import Influence, InfluenceScorer, Probe
from mpisparse.schemes.speculative.policy import Constant, Learned, Policy, Rule, Schedule
from mpisparse.schemes.speculative.selection import GranularSelection
from mpisparse.schemes.speculative.weights import Tolerance
from mpisparse.wire.codecs import CODECS, codec_names
from mpisparse.wire.reduction import OwnByOwner

GRANULARITIES = {"fine": 1.0, "hybrid": 0.5, "coarse": 0.0}
KINDS = (*GRANULARITIES, "schedule", "rule", "learned")


@dataclass(frozen=True)
class Speculative(Options):
    """Every rank moves its own influential weights at once; the exchange arrives a few steps later and corrects them.

    staleness: steps from sending to the global update; 0 exchanges at once, with nothing speculative.
    epsilon: size of the perturbation in the influence, epsilon |g| + epsilon^2 h / 2.
    average_rate: weight of new values in the moving average of the influence.
    probe: a callable that returns the loss of a batch, from which the curvature h is estimated; None sets h to 0.
    probe_every: steps between two probes.
    threshold: fixed threshold of the influence; None takes the one that gives the set density.
    granularity: what is selected: "fine" (weights), "coarse" (layers), "hybrid" (half of the layers fine); or decided by
        "schedule" (from coarse to fine), "rule" (progress, confidence and bytes) or "learned".
    largest: a layer with more elements is never taken whole; None is 4 times what the density asks for.
    horizon: steps over which granularity "schedule" and "rule" go from coarse to fine.
    budget: bytes per step that granularity "rule" may spend.
    reward: what granularity "learned" maximizes: loss decrease per "bytes", or per "seconds" (not deterministic).
    confidence: a callable that returns a number in [0, 1] for granularity "rule"; None takes exp(-loss).
    server: who sums: the "owners" of regions, or "rank0".
    average: over "all" ranks, or over those that sent an element ("received"; needs compensate=False).
    tolerance: distance from the global weights beyond which a weight returns to them.
    measure: distances are "absolute" or "relative" to the global weight, or to the largest one of its layer.
    per: distances are measured per "weight" or per "layer".
    compensate: True keeps what is not sent in the residual for later steps; False drops it.
    seed: seed of random signs, samples and the learned policy.
    """

    renamed: ClassVar[dict[str, str]] = {"rate": "average_rate"}
    density: float = 0.01
    staleness: int = 1
    epsilon: float = 1e-3
    average_rate: float = 0.5
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
        check_share("average_rate", self.average_rate)
        check_positive("epsilon", self.epsilon)
        check_positive("threshold", self.threshold)
        check_flag("compensate", self.compensate, KEPT)
        check_choice("granularity", self.granularity, KINDS)
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
                f"choose {self.codec.removeprefix(BLENDED)!r}"
            )
        if self.nonfinite == "skip" and self.staleness:
            raise ConfigurationError(
                'nonfinite="skip" needs staleness=0: other ranks have gone on when they hear of a non-finite gradient'
            )

    def codecs(self) -> Sequence[str]:
        return list(codec_names(blended=False))

    def without_effect(self) -> dict[str, str]:
        idle = {name: f"it is for granularity {kinds}; choose that" for name, kinds in self._for_others().items()}
        if self.probe is None and self.threshold is None:
            idle["epsilon"] = "without a probe or a threshold it scales all influence alike; pass one"
        if self.threshold is not None and self.granularity == "fine":
            idle["density"] = "a given threshold decides what is sent; give one of them"
        if self.probe is None and self.granularity != "learned":
            idle["probe_every"] = "there is no probe; pass one"
        if self.probe is None and self.threshold is not None and self.granularity != "learned":
            idle["seed"] = "nothing is random without a probe and with a given threshold; pass a probe"
        if self.staleness == 0:
            idle |= dict.fromkeys(
                ("tolerance", "measure", "per"), "at staleness 0 no weight is ahead; choose a staleness >= 1"
            )
        elif self.tolerance in (0.0, math.inf):
            idle |= dict.fromkeys(("measure", "per"), f"a tolerance of {self.tolerance:g} needs no measure; choose another")
        return super().without_effect() | idle

    def _for_others(self) -> dict[str, str]:
        """The options that are for other granularities, with these."""
        kinds = {
            "horizon": ("schedule", "rule"),
            "reward": ("learned",),
            "confidence": ("rule",),
            **dict.fromkeys(("largest", "budget"), tuple(kind for kind in KINDS if kind != "fine")),
        }
        return {
            name: " or ".join(f'"{kind}"' for kind in fitting)
            for name, fitting in kinds.items()
            if self.granularity not in fitting
        }

    def policy(self) -> Policy:
        """How fine."""
        if self.granularity in GRANULARITIES:
            return Constant(GRANULARITIES[self.granularity])
        if self.granularity == "schedule":
            return Schedule(self.horizon)
        if self.granularity == "rule":
            return Rule(self.horizon, self.budget)
        return Learned(seed=self.seed, per_second=self.reward == "seconds", patience=max(100, 2 * self.probe_every))

    def most_whole(self) -> int | None:
        """The largest layer that may be taken whole: one that the byte budget of a step pays for."""
        limits = [limit for limit in (self.largest, self.budget and max(1, self.budget // 4)) if limit is not None]
        return min(limits, default=None)

    def build(self, parts: Parts, site: Site | None = None) -> Scheme:
        if site is None:
            raise ConfigurationError('scheme "speculative" moves a model\'s weights, and so cannot average a plain vector')
        n, size, late = len(parts.residual), parts.exchange.size, self.staleness > 0
        filter_ = Filter(parts.slots, parts.backend, largest=self.most_whole(), threshold=self.threshold, seed=self.seed)
        selection = GranularSelection(filter_, self.policy(), n, size, one_server=self.server == "rank0")
        probe = Probe(site.model, site.places, self.probe, epsilon=self.epsilon, seed=self.seed) if self.probe else None
        scorer = InfluenceScorer(
            parts.residual,
            parts.backend,
            Influence(n, rate=self.average_rate, epsilon=self.epsilon),
            rank=parts.exchange.rank,
            step=lambda: selection.begun,
            probe=probe,
            probe_every=self.probe_every,
            confidence=self.confidence,
            timed=self.reward == "seconds",
        )
        aggregator = Aggregator(
            parts,
            scorer=scorer,
            selection=selection,
            reducer=OwnByOwner(CODECS[self.codec], received=self.average == "received"),
            stages=[] if self.compensate else [LateDropped() if late else Dropped()],
            staleness=self.staleness,
        )
        tolerance = Tolerance(self.tolerance, relative=self.measure == "relative", by_layer=self.per == "layer")
        return Scheme(aggregator, Speculating(aggregator, scorer, selection, site.places, tolerance))
