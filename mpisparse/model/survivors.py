"""What GradientSync does around its steps where the other ranks go on when one has died."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpisparse.comm.survival import Survival, lacking
from mpisparse.core.mirror import Mirror
from mpisparse.core.survive import CommittedDelivery
from mpisparse.errors import ConfigurationError
from mpisparse.schemes.options import check_whole

if TYPE_CHECKING:
    from mpisparse.arrays import Bools
    from mpisparse.comm.agreement import Notice
    from mpisparse.comm.exchange import Exchange
    from mpisparse.core.aggregator import Aggregator
    from mpisparse.schemes.options import Options

SHRINK = "shrink"


def check_survives(exchange: Exchange, scheme: str, options: Options, *, on_gpu: bool) -> None:
    """Raise ConfigurationError unless the other ranks can go on when one dies; local."""
    why = options.mortal or lacking(exchange)
    if not why and options.in_flight and not exchange.threaded:
        why = f"with {options.in_flight} it needs an MPI that several threads may call (MPI_THREAD_MULTIPLE); leave it out"
    if not why and on_gpu:
        why = "a model on a GPU is not served yet; leave on_failure out and requeue the job"
    if why:
        raise ConfigurationError(f'on_failure="shrink" is not possible with scheme "{scheme}" here: {why}')


def check_mirror(exchange: Exchange, scheme: str, options: Options, mirror: object, on_failure: str) -> None:
    """Raise ConfigurationError unless a rank can keep a copy of what another has not sent; local."""
    check_whole("mirror", mirror, 1)
    if on_failure != SHRINK:
        raise ConfigurationError(f'mirror is of use with on_failure="shrink" alone, got {on_failure!r}; leave it out')
    threads = "" if exchange.threaded else "it needs an MPI that several threads may call (MPI_THREAD_MULTIPLE)"
    if why := options.unmirrored or threads:
        raise ConfigurationError(f'mirror is not possible with scheme "{scheme}" as it is set: {why}; leave mirror out')


class Survivors:
    """The parts that survive a death together. regrouped: brings what else knows the ranks up to date; collective.

    mirror: the copy of another rank's residual, refreshed within so many steps; None: there are no copies.
    """

    def __init__(self, aggregator: Aggregator, options: Options, mirror: int | None, regrouped: Callable[[], None]) -> None:
        self.aggregator, self.options, self.regrouped = aggregator, options, regrouped
        self.exchange = exchange = aggregator.parts.exchange
        self.formed = exchange.rank, exchange.size  # which the parts were made for
        n, works = len(aggregator.parts.residual), aggregator.works
        self.mirror = None if mirror is None else Mirror(exchange, works.scorer, n, mirror)
        self.survival = Survival(exchange, self._rebuild, aggregator.carriers, aggregator.quiet)
        self.delivery = CommittedDelivery(works, self.survival, aggregator.owing, self.mirror)
        aggregator.survive(self.delivery)

    def _rebuild(self, living: list[int]) -> Callable[[], float]:
        """Make ready to go on with fewer ranks; collective. If a rank dies meanwhile it is called again."""
        finish = self.aggregator.regrouped(self.options.regrouped, *self.formed)
        kept = 0.0 if self.mirror is None else self.mirror.kept(living, *self.formed)
        self.regrouped()

        def go_on() -> float:
            finish()
            if self.mirror is not None:
                self.mirror.regroup(living, *self.formed)
            self.formed = self.exchange.rank, self.exchange.size
            return kept

        return go_on

    def measured(self, notice: Notice) -> Notice:
        """A notice that tells, too, how much this rank has not sent; local."""
        return notice._replace(norm=self.delivery.norm())

    def met(self, agree: Callable[[Notice], Bools | None], notice: Notice) -> Bools | None:
        """Agree that all living ranks can go on; collective. Replicas are compared by a first attempt alone."""

        def attempt(again: bool) -> Bools | None:
            if self.mirror is not None:
                self.mirror.arrive()
            return agree(notice._replace(digest=0) if again else notice)

        return self.survival.until_met(attempt)

    def ended(self, used: Bools | None, details: dict[str, Any]) -> Bools | None:
        """A step is done on this rank; local, on all ranks. Returns which parameters had a gradient on some rank that lives.

        used: what the first roll call of the step told. details: of the statistics, to be added to.
        """
        if self.mirror is not None:
            self.mirror.refresh()
            details["mirror_bytes"] = float(self.delivery.mirrored)
        return self.delivery.used(used)

    def restart(self) -> None:
        """All ranks have changed what they have not sent; local, on all ranks."""
        if self.mirror is not None:
            self.mirror.restart()

    def close(self) -> None:
        """End threads; local."""
        if self.mirror is not None:
            self.mirror.close()
