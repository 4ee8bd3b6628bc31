"""Selection by predicted importance."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mpisparse.backends.flat import Pieces
from mpisparse.backends.keys import PRODUCTS, SCORES
from mpisparse.core.adaptive_k import AdaptiveK
from mpisparse.core.records import Parts
from mpisparse.core.rescale import Rescale
from mpisparse.core.stages import Stage
from mpisparse.errors import ConfigurationError, check_choice
from mpisparse.schemes.companion import Scheme, Site
from mpisparse.schemes.options import check_flag, check_positive, check_share, check_whole
from mpisparse.schemes.partitioned import Partitioned, uncontrolled
from mpisparse.schemes.predictive.nets import Nets
from mpisparse.schemes.predictive.scorer import Predicted, validation
from mpisparse.schemes.side_gradient import gradient_aside

RULES = {"product": PRODUCTS, "importance": SCORES}


@dataclass(frozen=True)
class Predictive(Partitioned):
    """Importance, predicted by small nets from an element's last gradients, together with magnitude; int8; adaptive k.

    rule: "product" of importance and magnitude, or "importance" alone (magnitude decides between equals).
    percentile: "estimate" selects by counts; "exact" gathers and sorts all keys, for tests.
    history: how many of the last gradients a net sees: 3, 4 or 5.
    validation: a callable that returns the loss of a held-out batch; the nets learn from its gradient.
    validate_every: steps between two calls of `validation`.
    publish_after: steps until samples that were handed to the learning thread have an effect.
    budget: share of this rank's cores that the learning thread may use.
    learning_rate: learning rate of the nets.
    seed: seed of the samples and of the nets.
    compensate: "residual" keeps what is not sent; "scale" drops it and scales up what is sent; "none" drops it.
    scale_cap: largest factor of compensate="scale".
    adapt_k: whether k follows the metrics passed to observe(): more when they stagnate or fall, less while they rise fast.
    k_patience: metrics without progress after which k rises.
    k_factor: factor by which k rises or falls.
    k_least, k_most: limits of k, as multiples of what the density asks for.
    k_slow: relative gain up to which a metric counts as stagnating.
    k_fast: relative gain from which k falls.
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
        given = str(self.compensate).lower()
        if given in ("true", "false"):  # as other schemes take it
            name = "residual" if given == "true" else "none"
            raise ConfigurationError(
                f'compensate must be "residual", "scale" or "none" in scheme "predictive", got {self.compensate!r}; '
                f'pass "{name}"'
            )
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

    def without_effect(self) -> dict[str, str]:
        idle = uncontrolled(self.percentile)
        if self.compensate != "scale":
            idle["scale_cap"] = 'it limits compensate="scale"; choose that'
        if not self.adapt_k:
            idle |= {
                f.name: "adapt_k=False leaves k alone; adapt it" for f in dataclasses.fields(self) if f.name[:2] == "k_"
            }
        return super().without_effect() | idle

    @property
    def needs_whole_gradient(self) -> bool:
        return True

    def build(self, parts: Parts, site: Site | None = None) -> Scheme:
        seed, key = (self.seed, parts.exchange.rank), RULES[self.rule]
        ends = np.array([slot.end for slot in parts.slots], dtype=np.int64)
        scorer = Predicted(
            parts.residual,
            parts.backend,
            parts.slots,
            nets=Nets(parts.backend, ends, self.history, key=key, rate=self.learning_rate, seed=seed),
            key=key,
            every=self.validate_every,
            delay=self.publish_after,
            cores=self.budget * torch.get_num_threads(),
            seed=seed,
            validate=self._validate(parts, site),
        )
        scale = [Rescale(ends, self.scale_cap)] if self.compensate == "scale" else []
        keep, exact = self.compensate == "residual", self.percentile == "exact"
        return Scheme(self.put_together(parts, scorer, keep=keep, exact=exact, stages=[*scale, *self._adaptive_k()]))

    def _validate(self, parts: Parts, site: Site | None) -> Callable[[], Pieces] | None:
        """The gradient of the held-out batch, by which importance is learnt; None without one."""
        if self.validation is not None and site is not None:
            aside = functools.partial(gradient_aside, site.model, list(site.places.params), self.validation, "validation")
            return validation(parts.slots, aside)
        warnings.warn(
            'scheme "predictive" without validation= learns to predict the accumulator\'s coming magnitude, not what '
            "helps most: pass a callable that returns the loss of a held-out batch",
            stacklevel=5,
        )
        return None

    def _adaptive_k(self) -> list[Stage]:
        if not self.adapt_k:
            return []
        names = [field.name for field in dataclasses.fields(AdaptiveK)]
        return [AdaptiveK(**{name: getattr(self, f"k_{name}") for name in names if hasattr(self, f"k_{name}")})]
