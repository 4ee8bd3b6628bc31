"""DiLoCo and SparseLoCo: some local steps of each rank's own optimizer, then an outer step of the shared weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mpisparse.comm.regions import even_regions
from mpisparse.core.aggregator import Aggregator
from mpisparse.core.records import Parts
from mpisparse.errors import ConfigurationError
from mpisparse.schemes.companion import Scheme, Site
from mpisparse.schemes.drift.apart import Distance
from mpisparse.schemes.drift.companion import Drifting
from mpisparse.schemes.drift.weights import OwnWeights
from mpisparse.schemes.local.companion import LocalSteps
from mpisparse.schemes.local.outer import Deferred, Nesterov, Plain
from mpisparse.schemes.options import Options, check_of_weights, check_positive, check_whole
from mpisparse.select.chunks import ChunkSelection, cut
from mpisparse.select.everything import Everything
from mpisparse.select.plans import Selection
from mpisparse.wire.codecs import CODECS, codec_names
from mpisparse.wire.feedback import WholeAtOwners
from mpisparse.wire.gathered import Gathered
from mpisparse.wire.on_host import on_host
from mpisparse.wire.reduction import Reducer


@dataclass(frozen=True)
class Local(Options):
    """Every rank trains on its own weights W with its own optimizer; every few steps the shared weights G take a step.

    every: optimizer steps from one exchange to the next.
    """

    on_device = True
    of_weights = True
    remembering = ""
    flat_only = "it exchanges weights, which every rank has of its own"
    name: ClassVar[str]
    every: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("every", self.every, 1)
        check_of_weights(self.name, self)

    def codecs(self) -> Sequence[str]:
        return codec_names(blended=False)

    def weights(self, site: Site | None) -> OwnWeights:
        """The weights of a model; refused where there is none."""
        if site is None:
            raise ConfigurationError(
                f'scheme "{self.name}" moves a model\'s weights, and so cannot average a plain vector: use GradientSync'
            )
        return OwnWeights(site.places, remainder=False, scheme=self.name)


@dataclass(frozen=True)
class Diloco(Local):
    """DiLoCo: G takes a step of SGD with Nesterov momentum along the mean of W - G, of all elements; then W = G.

    The codec's error on W - G stays in W.

    outer_rate: learning rate of the outer step.
    outer_momentum: momentum of the outer step.
    """

    name = "diloco"
    density: float = 1.0
    outer_rate: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.density != 1.0:
            raise ConfigurationError(f'scheme "diloco" sends everything: density must be 1, got {self.density!r}')
        check_positive("outer_rate", self.outer_rate, optional=False)
        check_decay("outer_momentum", self.outer_momentum)

    def build(self, parts: Parts, site: Site | None = None) -> Scheme:
        weights = self.weights(site)
        assert site is not None
        selection, reducer = self.regrouped(parts)
        aggregator = Aggregator(
            parts,
            scorer=Distance(parts.acc, parts.backend, weights.where, weights),
            selection=selection,
            reducer=reducer,
            stages=[Nesterov(weights, parts, self.outer_rate, self.outer_momentum)],
        )
        return Scheme(aggregator, Drifting(aggregator, site, weights, every=self.every))

    def regrouped(self, parts: Parts) -> tuple[Selection, Reducer]:
        n, exchange = len(parts.residual), parts.exchange
        region = even_regions(n, exchange.size)[exchange.rank]
        error, spare = (parts.zeros(region.hi - region.lo, late=False) for _ in range(2))
        return Everything(n), WholeAtOwners(CODECS[self.codec], error, n, spare=spare)

    @property
    def unmirrored(self) -> str:
        return "all of it is delivered in each exchange"


@dataclass(frozen=True)
class Sparseloco(Local):
    """SparseLoCo: each rank sends the largest elements of each chunk of W - G plus what earlier exchanges left; then W = G.

    density: share of each chunk that is sent.
    chunk: elements per chunk.
    feedback: share of the unsent values that is kept for the next exchange.
    outer_rate: factor on the mean by which G moves.
    """

    name = "sparseloco"
    density: float = 1 / 64
    codec: str = "int2"
    chunk: int = 4096
    feedback: float = 0.95
    outer_rate: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("chunk", self.chunk, 1)
        check_positive("outer_rate", self.outer_rate, optional=False)
        if self.feedback != 1.0:
            check_decay("feedback", self.feedback)

    def build(self, parts: Parts, site: Site | None = None) -> Scheme:
        weights = self.weights(site)
        assert site is not None
        scorer = Deferred(parts, self.feedback)
        selection, reducer = self.regrouped(parts)
        aggregator = Aggregator(
            parts,
            scorer=scorer,
            selection=selection,
            reducer=reducer,
            stages=[Plain(weights, scorer, self.outer_rate)],
        )
        return Scheme(aggregator, LocalSteps(aggregator, site, weights, every=self.every))

    def regrouped(self, parts: Parts) -> tuple[Selection, Reducer]:
        n = len(parts.residual)
        return ChunkSelection(n, cut(n, self.chunk)), on_host(parts.backend, Gathered(CODECS[self.codec], n))

    @property
    def unmirrored(self) -> str:
        return "a rank does not hear which of its elements another rank has sent"


def check_decay(name: str, value: object) -> None:
    """Raise unless value is a number in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 1.0:
        raise ConfigurationError(f"{name} must be a number in [0, 1), got {value!r}")
