"""The weights around the steps: the global set moves by late means, the rank's own is corrected and then moves ahead.

At step t the delivery of step t - staleness is published and the optimizer moves the global weights by it. Own weights
that are too far off return to the global ones; then all move by what the rank itself has just sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace

import torch

from mpisparse.arrays import Bools, State
from mpisparse.core.aggregator import Aggregator
from mpisparse.core.records import Delivered, Stats
from mpisparse.core.stages import LateDropped
from mpisparse.core.step import Clock
from mpisparse.errors import ConfigurationError, GradientError
from mpisparse.schemes.companion import Companion, Places
from mpisparse.schemes.speculative.asking import Asking
from mpisparse.schemes.speculative.local import LocalUpdate, check_elementwise
from mpisparse.schemes.speculative.selection import NOTHING, Granular
from mpisparse.schemes.speculative.upgrade import upgraded
from mpisparse.schemes.speculative.weights import Tolerance, TwoSets
from mpisparse.select.own import Chosen, OwnSelection


@dataclass(frozen=True)
class Speculation:
    """What a rank did ahead of the exchange, and how far it was from the global weights.

    updated: elements it moved by its own gradient. fine: the share of layers filtered weight by weight; whole: the number
    of layers taken whole. drift: the largest distance from the global weights, before and after correction; corrected:
    elements that returned to them. in_flight: deliveries in flight. probe_loss: the loss of the last probe.
    """

    updated: int
    fine: float
    whole: tuple[str, ...]
    in_flight: int
    probe_loss: float | None = None
    drift: float = 0.0
    drift_after: float = 0.0
    corrected: int = 0


@dataclass(frozen=True)
class SpeculativeStats(Stats):
    """A step's statistics, with what was done ahead of the exchange."""

    speculation: Speculation = Speculation(0, 0.0, (), 0)


