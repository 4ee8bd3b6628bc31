"""Selection in exclusive partitions: by the accumulator's magnitude (exdyna), or by a moving average (momentum)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mpisparse.core.aggregator import Aggregator
from mpisparse.core.blend import Blend
from mpisparse.core.records import Parts
from mpisparse.core.stages import Dropped, LateDropped, Stage
from mpisparse.errors import ConfigurationError, check_choice
from mpisparse.schemes.companion import Scheme, Site
from mpisparse.schemes.falling import Falling
from mpisparse.schemes.late import InFlightMeans
from mpisparse.schemes.options import Keeping, Options, check_whole
from mpisparse.schemes.overlap import Overlapping
from mpisparse.schemes.scoring import Scored, Scoring
from mpisparse.select import riders, search
from mpisparse.select.exclusive import ExclusiveSelection, Rules
from mpisparse.select.own import Chooser, Largest, OwnSelection
from mpisparse.select.plans import Selection
from mpisparse.select.scorers import Scorer
from mpisparse.select.selector import PARTITIONERS, ExclusiveSelector
from mpisparse.select.threshold import CONTROLLERS
from mpisparse.wire.codecs import CODECS
from mpisparse.wire.on_host import on_host
from mpisparse.wire.own import OwnByOwner
from mpisparse.wire.reduction import ByMpi, ByOwner, Reducer


@dataclass(frozen=True)
class Partitioned(Falling):
    """Selection in exclusive partitions, re-balanced, with a threshold found online.

    controller: "tail" finds the threshold inside each step; "paper" scales it between steps, as published; "fixed" keeps
        the threshold of the first step, for comparison.
    partitioner: "best" draws the borders by this step's counts; "paper" moves one block per step, as published; "static"
        keeps even partitions, for comparison.
    blocks: number of blocks that borders are drawn between; None chooses it by the number of ranks.
    reduce: "owner" sums in rank order at the partition's owner; "allreduce" leaves the sum to MPI (fp32 only).
    masks: "owners": the owner of a partition selects there for all ranks. "own": each rank selects k elements in the whole
        vector by its own scores and sends them to owners, who add them up.
    """

    controller: str = "tail"
    partitioner: str = "best"
    blocks: int | None = None
    reduce: str = "owner"
    masks: str = "owners"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("masks", self.masks, ("owners", "own"))
        check_choice("controller", self.controller, CONTROLLERS)
        check_choice("partitioner", self.partitioner, PARTITIONERS)
        check_choice("reduce", self.reduce, ("owner", "allreduce"))
        if self.blocks is not None:
            check_whole("blocks", self.blocks, 1)
        if self.reduce == "allreduce" and self.codec != "fp32":
            raise ConfigurationError(f'reduce="allreduce" sums float32: codec must be "fp32", got {self.codec!r}')

    def codecs(self) -> Sequence[str]:
        return ["fp32"] if self.reduce == "allreduce" else super().codecs()

    def without_effect(self) -> dict[str, str]:
        idle = super().without_effect()
        if self.masks == "own":
            alone = 'masks="own" sorts each rank\'s own scores, in no partition; choose masks="owners"'
            idle |= dict.fromkeys(("controller", "partitioner", "blocks", "reduce"), alone)
        return idle

    def put_together(
        self, parts: Parts, scorer: Scorer, *, keep: bool, masked: bool = False, exact: bool = False,
        stages: Sequence[Stage] = (), staleness: int = 0,
    ) -> Aggregator:  # fmt: skip
        """Build the aggregator of these options with a scheme's additions; `keep`: unsent values stay in the residual."""
        codec, own, late = CODECS[self.codec], self.masks == "own", staleness > 0
        selection, reducer = self.shared_out(parts, scorer, keep=keep, masked=masked, exact=exact, late=late)
        blend = self.beta if codec.blended else None
        return Aggregator(
            parts,
            scorer=scorer,
            selection=selection,
            reducer=reducer,
            stages=[*stages, *feedback(keep=keep, blend=blend, own=own, late=late)],
            staleness=staleness,
        )

    def shared_out(
        self, parts: Parts, scorer: Scorer, *, keep: bool, masked: bool, exact: bool, late: bool
    ) -> tuple[Selection, Reducer]:
        """The selection and the reducer, which depend on the number of ranks.

        The arguments are those of put_together(). late: deliveries are in flight.
        """
        if self.masks == "own":
            return own_elements(self, parts, Largest(masked=masked, turns=keep and not scorer.by_magnitude), late=late)
        rules = Rules(masked=masked, exact=exact, scored=not scorer.by_magnitude, keeps=keep, late=late)
        selector = ExclusiveSelector.first(
            len(parts.residual),
            parts.exchange.size,
            controller=self.controller,
            partitioner=self.partitioner,
            blocks=self.blocks,
            reads_region=self.accumulate == "backward" or not rules.by_ladder,
            prior=scorer.prior if keep else 0.0,
        )
        if scorer.peeks and rules.by_ladder and not rules.late and 1 < parts.exchange.size <= search.GATHERED_RANKS:
            parts.exchange.spare = riders.NBYTES
        selection = ExclusiveSelection(selector, rules, parts.exchange.rank, parts.carrier(late=late))
        return selection, ByOwner(CODECS[self.codec]) if self.reduce == "owner" else ByMpi()


