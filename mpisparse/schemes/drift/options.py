"""The largest drift of weights is exchanged, after the optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mpisparse.backends.flat import zeros
from mpisparse.backends.protocol import GROUP_OF_WEIGHTS
from mpisparse.comm.regions import even_regions
from mpisparse.core.aggregator import Aggregator
from mpisparse.core.records import Parts
from mpisparse.errors import ConfigurationError, check_choice
from mpisparse.schemes.companion import Scheme, Site
from mpisparse.schemes.drift.apart import Distance, Following, GroupDistance
from mpisparse.schemes.drift.companion import Drifting
from mpisparse.schemes.drift.start import DenseStart
from mpisparse.schemes.drift.weights import OwnWeights
from mpisparse.schemes.options import Options, check_flag, check_of_weights, check_positive, check_whole
from mpisparse.select.everything import Everything
from mpisparse.select.exclusive import ExclusiveSelection, Rules
from mpisparse.select.grouped import GroupSelection, count_of
from mpisparse.select.rotating import Pace, Rotating
from mpisparse.select.selector import PARTITIONERS, ExclusiveSelector
from mpisparse.select.threshold import CONTROLLERS
from mpisparse.wire.codecs import CODECS, codec_names
from mpisparse.wire.feedback import (
    AtFixedOwners,
    PartAtOwners,
    SelectedAtOwners,
    WholeAtOwners,
    owned_count,
)


@dataclass(frozen=True)
class Drift(Options):
    """Every rank trains on its own weights W with its own optimizer; G is shared, and the largest |W - G| are exchanged.

    The exchange comes after optimizer.step().

    density: share of all elements that an exchange selects; 1 exchanges all of them.
    dense_steps: steps at the start that average whole gradients before optimizer.step() instead, the last one in float32.
        Early steps count most, so these bytes are well spent. Needs an attached optimizer.
    dense_codec: codec of these steps.
    every: optimizer steps from one exchange to the next. "5, 200:40" is every 5, and every 40 from step 200 on. With
        density 1 each step exchanges another part of the elements instead, so that traffic is even.
    spread: False exchanges all elements in one step out of `every`, instead of a part in each; with density 1 only.
    by: select single "elements", or "groups" of 512 neighbours by the norm of their drift. Groups cost hardly any
        indices, which suits densities of some percent with few bits.
    rate: factor on the mean drift by which G moves. "auto" is the square root of the number of ranks, at most 2, where
        single elements are selected and the attached optimizer is adaptive (Adam and its like), otherwise 1.
    staleness: 1 exchanges while the next forward and backward run, and applies the result after the next
        optimizer.step(); with density 1 that takes a copy of W - G.
    remainder: keep a float32 remainder of weights of other types, which are refused without it.
    controller, partitioner, blocks: as with scheme "exdyna".
    """

    of_weights = True
    density: float = 0.01
    codec: str = "int4"
    dense_steps: int = 0
    dense_codec: str = "int4"
    every: int | str = 1
    spread: bool = True
    by: str = "elements"
    rate: float | str = "auto"
    staleness: int = 0
    remainder: bool = False
    controller: str = "tail"
    partitioner: str = "best"
    blocks: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            Pace.of(self.every)
        except ValueError:
            raise ConfigurationError(
                f'every must be a whole number >= 1, or a text such as "5, 200:40" (every 5, from step 200 on every 40), '
                f"got {self.every!r}"
            ) from None
        check_whole("dense_steps", self.dense_steps, 0)
        check_choice("dense_codec", self.dense_codec, codec_names(blended=False))
        check_flag("spread", self.spread)
        check_choice("by", self.by, ("elements", "groups"))
        if self.by == "groups" and self.staleness:
            raise ConfigurationError('by="groups" is exchanged at once: leave staleness out, or choose by="elements"')
        if isinstance(self.rate, str):
            check_choice("rate", self.rate, ("auto",))
        else:
            check_positive("rate", self.rate, optional=False)
        check_whole("staleness", self.staleness, 0)
        if self.staleness > 1:
            raise ConfigurationError(
                f"staleness must be 0 or 1, got {self.staleness}: each exchange selects by what the one before it learnt"
            )
        check_flag("remainder", self.remainder)
        check_choice("controller", self.controller, CONTROLLERS)
        check_choice("partitioner", self.partitioner, PARTITIONERS)
        if self.blocks is not None:
            check_whole("blocks", self.blocks, 1)
        check_of_weights("drift", self)

    def codecs(self) -> Sequence[str]:
        return codec_names(blended=False)

    def without_effect(self) -> dict[str, str]:
        idle = super().without_effect()
        if self.density < 1.0 or Pace.of(self.every) == Pace.of(1):
            idle["spread"] = "it is for density 1 and every > 1; choose those"
        if not self.dense_steps:
            idle["dense_codec"] = "there are no dense steps; set dense_steps"
        if self.density == 1.0:
            nothing = "density 1 selects nothing; choose a lower one"
            idle |= dict.fromkeys(("by", "controller", "partitioner", "blocks"), nothing)
        return idle

    def changed_density(self, density: float) -> float:
        if self.density == 1.0 and density != 1.0:
            raise ConfigurationError(
                f'scheme "drift" was constructed with density 1, which selects nothing: it cannot change to {density:g}; '
                "construct it with a density below 1, which may be set to 1 for some steps"
            )
        return super().changed_density(density)

    def check_saved(self, saved: Mapping[str, Any]) -> None:
        if (saved.get("density") == 1.0) != (self.density == 1.0):
            raise ConfigurationError(
                f"the state was saved with density={saved.get('density')!r}, this is density={self.density!r}: with density "
                "1 elements have other owners; construct it as it was saved"
            )

    @property
    def in_parts(self) -> bool:
        """Whether each step exchanges a part of the elements."""
        return self.spread and self.density == 1.0 and Pace.of(self.every) != Pace.of(1)

    @property
    def in_groups(self) -> bool:
        """Whether whole groups are selected."""
        return self.by == "groups" and self.density < 1.0

    @property
    def factor(self) -> float:
        """The rate as a number, unless the optimizer changes it."""
        return 1.0 if isinstance(self.rate, str) else float(self.rate)

    def build(self, parts: Parts, site: Site | None = None) -> Scheme:
        if site is None:
            raise ConfigurationError('scheme "drift" moves a model\'s weights, and so cannot average a plain vector')
        weights = OwnWeights(site.places, remainder=self.remainder)
        scorer = (GroupDistance if self.in_groups else Distance)(parts.acc, parts.backend, weights.where)
        aggregator = Aggregator(
            parts,
            scorer=scorer,
            selection=self._selection(parts),
            reducer=self._reducer(parts),
            stages=[Following(weights.to_move)],
            staleness=self.staleness,
        )
        every = 1 if self.in_parts else self.every
        single = self.rate == "auto" and self.density < 1.0 and not self.in_groups
        rate = min(2.0, math.sqrt(parts.exchange.size)) if single else None
        start = DenseStart(site.places, parts.exchange, self.dense_steps, self.dense_codec) if self.dense_steps else None
        companion = Drifting(
            aggregator, site, weights, every=every, adaptive_rate=rate, start=start
        )  # fmt: skip
        return Scheme(aggregator, companion)

    def _selection(self, parts: Parts) -> Any:
        n, exchange = len(parts.residual), parts.exchange
        if self.in_parts:
            return Rotating(n, Pace.of(self.every), late=self.staleness > 0)
        if self.density == 1.0:
            return Everything(n, late=self.staleness > 0)
        count = count_of(n, GROUP_OF_WEIGHTS) if self.in_groups else n
        selector = ExclusiveSelector.first(
            count, exchange.size, controller=self.controller, partitioner=self.partitioner, blocks=self.blocks,
            reads_region=False, prior=0.0,
        )  # fmt: skip
        selection = ExclusiveSelection(selector, Rules(late=self.staleness > 0), exchange.rank, parts.backend)
        return GroupSelection(selection, n, GROUP_OF_WEIGHTS) if self.in_groups else selection

    def _reducer(self, parts: Parts) -> AtFixedOwners:
        n, rank, size, codec = len(parts.residual), parts.exchange.rank, parts.exchange.size, CODECS[self.codec]
        region = even_regions(n, size)[rank]
        if self.in_parts or self.in_groups:
            return PartAtOwners(codec, zeros(region.hi - region.lo, torch.float32).numpy(), n, self.factor)
        if self.density == 1.0:
            error, spare = (zeros(region.hi - region.lo, torch.float32).numpy() for _ in range(2))
            return WholeAtOwners(codec, error, n, self.factor, spare=spare)
        return SelectedAtOwners(codec, zeros(owned_count(n, size, rank), torch.float32).numpy(), n, self.factor)
