"""The aggregator: one flat vector in, its mean over ranks out. No model, no optimizer, no torch gradient.

A step is three calls over frozen records: prepare (local), deliver (collective), apply (local). `step` does all three.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpisparse.arrays import Bools, Floats, State
from mpisparse.backends.flat import Pieces, Slot, pieces_of
from mpisparse.comm.agreement import BROKEN, Notice, Refusal
from mpisparse.comm.inflight import ONE_THREAD, InFlight
from mpisparse.comm.roll_call import meet
from mpisparse.core import flights, step
from mpisparse.core.records import Arrived, Delivered, Outgoing, Parts, Stats, Works
from mpisparse.core.refusals import Names, explain
from mpisparse.core.stages import Stage
from mpisparse.core.state import merge_residuals, sources
from mpisparse.core.step import Clock
from mpisparse.core.survive import reform
from mpisparse.core.survive_late import CommittedFlight
from mpisparse.errors import GradientError
from mpisparse.select.partition import imbalance
from mpisparse.select.plans import Selection
from mpisparse.select.scorers import Scorer
from mpisparse.select.view import read_only
from mpisparse.wire.reduction import Reducer

if TYPE_CHECKING:
    from mpisparse.comm.exchange import Exchange
    from mpisparse.core.survive import CommittedDelivery

Agree = Callable[[Works, Notice, step.Clock, step.Peek | None], Bools | None]
Make = Callable[[Parts], tuple[Selection, Reducer]]
Run = Callable[[Works, Pieces | None, Notice, step.Clock], Delivered | None]

ADVICE = "look for what made it so, or clip"


class Aggregator:
    """Averages one flat vector over ranks, keeping what was not sent for later steps.

    staleness: steps from sending to applying; 0 applies at once. In flight, deliveries use a communicator of their own.
    density: share of the elements that step() sends unless it is given k. last: the statistics of the last step().
    density_of: the density of a step, from its number and the set density.
    undoes: a refused step changes nothing, even if its gradients were added before the refusal.
    """

    undoes = False
    agreement: Agree = staticmethod(step.agree)  # checks that all ranks can do a step
    one_step: Run = staticmethod(step.run)  # does it
    density_of: Callable[[int, float], float] = staticmethod(lambda number, density: density)

    def __init__(
        self, parts: Parts, *, scorer: Scorer, selection: Selection, reducer: Reducer, stages: Sequence[Stage],
        staleness: int = 0,
    ) -> None:  # fmt: skip
        self.parts = parts
        acc = parts.acc
        seen = read_only(acc)
        take = scorer.take or functools.partial(parts.backend.values_at, seen)
        self.works = Works(
            exchange=parts.exchange, backend=parts.backend, carrier=parts.carrier(late=staleness > 0), acc=acc, seen=seen,
            take=take, scorer=scorer, selection=selection, reducer=reducer, stages=tuple(stages), sink=parts.sink,
            held=parts.held,
        )  # fmt: skip
        self.staleness = staleness
        self.density = 1.0
        self.last: Stats | None = None
        self._damaged = ""
        self._scale()
        self._polling = parts.exchange.polling() if staleness else None
        if self._polling is not None:
            carry = functools.partial(step.deliver_late, self._polling, self.works.carrier)
            self.works.flight = InFlight(carry, staleness, threaded=self._polling.threaded)
            _warn(self._polling, staleness)

    # A step

    def step(self, vector: torch.Tensor, k: int | None = None) -> torch.Tensor:
        """Average k elements of a float32 vector over ranks (None: as many as the density asks for). Collective.

        Returns the mean, zero where nothing was sent; the next step overwrites it. In flight it is the mean of an earlier
        step, zero in the first steps, and an error of this step is raised in a later one.
        """
        self.check_sound()
        wanted = self.k if k is None else k
        trouble = _misfit(vector, wanted, len(self.works.acc)) or self.ready(_no_lap)
        unused = np.zeros(len(self.parts.slots), dtype=bool)
        notice = Notice(self.k, unused, BROKEN, trouble=trouble) if trouble else Notice(wanted, unused)
        clock = Clock()
        with self.in_words(lambda _: "the vector", added=False):
            self.agree(notice, clock, None if trouble else pieces_of(vector.contiguous()))
        with self.in_words(lambda _: "the vector", added=True):
            self.run(None if trouble else pieces_of(vector.contiguous()), notice, clock)
        return self.parts.sink.published()

    def run(self, pieces: Pieces | None, notice: Notice, clock: Clock) -> None:
        """Do what follows the agreement of a step; collective."""
        number = self.number
        delivered = self.one_step(self.works, pieces, notice._replace(step=number), clock)
        self.last = self.stats(number, notice, delivered, clock.seconds, step.details_of(self.works))

    def check_sound(self) -> None:
        """Raise if an earlier error has damaged the residual."""
        if self._damaged:
            raise GradientError(
                f"r{self.parts.exchange.rank} | the residual is damaged since an earlier error ({self._damaged}); "
                "load a saved state"
            )

    @contextlib.contextmanager
    def in_words(self, name_at: Names, *, added: bool) -> Iterator[None]:
        """Raise a refusal as an error with the user's names. `added`: gradients were added before it."""
        try:
            yield
        except Refusal as refusal:
            late_step = self.applied if self.staleness else None
            error, damage = explain(refusal, self.parts.exchange, name_at, "", late_step, advice=ADVICE)
            self._damaged = (damage or "a step was refused after its vector was added") if added else ""
            raise error from (refusal.__cause__ or self.cause)

    def ready(self, lap: Callable[[str], None]) -> str:
        """Wait for what a step needs of this rank alone; return why it cannot go on, or an empty text. Local."""
        return self.works.scorer.ready(self.parts.exchange.place.exempt, lap)

    def agree(self, notice: Notice, clock: Clock, pieces: Pieces | None = None) -> Bools | None:
        """Raise on all ranks if any cannot go on; in flight that is part of the delivery. Collective.

        pieces: what will be added, if it is known. Returns which parameters had a gradient on some rank; None: all.
        """
        peek = None if pieces is None else step.peeking(self.works, pieces)
        return self.agreement(self.works, notice._replace(step=self.number), clock, peek)

    def add(self, i: int, slot: Slot, grad: torch.Tensor) -> int:
        """Add one piece before the step; return a flat index whose sum is not finite, or -1. Local."""
        return self.works.scorer.add(i, slot, grad)

    def prepare(self, pieces: Pieces | None, notice: Notice, clock: Clock | None = None) -> Outgoing:
        """Add up the vector (None: it was added before) and collect candidates; local."""
        return step.prepare(self.works, pieces, notice, clock or Clock())

    def deliver(self, outgoing: Outgoing, clock: Clock | None = None) -> Delivered:
        """Agree on what is sent and average it over ranks. Touches only its arguments. Collective."""
        return step.deliver(self._polling or self.works.exchange, self.works.carrier, outgoing, clock or Clock())

    def apply(self, arrived: Arrived | None, clock: Clock | None = None) -> Delivered | None:
        """Keep what was not sent, adapt, publish the mean; local."""
        clock = clock or Clock()
        delivered = step.settle(self.works, arrived, clock)
        step.publish(self.works, delivered, clock)
        return delivered

    def recall(self, apart: str = "") -> None:
        """Undo a refused step; here nothing was added yet, so there is nothing to undo."""

    def kept(self, *, copy: bool = True) -> torch.Tensor:
        """The residual as it is between steps; copy=False: the live one, if that is the same."""
        return self.residual.clone() if copy else self.residual

    def stats(
        self, number: int, notice: Notice, delivered: Delivered | None, seconds: dict[str, float], details: dict[str, float]
    ) -> Stats:
        """What a step did, from what step.run returned."""
        n = len(self.works.acc)
        stats = Stats(
            step=number, density=0.0, set_density=notice.k / n, selected=0, threshold=0.0, bytes_sent=0, bytes_received=0,
            imbalance=0.0, seconds=seconds, details=details,
        )  # fmt: skip
        if delivered is None:
            return stats
        due, index, selected = delivered.due, delivered.reduced.index, delivered.selected
        return replace(
            stats,
            density=selected / n,
            set_density=(notice.k if due.k is None else due.k) / n,
            selected=selected,
            threshold=due.threshold,
            bytes_sent=delivered.nbytes_sent,
            bytes_received=delivered.nbytes_received,
            control_bytes=delivered.nbytes_control,
            index_bytes=delivered.index_nbytes,
            index_form=delivered.index_form,
            collectives=delivered.collectives,
            imbalance=imbalance(due.workloads),
            reselected=due.reselected,
            refined=due.refined,
            workloads=tuple(int(due.workloads[r.rank]) for r in due.regions),
            borders=(*(r.lo for r in due.regions), n) if due.regions else (),
            sent_density=len(index) / n,
        )

    def arrivals(self) -> Iterator[Delivered]:
        """Wait for what is in flight and apply it, one delivery after the other; collective."""
        while self.works.flight is not None and (arrived := self.works.flight.oldest()) is not None:
            delivered = self.apply(arrived)
            assert delivered is not None
            yield delivered

    # Properties, and settings that change midway

    @property
    def nbytes_in_flight(self) -> int:
        """Bytes received by deliveries that are not applied yet, and so in no step's statistics; waits for them."""
        results = [] if self.works.flight is None else self.works.flight.results()
        return sum(each.nbytes_received for each in results if isinstance(each, Delivered))

    @property
    def number(self) -> int:
        """The number of steps done."""
        return self.works.selection.step + len(self.works.flight or ())

    @property
    def applied(self) -> int:
        """The number of deliveries applied."""
        return self.works.selection.step

    @property
    def cause(self) -> Exception | None:
        """The exception behind the last report of ready()."""
        return self.works.scorer.cause

    @property
    def k(self) -> int:
        """The number of elements that the density, or what a scheme makes of it, asks for."""
        density = self.density_of(self.number, self.density)
        return max(1, math.floor(min(1.0, density * self.works.k_scale) * self.works.held.remaining + 1e-6))

    @property
    def residual(self) -> torch.Tensor:
        """This rank's accumulator: what was added and not sent yet."""
        return self.parts.residual

    def restore(self, residual: torch.Tensor) -> None:
        """Restore a saved `residual`; collective."""
        self.parts.residual.copy_(residual)

    @property
    def observes(self) -> bool:
        """Tell whether observed metrics change anything."""
        return any(stage.observes for stage in self.works.stages)

    def observe(self, metric: float) -> None:
        """Note a metric, the same on all ranks; larger is better."""
        self.works.stages = tuple(stage.observe(metric) for stage in self.works.stages)
        self._scale()

    def _scale(self) -> None:
        """Update the factor on the set density from the stages."""
        self.works.k_scale = math.prod(stage.k_scale for stage in self.works.stages)

    def hold(self) -> None:
        """The held elements (parts.held) have changed: stages give up what they still had to send of them."""
        works = self.works
        works.stages = tuple(stage.hold(works.backend, works.acc, works.held) for stage in works.stages)

    def memories(self) -> dict[str, Any]:
        """Further vectors, besides the accumulator, that elements are selected by."""
        return self.works.scorer.memories()

    # Going on when another rank dies

    @property
    def carriers(self) -> list[Exchange]:
        """The exchanges that threads use."""
        return [] if self._polling is None else [self._polling]

    def quiet(self) -> None:
        """Wait until no thread delivers anything; local."""
        if self.works.flight is not None:
            self.works.flight.quiet()

    def survive(self, delivery: CommittedDelivery) -> None:
        """Commit every delivery from now on."""
        works, before = self.works, self.works.flight
        if before is None:
            works.carry = delivery
        else:
            threaded = before.thread is not None
            works.flight = CommittedFlight(before.carry, before.staleness, delivery.survival, threaded=threaded)
            before.close()

    def owing(self, lo: int, hi: int) -> Floats:
        """This rank's residual in [lo, hi), to be read before anything changes it; local."""
        return self.works.scorer.owing(lo, hi)

    def regrouped(self, make: Make, rank: int, size: int) -> Callable[[], None]:
        """Prepare to go on among fewer ranks; collective. Changes nothing; returns the local function that does.

        make: builds the parts that depend on the number of ranks. rank, size: this rank and the number of ranks before.
        """
        return reform(self.works, *make(self.parts), rank, size)

    def close(self) -> None:
        """End threads and free communicators, that of the parts too; collective."""
        exchange = self.parts.exchange
        if exchange.is_open and not exchange.gone:
            meet(exchange, "close")
        self.works.scorer.close()
        if self.works.flight is not None:
            self.works.flight.close()
        if not exchange.gone:
            self._free()
        exchange.close()

    def _free(self) -> None:
        """Free communicators beside that of the parts; collective."""
        if self._polling is not None:
            self._polling.close()

    # State: each part knows its own keys

    def state(self) -> State:
        """What the next step depends on besides the residual. Waits for deliveries in flight."""
        works = self.works
        state = {**works.selection.state(), **works.scorer.state(), **works.reducer.state()}
        for stage in works.stages:
            state |= stage.state()
        if works.flight is not None:
            state["flight"] = [flights.pack(works.selection, works.reducer, d) for d in works.flight.results()]
            state["waiting"] = None if works.waiting is None else works.selection.packed(works.waiting)
        return state

    def upgraded(self, state: State) -> State:
        """Translate what an earlier version saved."""
        for stage in self.works.stages:
            state = stage.upgraded(state)
        return {**self.works.selection.added, **state}

    def check(self, state: State) -> None:
        """Raise ConfigurationError unless load() could take the state."""
        n = len(self.works.acc)
        self.works.selection.check(state)
        self.works.scorer.check(state)
        self.works.reducer.check(state)
        for stage in self.works.stages:
            stage.check(state, n)
        for packed in state.get("flight", ()):
            flights.check(self.works.selection, self.works.reducer, packed, *self._shape)
        if state.get("waiting") is not None:
            flights.check_agreed(self.works.selection, state["waiting"], *self._shape)

    def fitted(self, state: State, residual: torch.Tensor) -> tuple[State, torch.Tensor]:
        """A state and residual that passed check(), as load() and restore() take them; collective."""
        return state, residual

    def load(self, state: State) -> None:
        """Load a state that state() returned; the caller loads the residual."""
        works, self._damaged = self.works, ""
        works.selection.load(state)
        works.scorer.load(state)
        works.reducer = works.reducer.loaded(state)
        works.stages = tuple(stage.loaded(state) for stage in works.stages)
        self._scale()
        if works.flight is not None:
            arrived = [flights.unpack(works.selection, works.reducer, packed, *self._shape) for packed in state["flight"]]
            works.flight.replace(arrived)
            packed = state.get("waiting")
            works.waiting = None if packed is None else flights.unpack_agreed(works.selection, packed, *self._shape)

    def own(self, state: State) -> State:
        """The part of a state that belongs to `works`."""
        return state

    def with_own(self, state: State, more: State) -> State:
        """The state with other values for `works`."""
        return {**state, **more}

    @property
    def _shape(self) -> tuple[int, int]:
        """The numbers of elements and of ranks."""
        return len(self.works.acc), self.works.exchange.size

    def resize(
        self, states: Mapping[int, State], residuals: Mapping[int, Floats], old: int, new: int, rank: int
    ) -> tuple[State, Floats]:
        """This rank's state and residual among `new` ranks, from those of the `old` ranks in sources().

        What a part still has to send goes to the residuals first, which are changed in place.
        """
        works, rested = self.works, {}
        for source, state in states.items():
            state = works.reducer.at_rest(self.upgraded(state), residuals[source], source, old)
            for stage in works.stages:
                state = stage.at_rest(state, residuals[source])
            if "flight" in state:
                state = flights.bring_home(state, works.reducer, residuals[source])
            rested[source] = state
        taken = [rested[source] for source in sources(old, new, rank)]
        merged = {**taken[0], **works.selection.resize(taken), **works.scorer.resize(taken), **works.reducer.resize(taken)}
        for stage in works.stages:
            merged |= stage.resize(taken)
        return merged, merge_residuals(residuals, old, new, rank)


