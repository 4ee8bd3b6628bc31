"""Scorers by name, with their options, for schemes that let the user choose."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from mpisparse.backends.flat import Pieces
from mpisparse.backends.keys import PRODUCTS
from mpisparse.core.records import Parts
from mpisparse.errors import ConfigurationError, check_choice
from mpisparse.schemes.companion import Site
from mpisparse.schemes.options import Options, check_share, check_whole
from mpisparse.schemes.predictive.features import FEATURES, Features, count_of
from mpisparse.schemes.predictive.nets import INPUTS, Nets
from mpisparse.schemes.predictive.scorer import Predicted, validation
from mpisparse.schemes.side_gradient import gradient_aside
from mpisparse.schemes.speculative.influence import Influence, InfluenceScorer, Probe
from mpisparse.select.scorers import Average, Magnitude, Scorer

PLAIN = ("magnitude", "average")  # scorers that treat each element by itself, and so work on any part of a vector
EPSILON, AVERAGE_RATE = 1e-3, 0.5  # the defaults of scheme "speculative"


@dataclass(frozen=True)
class Scored(Options):
    """Selection by one score per element.

    scorer: "magnitude" of the accumulator, or "average", a moving average of the gradients' magnitudes.
    alpha: weight of the newest gradient in that average; for scorer "average" only.
    """

    scorer: str = "magnitude"
    alpha: float = 0.9
    scorers: ClassVar[tuple[str, ...]] = PLAIN

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("scorer", self.scorer, self.scorers)
        check_share("alpha", self.alpha)

    def without_effect(self) -> dict[str, str]:
        average = {} if self.scorer == "average" else {"alpha": 'it is the rate of scorer "average"; choose that'}
        return super().without_effect() | average

    @property
    def needs_whole_gradient(self) -> bool:
        return self.scorer in ("average", "predicted")

    def scorer_of(
        self, parts: Parts, residual: torch.Tensor, site: Site | None, number: Callable[[], int], *, late: bool
    ) -> Scorer:
        """A scorer for the sums in `residual`. number: returns how many steps have begun."""
        if self.scorer == "average":
            return Average(residual, parts.backend, parts.slots, self.alpha)
        return Magnitude(residual, parts.backend)


@dataclass(frozen=True)
class Scoring(Scored):
    """Selection by any score.

    scorer: "magnitude" of the accumulated value; "average", a moving average of the gradients' magnitudes; "predicted"
        importance, as scheme "predictive" learns it; "influence" on the loss, as in scheme "speculative". If weights are
        exchanged, their movement in training takes the place of the gradient.
    history: how many of the last gradients a net sees, 3 to 8; for scorer "predicted" only.
    features: inputs of the nets: "gradients" alone, or "all": also the coming step of an attached optimizer, and the root
        mean square of accumulated values in the element's row and column.
    nets: one for each "layer", or one "shared" by all layers; with features="all" it also sees the kind of parameter.
    validation: a callable that returns the loss of a held-out batch, from which the nets of scorer "predicted" learn.
    validate_every: steps between two calls of `validation`.
    probe: a callable that returns the loss of a batch, from which scorer "influence" estimates how the loss curves; None
        takes the gradient alone.
    probe_every: steps between two probes.
    """

    history: int = 4
    features: str = "gradients"
    nets: str = "layer"
    validation: Callable[[], Any] | None = None
    validate_every: int = 32
    probe: Callable[[], Any] | None = None
    probe_every: int = 50
    scorers = (*PLAIN, "predicted", "influence")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_nets(self)
        check_whole("probe_every", self.probe_every, 1)
        check_function("probe", self.probe)

    def _check_hierarchy(self) -> None:
        super()._check_hierarchy()
        if self.scorer not in PLAIN:
            raise ConfigurationError(
                f"hierarchy={self.hierarchy!r} is not for scorer={self.scorer!r}: it learns from whole parameters, of which "
                'a rank of a node has shards; choose "magnitude" or "average"'
            )

    @property
    def mortal(self) -> str:
        return super().mortal or ("" if self.scorer in PLAIN else Options.remembering)

    def without_effect(self) -> dict[str, str]:
        idle = super().without_effect()
        if self.scorer != "predicted":
            nets = 'it is for the nets of scorer "predicted"; choose that'
            idle |= dict.fromkeys(("history", "features", "nets", "validation", "validate_every"), nets)
        if self.scorer != "influence":
            idle |= dict.fromkeys(("probe", "probe_every"), 'it is for scorer "influence"; choose that')
        elif self.probe is None:
            idle["probe_every"] = "there is no probe; pass one"
        return idle

    def scorer_of(
        self, parts: Parts, residual: torch.Tensor, site: Site | None, number: Callable[[], int], *, late: bool
    ) -> Scorer:
        if self.scorer in PLAIN:
            return super().scorer_of(parts, residual, site, number, late=late)
        if self.scorer == "predicted":
            return predicted(parts, residual, site, self, key=PRODUCTS, late=late)
        probe = None if self.probe is None or site is None else probing(site, self.probe, epsilon=EPSILON)
        influence = Influence(len(residual), rate=AVERAGE_RATE, epsilon=EPSILON, device=residual.device)
        return InfluenceScorer(
            residual, parts.backend, influence, rank=parts.exchange.rank, step=number, probe=probe,
            probe_every=self.probe_every,
        )  # fmt: skip


def probing(site: Site, loss: Callable[[], Any], *, epsilon: float, seed: int = 0) -> Probe:
    """A probe of a model's loss."""
    return Probe(site.model, site.places, loss, epsilon=epsilon, seed=seed)


