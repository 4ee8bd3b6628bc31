"""The largest drift of weights is exchanged, after the optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from mpisparse.backends.flat import Pieces, zeros
from mpisparse.backends.protocol import GROUP_OF_WEIGHTS
from mpisparse.comm.hierarchy import Nodes
from mpisparse.comm.regions import even_regions
from mpisparse.core.aggregator import Aggregator
from mpisparse.core.records import Parts
from mpisparse.core.weights_by_node import WeightsByNode
from mpisparse.errors import ConfigurationError, check_choice
from mpisparse.schemes.companion import Scheme, Site
from mpisparse.schemes.drift.apart import Distance, Following, GroupDistance
from mpisparse.schemes.drift.by_node import DriftingByNode
from mpisparse.schemes.drift.companion import Drifting
from mpisparse.schemes.drift.scored import ScoredDistance
from mpisparse.schemes.drift.start import DenseStart
from mpisparse.schemes.drift.weights import OwnWeights
from mpisparse.schemes.falling import Falling
from mpisparse.schemes.options import check_flag, check_of_weights, check_positive, check_whole
from mpisparse.schemes.scoring import Scoring
from mpisparse.schemes.speculative.granularity import GRANULARITIES, Filter
from mpisparse.schemes.speculative.policy import Constant
from mpisparse.schemes.speculative.selection import Granular
from mpisparse.select.everything import Everything
from mpisparse.select.exclusive import ExclusiveSelection, Rules
from mpisparse.select.grouped import GroupSelection, count_of
from mpisparse.select.own import Chooser, Largest, OwnSelection
from mpisparse.select.plans import Selection
from mpisparse.select.rotating import Pace, Rotating
from mpisparse.select.scorers import Scorer
from mpisparse.select.selector import PARTITIONERS, ExclusiveSelector
from mpisparse.select.threshold import CONTROLLERS
from mpisparse.wire.codecs import CODECS, codec_names
from mpisparse.wire.feedback import (
    OwnAtOwners,
    PartAtOwners,
    SelectedAtOwners,
    WholeAtOwners,
    owned_count,
)
from mpisparse.wire.on_host import on_host
from mpisparse.wire.reduction import Reducer

Where = Callable[[], Pieces | None]
SELECTING = (  # what says how elements are selected
    "by", "controller", "partitioner", "blocks", "masks", "granularity", "average", "server", "scorer",
)  # fmt: skip


@dataclass(frozen=True)
class Drift(Scoring, Falling):
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
        single elements are selected and averaged over all ranks, otherwise 1.
    staleness: 1 exchanges while the next forward and backward run, and applies the result after the next
        optimizer.step(); with density 1 that takes a copy of W - G.
    remainder: keep a float32 remainder of weights of other types, which are refused without it.
    controller, partitioner, blocks: as with scheme "exdyna".
    masks: "owners": the owner of a partition selects there for all ranks. "own": each rank sends what drifted farthest on
        it, and owners average what arrives. "granular": the same, with whole layers where they drifted farthest on average.
    granularity: with masks="granular", "coarse" takes whole layers, "hybrid" half of the layers, "fine" none; those of more
        than 4 times what the density asks for are never taken whole.
    average: with a rank's own masks, the mean is over "all" ranks, or over those that sent an element ("received").
    server: with a rank's own masks, who averages: the "owners" of even stretches, or "rank0".
    """

    on_device = True
    of_weights = True
    remembering = ""
    refused: ClassVar[dict[str, str]] = {
        "tolerance": "ranks train on weights of their own and so are ahead at all times; what is exchanged returns to the "
        "shared weights"
    }
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
    masks: str = "owners"
    granularity: str = "hybrid"
    average: str = "all"
    server: str = "owners"

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
                f"staleness must be 0 or 1, got {self.staleness}: each exchange selects by what the previous one learnt"
            )
        check_flag("remainder", self.remainder)
        check_choice("controller", self.controller, CONTROLLERS)
        check_choice("partitioner", self.partitioner, PARTITIONERS)
        if self.blocks is not None:
            check_whole("blocks", self.blocks, 1)
        check_choice("masks", self.masks, ("owners", "own", "granular"))
        check_choice("granularity", self.granularity, GRANULARITIES)
        check_choice("average", self.average, ("all", "received"))
        check_choice("server", self.server, ("owners", "rank0"))
        if self.by == "groups" and self.density < 1.0:
            self._check_groups()
        check_of_weights("drift", self)

    def _check_groups(self) -> None:
        """Raise ConfigurationError for what cannot be had with groups."""
        if self.masks != "owners":
            raise ConfigurationError(
                'by="groups" sends the groups that their owners select for all ranks: choose masks="owners", or '
                'by="elements"'
            )
        if self.scorer != "magnitude":
            raise ConfigurationError(
                f'by="groups" compares the norms of groups, and scorer={self.scorer!r} has a score for each element: leave '
                'it out, or choose by="elements"'
            )

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
            idle |= dict.fromkeys(SELECTING, nothing)
        elif self.own:
            alone = f'masks="{self.masks}" sorts each rank\'s own drift, in no partition; choose masks="owners"'
            idle |= dict.fromkeys(("controller", "partitioner", "blocks"), alone)
        else:
            idle |= dict.fromkeys(
                ("average", "server"), 'all ranks send the same elements to their owners; choose masks="own"'
            )
        if self.masks != "granular":
            idle.setdefault("granularity", 'it says how masks="granular" selects; choose that')
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
    def mortal(self) -> str:
        start = "with dense_steps=N a mean is written over its gradients, which cannot be sent again then; leave it out"
        own = f"with masks={self.masks!r} it is not served yet; leave it out"
        scored = f"with scorer={self.scorer!r} it is not served yet; leave it out"
        reasons = {start: self.dense_steps, own: self.own, scored: self.scorer != "magnitude"}
        return super().mortal or next((why for why, given in reasons.items() if given), "")

    @property
    def in_parts(self) -> bool:
        """Whether each step exchanges a part of the elements."""
        return self.spread and self.density == 1.0 and Pace.of(self.every) != Pace.of(1)

    @property
    def late(self) -> bool:
        """Whether deliveries are in flight."""
        return self.staleness > 0

    @property
    def own(self) -> bool:
        """Whether each rank sends its own elements."""
        return self.masks != "owners" and self.density < 1.0

    @property
    def in_groups(self) -> bool:
        """Whether whole groups are selected."""
        return self.by == "groups" and self.density < 1.0

    def factor(self, ranks: int) -> float:
        """The rate as a number. docs/results/drift-rate.md has the grid that "auto" comes from."""
        if not isinstance(self.rate, str):
            return float(self.rate)
        single = self.density < 1.0 and not self.in_groups and self.average == "all"
        return min(2.0, math.sqrt(ranks)) if single else 1.0

    def _check_hierarchy(self) -> None:
        super()._check_hierarchy()
        if self.staleness:
            raise ConfigurationError(
                f"hierarchy={self.hierarchy!r} shares what moved in the node within the exchange: leave staleness=1 out, or "
                "the hierarchy"
            )
        if self.masks != "owners":
            raise ConfigurationError(
                f"hierarchy={self.hierarchy!r} gathers in the node what all nodes have sent of a shard, and with "
                f'masks="{self.masks}" they send other elements: choose masks="owners", or leave the hierarchy out'
            )
        if self.scorer != "magnitude":
            raise ConfigurationError(
                f'hierarchy={self.hierarchy!r} needs scorer="magnitude" with drift, got {self.scorer!r}: what a scorer '
                "remembers of a shard fits no other layout of nodes; choose that, or leave the hierarchy out"
            )
        if self.remainder:
            raise ConfigurationError(
                f"hierarchy={self.hierarchy!r} needs float32 weights (autocast is fine): leave remainder=True out, or the "
                "hierarchy"
            )

    def build(self, parts: Parts, site: Site | None = None) -> Scheme:
        site, weights = self._weights(site)
        aggregator = self._aggregator(parts, site, weights.where, weights.to_move, weights)
        start = self._start(site, parts)
        return Scheme(aggregator, Drifting(aggregator, site, weights, every=self._every, start=start))

    def build_by_node(self, parts: Parts, site: Site | None, nodes: Nodes) -> Scheme:
        site, weights = self._weights(site)
        lo, hi = nodes.shard.lo, nodes.shard.hi

        def of_shard(where: Where) -> Where:
            return lambda: None if (pieces := where()) is None else pieces.stretch(lo, hi)

        def make(shard: Parts) -> Aggregator:
            return self._aggregator(shard, site, of_shard(weights.where), of_shard(weights.to_move))

        aggregator = WeightsByNode(parts, nodes, make, weights)
        start = self._start(site, parts)
        return Scheme(aggregator, DriftingByNode(aggregator, site, weights, every=self._every, start=start))

    def _weights(self, site: Site | None) -> tuple[Site, OwnWeights]:
        """The weights of a model; refused where there is none."""
        if site is None:
            raise ConfigurationError(
                'scheme "drift" moves a model\'s weights, and so cannot average a plain vector: use GradientSync'
            )
        return site, OwnWeights(site.places, remainder=self.remainder)

    def _aggregator(
        self, parts: Parts, site: Site, where: Where, to_move: Where, weights: OwnWeights | None = None
    ) -> Aggregator:
        """Build the aggregator of a vector of weights; where: returns where they lie. weights: if it is all of them."""
        scorer = self._scorer(parts, site, where, lambda: made.number, weights)
        made = Aggregator(
            parts,
            scorer=scorer,
            selection=self._selection(parts),
            reducer=self._reducer(parts),
            stages=[Following(to_move, scorer.lost if isinstance(scorer, ScoredDistance) else None)],
            staleness=self.staleness,
        )
        return made

    @property
    def _every(self) -> int | str:
        """Steps of the optimizer from one exchange to the next."""
        return 1 if self.in_parts else self.every

    def _start(self, site: Site, parts: Parts) -> DenseStart | None:
        return DenseStart(site.places, parts, self.dense_steps, self.dense_codec) if self.dense_steps else None

    def _scorer(
        self, parts: Parts, site: Site, where: Where, number: Callable[[], int], weights: OwnWeights | None
    ) -> Scorer:
        if self.scorer == "magnitude" or self.density == 1.0:
            return (GroupDistance if self.in_groups else Distance)(parts.acc, parts.backend, where, weights)
        waiting = zeros(len(parts.residual), torch.float32, parts.residual.device)
        inner = self.scorer_of(parts, waiting, site, number, late=self.late)
        return ScoredDistance(parts.acc, parts.backend, where, inner, waiting)

    def regrouped(self, parts: Parts) -> tuple[Selection, Reducer]:
        return self._selection(parts), self._reducer(parts)

    def _selection(self, parts: Parts) -> Any:
        n, exchange, carrier = len(parts.residual), parts.exchange, parts.carrier(late=self.late)
        if self.in_parts:
            return Rotating(n, Pace.of(self.every), late=self.late)
        if self.density == 1.0:
            return Everything(n, late=self.late)
        if self.own:
            where = {"late": self.late, "one_server": self.server == "rank0", "fixed": True}
            return OwnSelection(self._chooser(parts), carrier, n, exchange.size, **where)
        count = count_of(n, GROUP_OF_WEIGHTS) if self.in_groups else n
        selector = ExclusiveSelector.first(
            count, exchange.size, controller=self.controller, partitioner=self.partitioner, blocks=self.blocks,
            reads_region=False, prior=0.0,
        )  # fmt: skip
        rules = Rules(scored=self.scorer != "magnitude", late=self.late)
        selection = ExclusiveSelection(selector, rules, exchange.rank, carrier)
        return GroupSelection(selection, n, GROUP_OF_WEIGHTS) if self.in_groups else selection

    def _chooser(self, parts: Parts) -> Chooser:
        if self.masks == "own":
            return Largest(turns=self.scorer != "magnitude")
        filter_ = Filter(parts.slots, parts.backend, largest=None, threshold=None, seed=0)
        return Granular(filter_, Constant(GRANULARITIES[self.granularity]), turns=self.scorer in ("average", "predicted"))

    def _reducer(self, parts: Parts) -> Reducer:
        n, rank, size, codec = len(parts.residual), parts.exchange.rank, parts.exchange.size, CODECS[self.codec]
        region, rate = even_regions(n, size)[rank], self.factor(size)
        if self.own:
            count = (n if rank == 0 else 0) if self.server == "rank0" else region.hi - region.lo
            one_server, received = self.server == "rank0", self.average == "received"
            error = zeros(count, torch.float32).numpy()
            reducer = OwnAtOwners(codec, error, n, rate, received=received, one_server=one_server)
            return on_host(parts.carrier(late=self.late), reducer)
        if self.in_parts or self.in_groups:
            return PartAtOwners(codec, parts.zeros(region.hi - region.lo, late=self.late), n, rate)
        if self.density == 1.0:
            error, spare = (parts.zeros(region.hi - region.lo, late=self.late) for _ in range(2))
            return WholeAtOwners(codec, error, n, rate, spare=spare)
        return SelectedAtOwners(codec, parts.zeros(owned_count(n, size, rank), late=self.late), n, rate)