def feedback(*, keep: bool, blend: float | None, own: bool = False, late: bool = False) -> list[Stage]:
    """The stages beyond plain error feedback: momentum (`blend`: its share), and dropping unsent values.

    own: each rank sends its own elements; late: in flight.
    """
    blended: list[Stage] = [] if blend is None else [Blend(blend, own=own, late=late, keeps=keep)]
    return blended if keep else [*blended, LateDropped() if late else Dropped()]


def each_its_own(
    options: Options, parts: Parts, scorer: Scorer, chooser: Chooser, *, keep: bool, stages: Sequence[Stage] = (),
    staleness: int = 0,
) -> Aggregator:  # fmt: skip
    """Build an aggregator in which each rank chooses its own elements."""
    codec = CODECS[options.codec]
    selection, reducer = own_elements(options, parts, chooser, late=staleness > 0)
    return Aggregator(
        parts,
        scorer=scorer,
        selection=selection,
        reducer=reducer,
        stages=[*stages, *feedback(keep=keep, blend=options.beta if codec.blended else None, own=True, late=staleness > 0)],
        staleness=staleness,
    )


def own_elements(options: Options, parts: Parts, chooser: Chooser, *, late: bool) -> tuple[Selection, Reducer]:
    """The selection of each rank's own elements, and their reducer. late: deliveries are in flight."""
    carrier = parts.carrier(late=late)
    selection = OwnSelection(chooser, carrier, len(parts.residual), parts.exchange.size, late=late)
    return selection, on_host(carrier, OwnByOwner(CODECS[options.codec]))


def uncontrolled(percentile: str, masks: str) -> dict[str, str]:
    """Options without effect if the threshold is found by sorting all scores, or each rank's own."""
    if masks == "own":
        return {"percentile": 'masks="own" sorts each rank\'s own scores; choose masks="owners"'}
    exact = 'percentile="exact" finds the threshold without a controller; choose percentile="estimate"'
    return {"controller": exact} if percentile == "exact" else {}


def check_late(options: Partitioned, staleness: int, *, keep: bool, whole: str = "") -> None:
    """Raise ConfigurationError unless these options go with deliveries in flight.

    keep: unsent values stay in the residual. whole: an option that reads every element, if one is set.
    """
    if options.masks == "own":
        return
    if staleness > 1:
        raise ConfigurationError(
            f"staleness must be 0 or 1, got {staleness}: each step selects by what the previous one learnt"
        )
    if whole:
        raise ConfigurationError(
            f"{whole} compares every element with the threshold, and a delivery in flight has only candidates; choose "
            'masks="own", or leave it out'
        )
    if not keep:
        raise ConfigurationError(
            "staleness 1 needs compensate=True: indices travel one step ahead of their values, which must wait that long"
        )


@dataclass(frozen=True)
class Sparse(Keeping, Scored, Partitioned):
    """Selection by a scorer; the selected elements are sent."""

    remembering = ""

    def build(self, parts: Parts, site: Site | None = None) -> Scheme:
        return Scheme(self.aggregated(parts, site, 0))

    def build_in_flight(self, parts: Parts, staleness: int) -> Aggregator:
        self.check_late(staleness)
        return self.aggregated(parts, None, staleness)

    def check_late(self, staleness: int) -> None:
        """Raise ConfigurationError unless these options go with deliveries in flight."""
        check_late(self, staleness, keep=self.compensate)

    @property
    def masked(self) -> bool:
        """Whether the accumulator is compared with the threshold, not the score."""
        return False

    @property
    def exact(self) -> bool:
        """Whether all scores are gathered and sorted."""
        return False

    def aggregated(self, parts: Parts, site: Site | None, staleness: int) -> Aggregator:
        """Build the aggregator with its scorer."""
        scorer = self.scorer_of(parts, parts.residual, site, lambda: made.number, late=staleness > 0)
        made = self.put_together(
            parts, scorer, keep=self.compensate, masked=self.masked, exact=self.exact, staleness=staleness
        )
        return made


