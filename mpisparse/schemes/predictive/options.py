"""Selection by predicted importance."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mpisparse.backends.keys import PRODUCTS, SCORES
from mpisparse.core.adaptive_k import AdaptiveK
from mpisparse.core.aggregator import Aggregator
from mpisparse.core.records import Parts
from mpisparse.core.rescale import Rescale
from mpisparse.core.stages import Stage
from mpisparse.errors import ConfigurationError, check_choice
from mpisparse.schemes.companion import Scheme, Site
from mpisparse.schemes.options import KEPT, check_flag, check_positive, check_share, check_whole
from mpisparse.schemes.partitioned import Partitioned, check_late, uncontrolled
from mpisparse.schemes.scoring import check_nets, predicted

RULES = {"product": PRODUCTS, "importance": SCORES}
WORDS: dict[Any, dict[str, bool]] = {
    "residual": {"compensate": True},
    "scale": {"compensate": False, "rescale": True},
    "none": {"compensate": False},
}


@dataclass(frozen=True)
class Predictive(Partitioned):
    """Importance, predicted by small nets from an element's last gradients, together with magnitude; int8; adaptive k.

    rule: "product" of importance and magnitude, or "importance" alone (magnitude decides between equals).
    percentile: "estimate" selects by counts; "exact" gathers and sorts all keys, for tests.
    history: how many of the last gradients a net sees, 3 to 8.
    features: inputs of the nets: "gradients" alone, or "all": also the coming step of an attached optimizer, and the root
        mean square of accumulated values in the element's row and column.
    nets: one for each "layer", or one "shared" by all layers; with features="all" it also sees the kind of parameter.
    validation: a callable that returns the loss of a held-out batch; the nets learn from its gradient.
    validate_every: steps between two calls of `validation`.
    publish_after: steps until samples that were handed to the learning thread have an effect.
    refresh: "slices" scores a slice of the vector every `history` steps; "step" scores every element in every step, before
        anything is sent, and takes 2 (history + 1) bytes per element and a pass of the nets over all: for small models.
    budget: share of this rank's cores that the learning thread may use.
    learning_rate: learning rate of the nets.
    seed: seed of the samples and of the nets.
    compensate: True keeps what is not sent in the residual for later steps; False drops it.
    rescale: with compensate=False, what is sent of each layer is multiplied by the ratio of all magnitudes to the sent ones.
    scale_cap: largest such factor.
    adapt_k: whether k follows the metrics passed to observe(): more when they stagnate or fall, less while they rise fast.
    k_patience: metrics without progress after which k rises.
    k_factor: factor by which k rises or falls.
    k_least, k_most: limits of k, as multiples of what the density asks for.
    k_slow: relative gain up to which a metric counts as stagnating.
    k_fast: relative gain from which k falls.
    """

    refused: ClassVar[dict[str, str]] = {
        **Partitioned.refused,
        "staleness": 'in flight it is scheme "exdyna" with scorer="predicted"',
    }
    remembering: ClassVar[str] = (
        "its selection is put together with nets that learn in a thread, which a smaller group would have to keep, and that "
        "is not served yet; choose exdyna or momentum, or leave on_failure out and requeue the job"
    )
    flat_only: ClassVar[str] = "its nets learn from whole parameters, of which a rank of a node has shards"
    on_device = True
    codec: str = "int8"
    rule: str = "product"
    percentile: str = "estimate"
    history: int = 4
    features: str = "gradients"
    nets: str = "layer"
    validation: Callable[[], Any] | None = None
    validate_every: int = 32
    publish_after: int = 4
    refresh: str = "slices"
    budget: float = 0.1
    learning_rate: float = 0.01
    seed: int = 0
    compensate: bool = True
    rescale: bool = False
    scale_cap: float = 4.0
    adapt_k: bool = True
    k_patience: int = AdaptiveK.patience
    k_factor: float = AdaptiveK.factor
    k_least: float = AdaptiveK.least
    k_most: float = AdaptiveK.most
    k_slow: float = AdaptiveK.slow
    k_fast: float = AdaptiveK.fast

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("rule", self.rule, RULES)
        check_choice("percentile", self.percentile, ("estimate", "exact"))
        given: object = self.compensate
        if given == "scale":
            raise ConfigurationError("compensate must be True or False, got 'scale'; pass compensate=False, rescale=True")
        check_flag("compensate", self.compensate, KEPT)
        check_flag("rescale", self.rescale)
        if self.rescale and self.compensate:
            raise ConfigurationError(
                "rescale=True lets what is sent stand for the rest, which compensate=True would send once more: pass "
                "compensate=False"
            )
        check_nets(self)
        check_whole("publish_after", self.publish_after, 1)
        check_choice("refresh", self.refresh, ("slices", "step"))
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

    def without_effect(self) -> dict[str, str]:
        idle = uncontrolled(self.percentile, self.masks)
        if self.refresh == "step":
            waits = 'refresh="step" waits for the thread in every step; choose refresh="slices"'
            idle |= dict.fromkeys(("publish_after", "budget"), waits)
        if not self.rescale:
            idle["scale_cap"] = "it limits the factors of rescale=True; choose that"
        if not self.adapt_k:
            idle |= {
                f.name: "adapt_k=False leaves k alone; adapt it" for f in dataclasses.fields(self) if f.name[:2] == "k_"
            }
        return super().without_effect() | idle

    @classmethod
    def upgraded(cls, saved: Mapping[str, Any]) -> dict[str, Any]:
        """As the base; `compensate` was a word that also said what `rescale` says now."""
        values = super().upgraded(saved)
        if values["compensate"] in WORDS:
            values |= WORDS[values["compensate"]]
        return values

    @property
    def needs_whole_gradient(self) -> bool:
        return True

    def build(self, parts: Parts, site: Site | None = None) -> Scheme:
        return Scheme(self._aggregator(parts, site, 0))

    def build_in_flight(self, parts: Parts, staleness: int) -> Aggregator:
        if self.rescale:
            raise ConfigurationError(
                "rescale=True compares what is sent with all that was there, which in flight is gone: leave rescale out"
            )
        check_late(
            self, staleness, keep=self.compensate, whole="" if self.percentile == "estimate" else 'percentile="exact"'
        )
        return self._aggregator(parts, None, staleness)

    def _aggregator(self, parts: Parts, site: Site | None, staleness: int) -> Aggregator:
        if self.refresh == "step" and parts.backend.name == "cuda":
            raise ConfigurationError(
                'refresh="step" gives the whole vector to a thread of the host and waits for it, in every step; on a GPU '
                'choose "slices"'
            )
        ends = np.array([slot.end for slot in parts.slots], dtype=np.int64)
        scorer = predicted(
            parts,
            parts.residual,
            site,
            self,
            key=RULES[self.rule],
            late=staleness > 0,
            delay=0 if self.refresh == "step" else self.publish_after,
            budget=self.budget,
            rate=self.learning_rate,
            seed=self.seed,
        )
        scale = [Rescale(ends, self.scale_cap)] if self.rescale else []
        keep, exact = self.compensate, self.percentile == "exact"
        stages = [*scale, *self._adaptive_k()]
        return self.put_together(parts, scorer, keep=keep, exact=exact, stages=stages, staleness=staleness)

    def _adaptive_k(self) -> list[Stage]:
        if not self.adapt_k:
            return []
        names = [field.name for field in dataclasses.fields(AdaptiveK)]
        return [AdaptiveK(**{name: getattr(self, f"k_{name}") for name in names if hasattr(self, f"k_{name}")})]