class Speculating(Companion):
    """Two sets of weights, and deliveries that are a fixed number of steps late."""

    idle = False

    def __init__(
        self, aggregator: Aggregator, scorer: Asking, selection: OwnSelection, chooser: Granular,
        places: Places, tolerance: Tolerance,
    ) -> None:  # fmt: skip
        self.aggregator = aggregator
        self.scorer = scorer
        self.selection = selection
        self.chooser = chooser
        self.places = places
        self.tolerance = tolerance
        self.late = aggregator.staleness > 0
        self.exchange = aggregator.parts.exchange
        self.sets: TwoSets | None = None
        self.local: LocalUpdate | None = None
        self._ahead: Chosen | None = None

    # The optimizer

    def check_by_hand(self) -> None:
        if self.late:
            raise GradientError(
                f'r{self.exchange.rank} | scheme "speculative" moves two sets of weights, so that step() alone '
                "will not do: call mpisparse.attach(optimizer, sync) once, and then only optimizer.step()"
            )

    def adopt(self, optimizer: torch.optim.Optimizer, *, scales: bool = False) -> None:
        influence = self.scorer.influence
        if influence is not None and influence.by_update and not self.late:
            check_elementwise(optimizer)
            influence.preview = LocalUpdate(self.places, optimizer).preview
        if not self.late or (self.sets is not None and self.sets.optimizer is optimizer):
            return
        if self.sets is not None:
            raise ConfigurationError('scheme "speculative" holds the state of one optimizer; another is attached already')
        check_elementwise(optimizer)
        self.local = LocalUpdate(self.places, optimizer)
        if influence is not None:
            influence.preview = self.local.preview
        self.sets = TwoSets(self.places, optimizer)

    def note_loss(self, loss: float) -> None:
        self.scorer.noted = loss

    # A step

    def begin(self) -> None:
        if self.sets is not None and self.sets.swapped:
            raise RuntimeError(
                f"r{self.exchange.rank} | the global weights are in the model: optimizer.step() was called inside "
                "global_weights(), or the last one did not end"
            )

    def published(self, delivered: Delivered | None, stats: Stats, *, sound: bool) -> Stats:
        """Put the global weights into the model for the optimizer to move."""
        chosen = self.selection.chosen
        filtered = chosen.lesson or NOTHING
        self._ahead = chosen if sound else None
        if delivered is not None and self.sets is not None:
            self.sets.swap()
        probed, fine = self.scorer.probe_loss, filtered.fine
        flight = self.aggregator.works.flight
        ahead = Speculation(
            updated=len(chosen.index) if self.late else 0,
            fine=sum(fine) / len(fine),
            whole=filtered.whole,
            in_flight=0 if flight is None else len(flight),
            probe_loss=None if math.isnan(probed) else probed,
        )
        known = {field.name: getattr(stats, field.name) for field in fields(Stats)}
        known |= {"threshold": filtered.threshold, "borders": (), "set_density": stats.set_density}
        return SpeculativeStats(**known, speculation=ahead)

    def finish(self, stats: Stats) -> Stats:
        """Correct the rank's own weights after the optimizer has moved the global ones, and move them ahead."""
        if self.sets is None or self.local is None or self._ahead is None:
            return stats
        clock = Clock(dict(stats.seconds))
        if self.sets.swapped:
            self.sets.swap()
        drift = self.sets.correct(self.tolerance)
        clock.lap("correct")
        self.local.apply(self._ahead.index, self._ahead.values)
        clock.lap("speculate")
        self._ahead = None
        assert isinstance(stats, SpeculativeStats)
        done = replace(
            stats.speculation, drift=drift.before, drift_after=drift.after, corrected=drift.corrected
        )  # fmt: skip
        return replace(stats, speculation=done, seconds=clock.seconds)

    # Between steps

    def drain(self) -> Iterator[Bools | None]:
        if self.sets is None:
            return
        inside = RuntimeError("synchronize() inside global_weights(): leave the block first") if self.sets.swapped else None
        self.exchange.raise_together(inside, RuntimeError)
        self.draining = True
        try:
            for delivered in self.aggregator.arrivals():
                self.sets.swap()
                yield delivered.used
                self.sets.optimizer.step()
                self.sets.swap()
        finally:
            self.draining = False
        self.sets.synchronize()

    def global_weights(self) -> AbstractContextManager[None]:
        return self.sets.global_in_place() if self.sets is not None else nullcontext()

    def replicated(self) -> Sequence[torch.Tensor] | None:
        return None if self.sets is None else self.sets.weights

    def hold(self, frozen: Sequence[bool]) -> None:
        """Filter only among layers that are not frozen; in frozen ones, own weights become the global ones."""
        slots = zip(self.places.slots, frozen, strict=True)
        self.chooser.filter.layers = [slot for slot, is_frozen in slots if slot.end > slot.begin and not is_frozen]
        if self.sets is not None and not self.sets.swapped:
            self.sets.synchronize([i for i, is_frozen in enumerate(frozen) if is_frozen])

    # State

    def state(self) -> State:
        return {"own": None if self.sets is None else self.sets.own()}

    def upgraded(self, state: State) -> State:
        dropped = any(isinstance(stage, LateDropped) for stage in self.aggregator.works.stages)
        return upgraded(state, late=self.late, keeps=not dropped)

    def check(self, state: State) -> None:
        if (self.sets is None) != (state["own"] is None):
            raise ConfigurationError("attach the optimizer before the state is saved and before it is loaded")
        if self.sets is not None:
            self.sets.check(state["own"])

    def load(self, state: State) -> None:
        if self.sets is not None:
            self._check_global(state["own"]["digest"])
            self.sets.load(state["own"])
        self._ahead = None

    def _check_global(self, digest: int) -> None:
        """Raise on all ranks unless the model holds the global weights that belong to a state."""
        assert self.sets is not None
        error = None
        if self.sets.held() != digest:
            error = ConfigurationError(
                "the model does not hold the global weights that this state was saved with; save model and optimizer inside "
                "`with sync.global_weights():`, as checkpoint.save does, and load them before the state"
            )
        self.exchange.raise_together(error)