def _warn(exchange: Exchange, staleness: int) -> None:
    """Warn on rank 0 if nothing can overlap the next step, and why; never for virtual workers."""
    if exchange.size > 1 and exchange.rank == 0 and not (exchange.threaded or exchange.virtual):
        warnings.warn(f"staleness={staleness}: {ONE_THREAD}, so nothing overlaps; results are the same", stacklevel=4)


def _misfit(vector: object, k: object, n: int) -> str:
    """Return why a vector or a number of elements is not accepted, or an empty text."""
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= n:
        return f"k must be a whole number from 1 to {n}, got {k!r}"
    if not isinstance(vector, torch.Tensor):
        return f"step() expects a flat float32 tensor of {n} elements on the CPU, got {type(vector).__name__}"
    fits = vector.shape == (n,) and vector.dtype is torch.float32 and vector.layout is torch.strided
    if fits and vector.device.type == "cpu":
        return ""
    kind = f"{str(vector.dtype).removeprefix('torch.')}, {str(vector.layout).removeprefix('torch.')}"
    return (
        f"step() expects a flat float32 tensor of {n} elements on the CPU, got one of shape {list(vector.shape)} "
        f"({kind}) on {vector.device}; convert it first"
    )


def _no_lap(phase: str) -> None:
    """Ignore a lap of the clock."""