@dataclass(frozen=True)
class Exdyna(Overlapping, Scoring, Sparse):
    """Select by the magnitude of the accumulator, with a threshold that gives the set density in every step.

    staleness: 0 exchanges in step(); 1 exchanges while the next step is computed, so that p.grad is the mean of an earlier
        step's values, and zero in the first steps.
    """

    on_device = True
    staleness: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("staleness", self.staleness, 0)
        if self.staleness:
            self.check_late(self.staleness)
            self._check_plain_late()
        if self.overlap and self.scorer != "magnitude":
            raise ConfigurationError(
                f'overlap=True needs scorer="magnitude", got {self.scorer!r}: what it remembers cannot take a gradient back '
                "when a later bucket is refused"
            )

    @property
    def with_backward(self) -> str:
        return f"staleness={self.staleness}" if self.staleness else super().with_backward

    def _check_plain_late(self) -> None:
        """Raise ConfigurationError for options that would act on a step before its delivery has arrived."""
        if self.overlap:
            raise ConfigurationError("overlap=True delivers within a step, staleness=1 in the next one; choose one of them")
        if self.accumulate != "step" or self.nonfinite != "raise":
            raise ConfigurationError(
                'staleness=1 needs accumulate="step" and nonfinite="raise": when ranks refuse a step, the next one is on '
                "its way"
            )

    def _check_hierarchy(self) -> None:
        super()._check_hierarchy()
        if self.staleness:
            raise ConfigurationError(
                f"hierarchy={self.hierarchy!r} gathers results in the node within the step: leave staleness=1 out, or the "
                "hierarchy"
            )

    def regrouped(self, parts: Parts) -> tuple[Selection, Reducer]:
        late = self.staleness > 0
        scorer = self.scorer_of(parts, parts.residual, None, lambda: 0, late=late)
        return self.shared_out(parts, scorer, keep=self.compensate, masked=self.masked, exact=self.exact, late=late)

    def build_for_model(self, parts: Parts, site: Site) -> Scheme:
        if not self.staleness:
            return super().build_for_model(parts, site)
        late = self.aggregated(parts, site, self.staleness)
        return Scheme(late, InFlightMeans(late))


@dataclass(frozen=True)
class Momentum(Sparse):
    """Select by a moving average of each element's gradient magnitude, against its percentile; int8 with momentum.

    scorer: "average", a moving average of the gradients' magnitudes; no other.
    mask: "average" selects by the average itself; "gradient" by the accumulator (which is the gradient if compensate is
        False) against the average's percentile. None is "average" with compensate=True, otherwise "gradient".
    percentile: "estimate" finds it by counts; "exact" gathers and sorts all averages, for tests.
    """

    on_device = True
    density: float = 0.1
    codec: str = "momentum-int8"
    scorer: str = "average"
    mask: str | None = None
    percentile: str = "estimate"
    scorers = ("average",)
    refused: ClassVar[dict[str, str]] = {
        **Options.refused,
        "staleness": 'in flight it is scheme "exdyna" with scorer="average"',
    }

    def __post_init__(self) -> None:
        if self.scorer in Sparse.scorers and self.scorer not in self.scorers:
            raise ConfigurationError(
                f'scheme "momentum" scores by a moving average: scorer must be "average", got {self.scorer!r}'
            )
        super().__post_init__()
        if self.mask is not None:
            check_choice("mask", self.mask, ("average", "gradient"))
        check_choice("percentile", self.percentile, ("estimate", "exact"))

    def without_effect(self) -> dict[str, str]:
        return super().without_effect() | uncontrolled(self.percentile, self.masks)

    def check_late(self, staleness: int) -> None:
        looks = {'mask="gradient"': self.masked, 'percentile="exact"': self.exact}
        check_late(self, staleness, keep=self.compensate, whole=next((name for name, is_set in looks.items() if is_set), ""))

    @property
    def masked(self) -> bool:
        return (self.mask or ("average" if self.compensate else "gradient")) == "gradient"

    @property
    def exact(self) -> bool:
        return self.percentile == "exact"