class Learned(Protocol):
    """The options of nets and their lessons."""

    @property
    def history(self) -> int: ...
    @property
    def features(self) -> str: ...
    @property
    def nets(self) -> str: ...
    @property
    def validation(self) -> Callable[[], Any] | None: ...
    @property
    def validate_every(self) -> int: ...


def predicted(
    parts: Parts, residual: torch.Tensor, site: Site | None, options: Learned, *, key: int, late: bool, delay: int = 4,
    budget: float = 0.1, rate: float = 0.01, seed: int = 0,
) -> Predicted:  # fmt: skip
    """A scorer by importance that nets predict; the defaults are those of scheme "predictive"."""
    if options.features == "all" and parts.backend.name == "cuda":
        raise ConfigurationError(
            'features="all" reads the accumulator and the optimizer in the memory of the host; on a GPU choose "gradients"'
        )
    mine, ends = (seed, parts.exchange.rank), np.array([slot.end for slot in parts.slots], dtype=np.int64)
    shared = options.nets == "shared"
    features = Features(parts.slots, site, kinds=shared) if options.features == "all" else None
    count = 0 if features is None else features.count
    return Predicted(
        residual,
        parts.backend,
        parts.slots,
        nets=Nets(
            parts.carrier(late=True), ends, options.history, key=key, rate=rate, seed=mine, features=count, shared=shared
        ),
        key=key,
        every=options.validate_every,
        delay=delay,
        cores=budget * torch.get_num_threads(),
        seed=mine,
        validate=_held_out(parts, site, options.validation),
        late=late,
        features=features,
    )


def _held_out(parts: Parts, site: Site | None, loss: Callable[[], Any] | None) -> Callable[[], Pieces] | None:
    """The gradient of the held-out batch, from which importance is learnt; None without one."""
    if loss is not None and site is not None:
        aside = functools.partial(gradient_aside, site.model, list(site.places.params), loss, "validation")
        return validation(parts.slots, aside)
    warnings.warn(
        'scheme "predictive" without validation= learns to predict the accumulator\'s coming magnitude, not what '
        "helps most: pass a callable that returns the loss of a held-out batch",
        stacklevel=5,
    )
    return None


def check_nets(options: Learned) -> None:
    """Raise ConfigurationError for options with which nets cannot learn."""
    check_whole("history", options.history, 3)
    check_choice("features", options.features, FEATURES)
    check_choice("nets", options.nets, ("layer", "shared"))
    more = 0 if options.features == "gradients" else count_of(kinds=options.nets == "shared")
    if options.history + more > INPUTS:
        beside = f" beside {more} other features" if more else ""
        raise ConfigurationError(f"history must be at most {INPUTS - more} gradients{beside}, got {options.history}")
    if options.validation is not None and not callable(options.validation):
        raise ConfigurationError(f"validation must be a callable that returns a loss, got {options.validation!r}")
    check_whole("validate_every", options.validate_every, options.history + 1)


def check_function(name: str, value: object) -> None:
    """Raise ConfigurationError unless this can be called, or is None."""
    if value is not None and not callable(value):
        raise ConfigurationError(f"{name} must be a function without arguments, got {value!r}")
