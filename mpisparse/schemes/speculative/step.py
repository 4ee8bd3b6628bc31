"""The speculative step: filter, send, go on; take the result that is due, correct, and update ahead of the next.

At step t the parcel of t sets out, the optimizer moves the global weights by the mean of step t - staleness, the rank's own
weights return to them where they are too far off, and then move by what the rank itself has just sent.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpisparse.arrays import Bools, Floats, Ints
from mpisparse.core.agree import BROKEN, FINE, DensityDiffers, FrozenDiffers, Inputs, Overflow, StepRefused
from mpisparse.core.records import Clock, Parts, Region, Speculation, imbalance
from mpisparse.core.step import Stats, Synchronous
from mpisparse.errors import ConfigurationError, GradientError
from mpisparse.schemes.speculative.granularity import Filter, Filtered
from mpisparse.schemes.speculative.inflight import InFlight
from mpisparse.schemes.speculative.influence import Influence, Probe
from mpisparse.schemes.speculative.local import LocalUpdate, check_elementwise
from mpisparse.schemes.speculative.message import Delivery, Parcel, Result, fill
from mpisparse.schemes.speculative.policy import Policy, Seen
from mpisparse.schemes.speculative.weights import Tolerance, TwoSets
from mpisparse.select.pickers import shared_out
from mpisparse.select.scorers import Magnitude

if TYPE_CHECKING:
    from mpisparse.wire.codecs import Codec


@dataclass(frozen=True)
class Rules:
    """How a speculative step goes; see mpisparse.schemes.speculative.options, whose options these are."""

    staleness: int
    tolerance: Tolerance
    compensate: bool
    received: bool
    one_server: bool
    probe_every: int
    timed: bool


@dataclass(frozen=True)
class _Ahead:
    """What this rank will move by itself when the optimizer is done."""

    index: Ints
    sent: Floats
    filtered: Filtered


@dataclass(frozen=True)
class _Told:
    """What this rank knows of its loss and how sure it is, NaN where nothing; trouble: what went wrong in asking."""

    loss: float = math.nan
    confidence: float = math.nan
    trouble: str = ""


class SpeculativeStep(Synchronous):
    """Two sets of weights, and results that are a fixed number of steps late."""

    def __init__(
        self, parts: Parts, rules: Rules, *, codec: Codec, influence: Influence, filter_: Filter, policy: Policy,
        probe: Probe | None, confidence: Callable[[], float] | None,
    ) -> None:  # fmt: skip
        self.parts = parts
        self.acc = parts.acc
        self.scorer = Magnitude(parts.residual, parts.backend)
        self.rules = rules
        self.codec = codec
        self.influence = influence
        self.filter = filter_
        self.policy = policy
        self.probe = probe
        self.confidence = confidence
        self.deferred = rules.staleness > 0
        self.step = 0
        self.regions = self._even_regions()
        exchange = parts.exchange.polling() if self.deferred else parts.exchange
        delivery = Delivery(exchange, parts.backend, codec, received=rules.received)
        self.flight = InFlight(delivery, rules.staleness, threaded=self.deferred and exchange.threaded)
        self.sets: TwoSets | None = None
        self.local: LocalUpdate | None = None
        self._ahead: _Ahead | None = None
        self._used: Bools | None = None
        self._noted = self._probe_loss = math.nan
        self._cause: Exception | None = None
        self._began = time.perf_counter()

    # The optimizer

    def check_by_hand(self) -> None:
        if self.deferred:
            raise GradientError(
                f'r{self.parts.exchange.rank} | scheme "speculative" moves two sets of weights, so that step() alone '
                "will not do: call mpisparse.attach(optimizer, sync) once, and then only optimizer.step()"
            )

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.deferred or (self.sets is not None and self.sets.optimizer is optimizer):
            return
        if self.sets is not None:
            raise ConfigurationError('scheme "speculative" holds the state of one optimizer; another is attached already')
        check_elementwise(optimizer)
        self.local = LocalUpdate(self.parts.layout, optimizer)
        self.sets = TwoSets(self.parts.layout, optimizer)

    def note_loss(self, loss: float) -> None:
        self._noted = loss

    # A step

    def run(self, inputs: Inputs, clock: Clock) -> Stats:
        """Send this step's parcel and publish the mean that is due; collective over `staleness` steps."""
        if self.sets is not None and self.sets.swapped:
            raise RuntimeError(
                f"r{self.parts.exchange.rank} | the global weights are in the model: optimizer.step() was called inside "
                "global_weights(), or the last one did not end"
            )
        if inputs.trouble:
            return self._say(inputs, clock)
        self.scorer.accumulate(inputs, 0, 0, 0.0)
        clock.lap("accumulate")
        told = self._ask(inputs)
        clock.lap("probe")
        filtered = self._filter(inputs)
        clock.lap("select")
        parcel = self._parcel(inputs, filtered, told)
        clock.lap("feedback")
        if self.deferred:
            self.flight.send(parcel)
            result = self.flight.due()
        else:
            result = self.flight.delivery.run(parcel)
        clock.lap("wait" if self.deferred else "reduce")
        self.step += 1
        self._take(result)
        clock.lap("publish")
        return self._stats(inputs, result, filtered, clock)

    def _say(self, inputs: Inputs, clock: Clock) -> Stats:
        """This rank cannot go on: send only why, and move nothing until all ranks hear of it in the same step."""
        nothing = Filtered(np.empty(0, dtype=np.int64), 0.0, (True,), ())
        parcel = self._parcel(inputs, nothing, _Told(trouble=inputs.trouble))
        self._ahead = None
        self.flight.send(parcel)
        result = self.flight.due()
        self.step += 1
        if result is not None:
            self._refuse(result)
        self._take(None)
        return self._stats(inputs, None, nothing, clock)

    def used(self) -> Bools | None:
        return self._used

    def finish(self, stats: Stats) -> Stats:
        """The optimizer has moved the global weights: correct the rank's own, and move them ahead."""
        if self.sets is None or self.local is None or self._ahead is None:
            return stats
        clock = Clock(dict(stats.seconds))
        if self.sets.swapped:
            self.sets.swap()
        drift = self.sets.correct(self.rules.tolerance)
        clock.lap("correct")
        self.local.apply(self._ahead.index, self._ahead.sent)
        clock.lap("speculate")
        self._ahead = None
        assert stats.speculation is not None
        done = replace(
            stats.speculation, drift=drift.before, drift_after=drift.after, corrected=drift.corrected
        )  # fmt: skip
        return replace(stats, speculation=done, seconds=clock.seconds)

    def _ask(self, inputs: Inputs) -> _Told:
        """The user's functions for loss and confidence; an error in one of them is this rank's, to be told to all."""
        noted, self._noted = self._noted, math.nan
        if inputs.status != FINE:
            return _Told()
        asked = "probe"
        try:
            with self.parts.exchange.place.exempt("probing"):
                probed = self._look()
                asked = "confidence"
                return _Told(probed if math.isnan(noted) else noted, self._confidence(noted))
        except Exception as caught:
            self._cause, inputs.status = caught, BROKEN
            return _Told(trouble=f"{asked}(): {type(caught).__name__}: {caught}")

    def _look(self) -> float:
        """Probe the loss around the weights if it is time; NaN if it is not."""
        if self.probe is None or self.step % self.rules.probe_every:
            return math.nan
        self._probe_loss, diagonal = self.probe.run(self.step, self.parts.exchange.rank)
        self.influence.learn(diagonal)
        return self._probe_loss

    def _filter(self, inputs: Inputs) -> Filtered:
        share = self.policy.share(self.step)
        if inputs.status != FINE:
            return Filtered(np.empty(0, dtype=np.int64), 0.0, (True,), ())
        self.influence.update(self.acc)
        return self.filter.run(self.influence.scores, inputs.k, share, self.step)

    def _parcel(self, inputs: Inputs, filtered: Filtered, told: _Told) -> Parcel:
        """Encode what passed; what was not sent of it stays in the accumulator."""
        index, backend = filtered.index, self.parts.backend
        values = np.empty(len(index), dtype=np.float32)
        backend.take(self.acc, index, values)
        sent = values.copy()
        counts, payloads = fill(backend, self.codec, self.regions, index, values)
        sent -= values
        backend.put(self.acc, index, values)
        if not self.rules.compensate:
            self.acc.fill(0.0)
        self._ahead = _Ahead(index, sent, filtered)
        now = time.perf_counter()
        seconds, self._began = now - self._began if self.rules.timed else 0.0, now
        return Parcel(
            self.step, inputs.status, inputs.detail, inputs.k, ~inputs.unused, told.loss, told.confidence, seconds,
            self.regions, counts, payloads, told.trouble, inputs.frozen,
        )  # fmt: skip

    def _confidence(self, noted: float) -> float:
        """By the callable, or exp(-loss) of the last probe, or of what was noted; NaN where nothing is known."""
        if self.confidence is not None:
            return float(self.confidence())
        loss = noted if math.isnan(self._probe_loss) else self._probe_loss
        return math.exp(-max(0.0, loss)) if not math.isnan(loss) else math.nan

    def _take(self, result: Result | None) -> None:
        """Publish a mean for the global weights, learn from it, and have them in the model."""
        published, backend = self.parts.published, self.parts.backend
        published.clear()
        if result is None:
            self._used = np.zeros(len(self.parts.layout.slots), dtype=bool)
            return
        self._refuse(result)
        index, mean = self._let_wait(result.index, result.mean.copy())
        if published.write(index, mean):
            backend.add_at(self.acc, index, mean)
        if self.rules.compensate and len(result.left_index):
            backend.add_at(self.acc, result.left_index, result.left)
        self._used = result.used
        if not self.rules.one_server:
            self.regions = shared_out(result.index, len(self.acc), self.parts.exchange.size)
        loss, confidence = (None if math.isnan(x) else x for x in (result.loss, result.confidence))
        self.policy.learn(Seen(result.step, loss, confidence, result.nbytes, result.seconds))
        if self.sets is not None:
            self.sets.swap()

    def _let_wait(self, index: Ints, mean: Floats) -> tuple[Ints, Floats]:
        """What of a mean may move; that of parameters frozen since it was sent goes to the accumulators, the same on all."""
        frozen = self.parts.layout.waits(index)
        if not frozen.any():
            return index, mean
        self.parts.backend.add_at(self.acc, index[frozen], mean[frozen])
        return index[~frozen], mean[~frozen]

    def _refuse(self, result: Result) -> None:
        """Raise, on all ranks alike, what kept a result from coming about."""
        if result.failure:
            raise GradientError(
                f"r{self.parts.exchange.rank} | step {result.step} failed {result.failure}; load a saved state"
            ) from self._cause
        if result.refused:
            raise StepRefused(result.refused)
        if len(set(result.frozen)) > 1:
            raise FrozenDiffers
        if len(set(result.ks)) > 1:
            raise DensityDiffers(list(result.ks))
        if result.overflow >= 0:
            raise Overflow(result.overflow)

    def _stats(self, inputs: Inputs, result: Result | None, filtered: Filtered, clock: Clock) -> Stats:
        n = len(self.acc)
        ahead = Speculation(
            updated=len(filtered.index) if self.deferred else 0,
            fine=sum(filtered.fine) / len(filtered.fine),
            whole=filtered.whole,
            in_flight=len(self.flight),
            probe_loss=None if math.isnan(self._probe_loss) else self._probe_loss,
        )
        stats = Stats(
            step=self.step - 1,
            density=0.0,
            set_density=inputs.k / n,
            selected=0,
            threshold=filtered.threshold,
            bytes_sent=0,
            bytes_received=0,
            imbalance=0.0,
            seconds=clock.seconds,
            speculation=ahead,
        )
        if result is None:
            return stats
        return replace(
            stats,
            density=len(result.index) / n,
            selected=len(result.index),
            bytes_sent=result.nbytes_sent,
            bytes_received=result.nbytes_received,
            imbalance=imbalance(result.workloads),
            workloads=tuple(result.workloads.tolist()),
            sent_density=len(result.index) / n,
        )

    def _even_regions(self) -> list[Region]:
        """Who sums what before anything is known of where it lies: all alike, or rank 0 everything."""
        n, size = len(self.acc), self.parts.exchange.size
        cuts = [n] * (size - 1) if self.rules.one_server else [p * n // size for p in range(1, size)]
        bounds = [0, *cuts, n]
        return [Region(p, bounds[p], bounds[p + 1]) for p in range(size)]

    # Beside the steps

    def drain(self) -> Iterator[Bools | None]:
        if self.sets is None:
            return
        inside = RuntimeError("synchronize() inside global_weights(): leave the block first") if self.sets.swapped else None
        self.parts.exchange.raise_together(inside, RuntimeError)
        self.draining = True
        try:
            while (result := self.flight.oldest()) is not None:
                self._take(result)
                yield self._used
                self.sets.optimizer.step()
                self.sets.swap()
        finally:
            self.draining = False
        self.sets.synchronize()

    def global_weights(self) -> AbstractContextManager[None]:
        return self.sets.global_in_place() if self.sets is not None else nullcontext()

    def freeze(self) -> None:
        """Filter among the layers that may move; of the others the rank's own weights become the global ones."""
        frozen = [not p.requires_grad for p in self.parts.layout.params]
        slots = zip(self.parts.layout.slots, frozen, strict=True)
        self.filter.layers = [slot for slot, is_frozen in slots if slot.end > slot.begin and not is_frozen]
        if self.sets is not None and not self.sets.swapped:
            self.sets.synchronize([i for i, is_frozen in enumerate(frozen) if is_frozen])

    def memories(self) -> dict[str, Any]:
        bend = {"curvature": self.influence.curvature} if self.influence.probes else {}
        return {"influence": self.influence.scores, **bend}

    def close(self) -> None:
        self.flight.close()
        if self.deferred:
            self.flight.delivery.exchange.close()

    # State

    def state(self) -> dict[str, Any]:
        """What the next step depends on beside the residual and the global weights, with what is in flight, once here."""
        return {
            "step": self.step,
            **self.influence.state(),
            "borders": [region.lo for region in self.regions],
            "policy": self.policy.state(),
            "probe_loss": self._probe_loss,
            "noted": self._noted,
            "flight": [result.state() for result in self.flight.results()],
            "own": None if self.sets is None else self.sets.own(),
        }

    def check(self, state: dict[str, Any]) -> None:
        """Raise ConfigurationError unless load() could take the state."""
        int(state["step"])
        float(state["probe_loss"])
        float(state["noted"])
        self.influence.check(state)
        self.policy.check(state["policy"])
        for packed in state["flight"]:
            index = Result.of(packed).index
            if len(index) and not 0 <= int(index[0]) <= int(index[-1]) < len(self.acc):
                raise ConfigurationError("a result in flight in the state is not of this model")
        if (self.sets is None) != (state["own"] is None):
            raise ConfigurationError("attach the optimizer before the state is saved and before it is loaded")
        if self.sets is not None:
            self.sets.check(state["own"])

    def load(self, state: dict[str, Any]) -> None:
        """Take what state() gave; the model and the optimizer hold the global weights and their state. Collective."""
        if self.sets is not None:
            self._check_global(state["own"]["digest"])
            self.sets.load(state["own"])
        self.step = int(state["step"])
        self.influence.load(state)
        self.policy.load(state["policy"])
        self._probe_loss, self._noted = float(state["probe_loss"]), float(state["noted"])
        self._ahead = self._cause = None
        self.flight.replace([Result.of(packed) for packed in state["flight"]])
        n, size, borders = len(self.acc), self.parts.exchange.size, [int(lo) for lo in state["borders"]]
        if len(borders) == size:
            self.regions = [Region(p, lo, hi) for p, (lo, hi) in enumerate(zip(borders, [*borders[1:], n], strict=True))]
        else:
            self.regions = self._even_regions()

    def _check_global(self, digest: int) -> None:
        """Raise on all ranks unless the model holds the global weights that belong to a state."""
        assert self.sets is not None
        error = None
        if self.sets.held() != digest:
            error = ConfigurationError(
                "the model does not hold the global weights that this state was saved with; save model and optimizer inside "
                "`with sync.global_weights():`, as checkpoint.save does, and load them before the state"
            )
        self.parts.exchange.raise_together(error)
