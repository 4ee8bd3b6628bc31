"""What GradientSync does around its steps if the other ranks go on after a death."""

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


def check_survives(exchange: Exchange, scheme: str, options: Options) -> None:
    """Raise ConfigurationError unless the other ranks can go on when one dies; local."""
    why = options.mortal or lacking(exchange)
    if not why and options.in_flight and not exchange.threaded:
        why = f"with {options.in_flight} it needs an MPI that several threads may call (MPI_THREAD_MULTIPLE); leave it out"
    if why:
        raise ConfigurationError(f'on_failure="shrink" is not possible with scheme "{scheme}" here: {why}')


def check_mirror(exchange: Exchange, scheme: str, options: Options, mirror: object, on_failure: str) -> None:
    """Raise ConfigurationError unless a rank can keep a copy of another's residual; local."""
    check_whole("mirror", mirror, 1)
    if on_failure != SHRINK:
        raise ConfigurationError(f'mirror is of use with on_failure="shrink" alone, got {on_failure!r}; leave it out')
    threads = "" if exchange.threaded else "it needs an MPI that several threads may call (MPI_THREAD_MULTIPLE)"
    if why := options.unmirrored or threads:
        raise ConfigurationError(f'mirror is not possible with scheme "{scheme}" as it is set: {why}; leave mirror out')


class Survivors:
    """The parts that survive a death together. regrouped: updates everything else that depends on the ranks; collective.

    mirror: the copy of another rank's residual, refreshed within this many steps; None: there are no copies.
    """

    def __init__(self, aggregator: Aggregator, options: Options, mirror: int | None, regrouped: Callable[[], None]) -> None:
        self.aggregator, self.options, self.regrouped = aggregator, options, regrouped
        self.exchange = exchange = aggregator.parts.exchange
        self.formed = exchange.rank, exchange.size  # for which the parts were made
        works = aggregator.works
        self.mirror = None if mirror is None else Mirror(exchange, works, mirror)
        self.survival = Survival(exchange, self._rebuild, aggregator.carriers, aggregator.quiet)
        self.delivery = CommittedDelivery(works, self.survival, aggregator.owing, self.mirror)
        aggregator.survive(self.delivery)

    def _rebuild(self, living: list[int]) -> Callable[[], float]:
        """Prepare to go on with fewer ranks; collective. Called again if a rank dies meanwhile."""
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
        """A notice that includes the norm of this rank's residual; local."""
        return notice._replace(norm=self.delivery.norm())

    def met(self, agree: Callable[[Notice], Bools | None], notice: Notice) -> Bools | None:
        """Agree that all living ranks can go on; collective. Only the first attempt compares replicas."""

        def attempt(again: bool) -> Bools | None:
            if self.mirror is not None:
                self.mirror.arrive()
            return agree(notice._replace(digest=0) if again else notice)

        return self.survival.until_met(attempt)

    def ended(self, used: Bools | None, details: dict[str, Any]) -> Bools | None:
        """Called when a step is done; local, on all ranks. Returns which parameters had a gradient on some living rank.

        used: the result of the step's first roll call. details: the details of the statistics, to which this adds.
        """
        if self.mirror is not None:
            self.mirror.refresh()
            details["mirror_bytes"] = float(self.delivery.mirrored)
        return self.delivery.used(used)

    def restart(self) -> None:
        """Called when all ranks have changed their residuals; local, on all ranks."""
        if self.mirror is not None:
            self.mirror.restart()

    def close(self) -> None:
        """End threads; local."""
        if self.mirror is not None:
            self.mirror.close()
