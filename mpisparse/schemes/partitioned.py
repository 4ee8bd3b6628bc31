"""Selection in exclusive partitions: by the accumulator's magnitude (exdyna), or by a moving average (momentum)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mpisparse.core.aggregator import Aggregator
from mpisparse.core.blend import Blend
from mpisparse.core.records import Parts
from mpisparse.core.stages import Dropped, Stage
from mpisparse.errors import ConfigurationError, check_choice
from mpisparse.names import BLENDED
from mpisparse.schemes.companion import Scheme, Site
from mpisparse.schemes.options import KEPT, Options, check_flag, check_share, check_whole
from mpisparse.select.exclusive import ExclusiveSelection, Rules
from mpisparse.select.scorers import Average, Magnitude, Scorer
from mpisparse.select.selector import PARTITIONERS, ExclusiveSelector
from mpisparse.select.threshold import CONTROLLERS
from mpisparse.wire.codecs import CODECS
from mpisparse.wire.reduction import ByMpi, ByOwner


@dataclass(frozen=True)
class Partitioned(Options):
    """Selection in exclusive partitions, re-balanced, with a threshold found online.

    controller: "tail" finds the threshold inside each step; "paper" scales it between steps, as published; "fixed" keeps
        the threshold of the first step, to compare with.
    partitioner: "best" draws the borders by this step's counts; "paper" moves one block per step, as published; "static"
        keeps even shares, to compare with.
    blocks: number of blocks that borders are drawn between; None chooses it by the number of ranks.
    reduce: "owner" sums in rank order at the partition's owner; "allreduce" leaves the sum to MPI (fp32 only).
    """

    controller: str = "tail"
    partitioner: str = "best"
    blocks: int | None = None
    reduce: str = "owner"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("controller", self.controller, CONTROLLERS)
        check_choice("partitioner", self.partitioner, PARTITIONERS)
        check_choice("reduce", self.reduce, ("owner", "allreduce"))
        if self.blocks is not None:
            check_whole("blocks", self.blocks, 1)
        if self.reduce == "allreduce" and self.codec != "fp32":
            raise ConfigurationError(f'reduce="allreduce" sums float32: codec must be "fp32", got {self.codec!r}')

    def codecs(self) -> Sequence[str]:
        return ["fp32"] if self.reduce == "allreduce" else super().codecs()

    def put_together(
        self, parts: Parts, scorer: Scorer, *, keep: bool, masked: bool = False, exact: bool = False,
        stages: Sequence[Stage] = (), staleness: int = 0,
    ) -> Aggregator:  # fmt: skip
        """The aggregator of these options, with what a scheme adds; `keep`: what is not sent stays in the residual."""
        rules = Rules(masked=masked, exact=exact, scored=not scorer.by_magnitude, keeps=keep, late=staleness > 0)
        selector = ExclusiveSelector.first(
            len(parts.residual),
            parts.exchange.size,
            controller=self.controller,
            partitioner=self.partitioner,
            blocks=self.blocks,
            reads_region=self.accumulate == "backward" or not rules.by_ladder,
            prior=scorer.prior if keep else 0.0,
        )
        codec = CODECS[self.codec]
        if staleness and codec.blended:
            raise ConfigurationError(f'codec "{self.codec}" blends what is sent at once; in flight choose one that does not')
        return Aggregator(
            parts,
            scorer=scorer,
            selection=ExclusiveSelection(selector, rules, parts.exchange.rank, parts.backend),
            reducer=ByOwner(codec) if self.reduce == "owner" else ByMpi(),
            stages=[*stages, *feedback(keep=keep, blend=self.beta if codec.blended else None)],
            staleness=staleness,
        )


def feedback(*, keep: bool, blend: float | None) -> list[Stage]:
    """The stages beyond plain error feedback: momentum (`blend`: its share), and dropping what is not sent."""
    blended: list[Stage] = [] if blend is None else [Blend(blend)]
    return blended if keep else [*blended, Dropped()]


def uncontrolled(percentile: str) -> dict[str, str]:
    """What has no effect where the threshold is found by sorting."""
    exact = 'percentile="exact" finds the threshold without a controller; choose percentile="estimate"'
    return {"controller": exact} if percentile == "exact" else {}


@dataclass(frozen=True)
class Sparse(Partitioned):
    """By one score for every element.

    scorer: "magnitude" of the accumulator, or "average", a moving average of the gradients' magnitudes.
    alpha: weight of the newest gradient in that average; for scorer "average" only.
    compensate: True keeps what is not sent in the residual for later steps; False drops it.
    """

    scorer: str = "magnitude"
    alpha: float = 0.9
    compensate: bool = True
    scorers: ClassVar[tuple[str, ...]] = ("magnitude", "average")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("scorer", self.scorer, self.scorers)
        check_share("alpha", self.alpha)
        check_flag("compensate", self.compensate, KEPT)

    def without_effect(self) -> dict[str, str]:
        average = {} if self.scorer == "average" else {"alpha": 'it is the rate of scorer "average"; choose that'}
        return super().without_effect() | average

    @property
    def needs_whole_gradient(self) -> bool:
        return self.scorer == "average"

    def build(self, parts: Parts, site: Site | None = None) -> Scheme:
        return Scheme(self.put_together(parts, self.make_scorer(parts), keep=self.compensate))

    def build_in_flight(self, parts: Parts, staleness: int) -> Aggregator:
        self._check_late(staleness)
        return self.put_together(parts, self.make_scorer(parts), keep=True, staleness=staleness)

    def _check_late(self, staleness: int) -> None:
        """Raise ConfigurationError unless these options go with deliveries in flight."""
        if staleness > 1:
            raise ConfigurationError(
                f"staleness must be 0 or 1, got {staleness}: each step selects by what the one before it learnt"
            )
        if self.scorer != "magnitude":
            raise ConfigurationError(
                f'staleness 1 needs scheme "exdyna" with scorer="magnitude", got scorer={self.scorer!r}: a delivery in '
                "flight sees candidates only, and elements of a small score would wait for ever"
            )
        if CODECS[self.codec].blended:
            raise ConfigurationError(
                f"staleness 1 sends values that have left the accumulator, which codec {self.codec!r} cannot blend with "
                f"earlier ones; choose {self.codec.removeprefix(BLENDED)!r}"
            )
        if not self.compensate:
            raise ConfigurationError(
                "staleness 1 needs compensate=True: indices travel one step ahead of their values, which must wait that long"
            )

    def make_scorer(self, parts: Parts) -> Scorer:
        """What matters."""
        if self.scorer == "average":
            return Average(parts.residual, parts.backend, parts.slots, self.alpha)
        return Magnitude(parts.residual, parts.backend)


@dataclass(frozen=True)
class Exdyna(Sparse):
    """Select by the magnitude of the accumulator, with a threshold that gives the set density in every step."""

    on_device = True


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
        return super().without_effect() | uncontrolled(self.percentile)

    def build(self, parts: Parts, site: Site | None = None) -> Scheme:
        masked = (self.mask or ("average" if self.compensate else "gradient")) == "gradient"
        exact = self.percentile == "exact"
        scorer = self.make_scorer(parts)
        return Scheme(self.put_together(parts, scorer, keep=self.compensate, masked=masked, exact=exact))
