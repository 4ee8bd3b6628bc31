"""Influential weights move at once; the exchange comes later, and corrects."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from mpisparse.core.aggregator import Aggregator
from mpisparse.core.records import Parts
from mpisparse.errors import ConfigurationError, check_choice
from mpisparse.schemes.companion import Scheme, Site
from mpisparse.schemes.options import KEPT, check_flag, check_positive, check_share, check_whole
from mpisparse.schemes.partitioned import feedback
from mpisparse.schemes.scoring import Scoring, check_function, probing
from mpisparse.schemes.speculative.asking import Asking
from mpisparse.schemes.speculative.companion import Speculating
from mpisparse.schemes.speculative.granularity import GRANULARITIES, Filter
from mpisparse.schemes.speculative.influence import Influence, InfluenceScorer
from mpisparse.schemes.speculative.policy import Constant, Informed, Learned, Policy, Rule, Schedule
from mpisparse.schemes.speculative.selection import Granular
from mpisparse.schemes.speculative.weights import Tolerance
from mpisparse.select.own import OwnSelection
from mpisparse.select.scorers import Scorer
from mpisparse.wire.codecs import CODECS
from mpisparse.wire.on_host import on_host
from mpisparse.wire.own import OwnByOwner

KINDS = (*GRANULARITIES, "schedule", "rule", "learned")


@dataclass(frozen=True)
class Speculative(Scoring):
    """Every rank moves its own influential weights at once; the exchange arrives a few steps later and corrects them.

    scorer: "influence", or another one: "magnitude", "average" or "predicted", which has the defaults of "predictive".

    staleness: steps from sending to the global update; 0 exchanges at once, without speculation.
    influence: the value of a weight's update: "perturbation", epsilon |g| + epsilon^2 h / 2, or "update",
        -(g u + h u^2 / 2) for the update u that the optimizer would make, which costs an optimizer step on copies.
    scored: influence is updated "before" a step selects by it, or "after", as published, so that a step selects by the
        influence of the previous one.
    epsilon: size of the perturbation, in the influence and in the probe.
    average_rate: weight of new values in the moving average of the influence.
    probe: a callable that returns the loss of a batch, from which the curvature h is estimated; None sets h to 0.
    threshold: fixed threshold of the influence; None takes the one that gives the set density.
    granularity: what is selected: "fine" (weights), "coarse" (layers), "hybrid" (half of the layers fine); or decided by
        "schedule" (from coarse to fine), "rule" (progress, confidence and bytes) or "learned".
    largest: a layer with more elements is never taken whole; None is 4 times what the density asks for.
    learner: granularity "learned" draws by each share's rewards so far ("bandit"), or by rewards as a function of its
        observations ("state"): progress, confidence, bytes and the trend of the loss.
    horizon: steps over which granularity "schedule" and "rule" go from coarse to fine, and progress of learner "state" to 1.
    budget: bytes per step that granularity "rule" may spend.
    reward: what granularity "learned" maximizes: loss decrease per "bytes", or per "seconds" (not deterministic).
    confidence: a callable that returns a number in [0, 1] for granularity "rule" and learner "state"; None takes exp(-loss).
    server: which ranks sum: the "owners" of regions, or "rank0".
    average: over "all" ranks, or over those that sent an element ("received"; needs compensate=False).
    tolerance: distance from the global weights beyond which a weight returns to them.
    measure: distances are "absolute" or "relative" to the global weight, or to the largest one of its layer.
    per: distances are measured per "weight" or per "layer".
    compensate: True keeps what is not sent in the residual for later steps; False drops it.
    seed: seed of random signs, samples and the learned policy.
    """

    remembering: ClassVar[str] = (
        "its ranks move their weights at once, and what is in flight was summed among ranks of which one may have died; "
        "choose exdyna or drift, or leave on_failure out and requeue the job"
    )
    flat_only: ClassVar[str] = "every rank moves weights by its own gradient, of which a node has the sum only"
    renamed: ClassVar[dict[str, str]] = {"rate": "average_rate"}
    refused: ClassVar[dict[str, str]] = {
        **Scoring.refused,
        "masks": "a rank moves ahead by what it has chosen itself, and owners would choose later; "
        'granularity="fine" chooses single weights',
    }
    on_device = True
    density: float = 0.01
    scorer: str = "influence"
    staleness: int = 1
    influence: str = "perturbation"
    scored: str = "before"
    epsilon: float = 1e-3
    average_rate: float = 0.5
    threshold: float | None = None
    granularity: str = "schedule"
    largest: int | None = None
    learner: str = "bandit"
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
        for name, least in (("staleness", 0), ("horizon", 1), ("seed", 0)):
            check_whole(name, getattr(self, name), least)
        for name in ("budget", "largest"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        check_share("average_rate", self.average_rate)
        check_positive("epsilon", self.epsilon)
        check_positive("threshold", self.threshold)
        check_flag("compensate", self.compensate, KEPT)
        check_choice("granularity", self.granularity, KINDS)
        check_choice("influence", self.influence, ("perturbation", "update"))
        check_choice("scored", self.scored, ("before", "after"))
        check_choice("learner", self.learner, ("bandit", "state"))
        check_choice("reward", self.reward, ("bytes", "seconds"))
        check_choice("server", self.server, ("owners", "rank0"))
        check_choice("average", self.average, ("all", "received"))
        check_choice("measure", self.measure, ("absolute", "relative"))
        check_choice("per", self.per, ("weight", "layer"))
        if isinstance(self.tolerance, bool) or not isinstance(self.tolerance, int | float) or not self.tolerance >= 0:
            raise ConfigurationError(f"tolerance must be a number >= 0, got {self.tolerance!r}")
        check_function("confidence", self.confidence)
        if self.average == "received" and self.compensate:
            raise ConfigurationError(
                'average="received" needs compensate=False: with residuals kept, what arrives late would count several times'
            )
        if self.nonfinite == "skip" and self.staleness:
            raise ConfigurationError(
                'nonfinite="skip" needs staleness=0: other ranks have gone on when they hear of a non-finite gradient'
            )

    def without_effect(self) -> dict[str, str]:
        idle = {name: f"it is for granularity {kinds}; choose that" for name, kinds in self._for_others().items()}
        if self.scorer != "influence":
            names = ("influence", "scored", "epsilon", "average_rate")
            idle |= dict.fromkeys(names, 'it is for scorer "influence"; choose that')
        elif self.probe is None and self.influence == "update":
            idle["epsilon"] = 'influence="update" needs it for a probe only; pass one'
        elif self.probe is None and self.threshold is None:
            idle["epsilon"] = "without a probe or a threshold it scales all influence alike; pass one"
        if self.threshold is not None and self.granularity == "fine":
            idle["density"] = "a given threshold decides what is sent; give one of them"
        if self.probe is None and self.threshold is not None and self.granularity != "learned":
            idle["seed"] = "nothing is random without a probe and with a given threshold; pass a probe"
        if self.staleness == 0:
            idle |= dict.fromkeys(
                ("tolerance", "measure", "per"), "at staleness 0 no weight is ahead; choose a staleness >= 1"
            )
        elif self.tolerance in (0.0, math.inf):
            idle |= dict.fromkeys(("measure", "per"), f"a tolerance of {self.tolerance:g} needs no measure; choose another")
        rest = super().without_effect()
        if self.granularity == "learned":  # its patience depends on it
            rest.pop("probe_every", None)
        return rest | idle

    def _for_others(self) -> dict[str, str]:
        """Options that only other granularities use."""
        kinds = {
            "horizon": ("schedule", "rule"),
            "reward": ("learned",),
            "learner": ("learned",),
            "confidence": ("rule",),
            **dict.fromkeys(("largest", "budget"), tuple(kind for kind in KINDS if kind != "fine")),
        }
        sees = self.granularity == "learned" and self.learner == "state"
        return {
            name: " or ".join(f'"{kind}"' for kind in fitting)
            for name, fitting in kinds.items()
            if self.granularity not in fitting and not (sees and name in ("horizon", "confidence"))
        }

    def policy(self) -> Policy:
        """The policy that sets the granularity."""
        if self.granularity in GRANULARITIES:
            return Constant(GRANULARITIES[self.granularity])
        if self.granularity == "schedule":
            return Schedule(self.horizon)
        if self.granularity == "rule":
            return Rule(self.horizon, self.budget)
        per_second, patience = self.reward == "seconds", max(100, 2 * self.probe_every)
        if self.learner == "state":
            return Informed(seed=self.seed, per_second=per_second, patience=patience, horizon=self.horizon)
        return Learned(seed=self.seed, per_second=per_second, patience=patience)

    def most_whole(self) -> int | None:
        """The largest layer that may be taken whole within a step's byte budget."""
        limits = [limit for limit in (self.largest, self.budget and max(1, self.budget // 4)) if limit is not None]
        return min(limits, default=None)

    def scorer_of(
        self, parts: Parts, residual: torch.Tensor, site: Site | None, number: Callable[[], int], *, late: bool
    ) -> Scorer:
        if self.scorer != "influence":
            return super().scorer_of(parts, residual, site, number, late=late)
        probed = (
            None if self.probe is None or site is None else probing(site, self.probe, epsilon=self.epsilon, seed=self.seed)
        )
        return InfluenceScorer(
            residual,
            parts.backend,
            Influence(len(residual), rate=self.average_rate, epsilon=self.epsilon, device=residual.device),
            rank=parts.exchange.rank,
            step=number,
            probe=probed,
            probe_every=self.probe_every,
            by_update=self.influence == "update",
            after=self.scored == "after",
        )

    def build(self, parts: Parts, site: Site | None = None) -> Scheme:
        if site is None:
            raise ConfigurationError(
                'scheme "speculative" moves a model\'s weights, and so cannot average a plain vector: use GradientSync'
            )
        codec, n, late = CODECS[self.codec], len(parts.residual), self.staleness > 0
        carrier, server = parts.carrier(late=late), self.server == "rank0"
        filter_ = Filter(parts.slots, parts.backend, largest=self.most_whole(), threshold=self.threshold, seed=self.seed)
        chooser = Granular(filter_, self.policy(), turns=self.compensate and self.scorer in ("average", "predicted"))
        selection = OwnSelection(chooser, carrier, n, parts.exchange.size, late=late, one_server=server)
        scorer = Asking(
            self.scorer_of(parts, parts.residual, site, lambda: selection.begun, late=late),
            confidence=self.confidence,
            timed=self.reward == "seconds",
        )
        aggregator = Aggregator(
            parts,
            scorer=scorer,
            selection=selection,
            reducer=on_host(carrier, OwnByOwner(codec, received=self.average == "received")),
            stages=feedback(keep=self.compensate, blend=self.beta if codec.blended else None, own=True, late=late),
            staleness=self.staleness,
        )
        tolerance = Tolerance(self.tolerance, relative=self.measure == "relative", by_layer=self.per == "layer")
        return Scheme(aggregator, Speculating(aggregator, scorer, selection, chooser, site.places, tolerance))
