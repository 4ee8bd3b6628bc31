"""One flat vector in buckets, each with its own aggregator, so that a bucket can be sent before the others are ready.

    send      local       accumulate a bucket's gradient and start its delivery; a thread delivers one bucket after the other
    one_step  collective  send the remaining buckets, wait for all, and apply them
    recall    collective  give the step up: restore everything as it was before the first bucket was sent

Nothing of a step is applied or written where the optimizer reads before all buckets have arrived and no rank has refused
one. A copy of each bucket's accumulator is kept until then. Buckets are sent in the same order on all ranks and in all
steps, so the time at which one is sent changes no result.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpisparse.arrays import Floats, State
from mpisparse.backends.flat import Pieces
from mpisparse.comm.agreement import BROKEN, FINE, Notice
from mpisparse.comm.inflight import InFlight
from mpisparse.comm.roll_call import meet
from mpisparse.core import step
from mpisparse.core.aggregator import Aggregator, Make
from mpisparse.core.bucket import Bucket, Build, Parcel, carry
from mpisparse.core.records import Arrived, Delivered, Parts, Refused, Stats, Works
from mpisparse.core.step import Clock
from mpisparse.errors import CollectiveError, ConfigurationError
from mpisparse.select.partition import imbalance

if TYPE_CHECKING:
    from mpisparse.core.survive import CommittedDelivery

Commit = Callable[[Notice, Callable[[bool], list[Arrived]]], list[Arrived]]


TOTALS = ("selected", "bytes_sent", "bytes_received", "reselected", "refined", "control_bytes", "index_bytes", "collectives")
WEIGHTED = ("density", "threshold", "sent_density")


class Bucketed(Aggregator):
    """An aggregator whose vector travels in buckets; `cuts` are the slots at which they begin, and the number of slots.

    order: the order in which buckets are sent, known after the first step; proposed: the order observed on this rank.
    undoes: a refused step changes nothing, even if gradients were added before. Each bucket selects its share of k elements,
    so ranks that agree on k agree on the share of every bucket.
    """

    undoes = True

    def __init__(self, parts: Parts, cuts: Sequence[int], build: Build) -> None:
        self.parts = parts
        polling = parts.exchange.polling()
        self.buckets = [Bucket(parts, first, last, polling, build) for first, last in pairwise(cuts)]
        one = self.buckets[0].aggregator.works
        self.works = replace(one, exchange=parts.exchange, acc=parts.acc, sink=parts.sink, held=parts.held, stages=())
        self.staleness, self.density, self.last, self._damaged = 0, 1.0, None, ""
        self.total = len(parts.residual)  # elements that all buckets of the coming step select together
        self._polling = polling
        self.order: list[int] = []
        self._order_stands = False  # whether a step was done in this order, so that all ranks have it
        self.proposed: list[int] = []
        self.rounds = 0  # steps done or given up; buckets in flight belong to the present one
        self.in_step = False  # send every bucket in step(), for comparison
        self.early = 0  # buckets of the last step that were sent before step() was called
        self.commit: Commit = lambda notice, attempt: attempt(False)
        delivers = functools.partial(carry, polling, one.carrier)
        self._flight = InFlight(delivers, 0, threaded=polling.threaded, leaves=True)

    # A step

    @property
    def overlaps(self) -> bool:
        """Whether buckets can be in flight while this thread computes."""
        return self._polling is not None and self._polling.threaded and not self.in_step

    def next_out(self) -> int | None:
        """The bucket to send next; None if all are sent, or if the order is not known yet."""
        return next((b for b in self.order if not self.buckets[b].out), None)

    def send(self, number: int, pieces: Pieces | None) -> None:
        """Accumulate the gradient of a bucket and start its delivery; local."""
        bucket = self.buckets[number]
        bucket.keep()
        bucket.out = True
        notice = Notice(self._share(bucket), np.zeros(bucket.last - bucket.first, dtype=bool))
        outgoing = bucket.aggregator.prepare(pieces, notice)
        found = outgoing.notice
        detail = found.detail + (bucket.lo if found.status != FINE else 0)
        row = np.array([found.status, detail, found.k], dtype=np.int64)
        self._flight.send(Parcel(row, bucket.lo, outgoing))

    def _share(self, bucket: Bucket) -> int:
        """A bucket's part of the elements to select, at least one; the parts add up if there is one for each."""
        held, k = self.parts.held, self.total
        return max(1, k * held.below(bucket.hi) // held.remaining - k * held.below(bucket.lo) // held.remaining)

    def one_step(self, works: Works, pieces: Pieces | None, notice: Notice, clock: Clock) -> Any:
        """Send the remaining buckets, wait for all and apply them; collective. Returns their deliveries, in order."""
        assert pieces is not None
        self.total, self.early = notice.k, sum(bucket.out for bucket in self.buckets)
        arrived = self.commit(notice, lambda again: self._all_arrived(pieces, clock))
        self._order_stands = True
        refused = next((each.refusal for each in arrived if isinstance(each, Refused)), None)
        if refused is not None:
            self._restore()
            raise refused
        settled = (
            step.settle(self.buckets[b].aggregator.works, each, clock) for b, each in zip(self.order, arrived, strict=True)
        )
        delivered = [each for each in settled if each is not None]
        self._publish(arrived, delivered)
        self._begin_anew()
        clock.lap("publish")
        return delivered

    def _all_arrived(self, pieces: Pieces, clock: Clock) -> list[Arrived]:
        """Send the remaining buckets, and wait for all; collective. If one raises, everything is as before."""
        if not self.order:
            self._share_order()
        while (number := self.next_out()) is not None:
            self.send(number, self.buckets[number].part_of(pieces))
        clock.lap("accumulate")
        arrived = self._arrived()
        clock.lap("wait")
        error = next((each for each in arrived if isinstance(each, Exception)), None)
        if error is not None:
            self._restore()
            raise error
        return [each for each in arrived if not isinstance(each, Exception)]

    def recall(self, apart: str = "") -> None:
        """Give the step up; nothing of it was applied. Collective, unless ranks are in different calls and cannot go on."""
        if self._polling is None or not self.order:
            self.rounds += 1
            return
        if apart:
            self._polling.gone = apart
        else:
            row = np.array([BROKEN, 0, 0], dtype=np.int64)
            for _ in range(sum(not bucket.out for bucket in self.buckets)):  # other ranks may have sent theirs
                self._flight.send(Parcel(row, 0, None))
        self._arrived()
        self._restore()

    def _arrived(self) -> list[Arrived | Exception]:
        """Wait for all buckets in flight, in order."""
        found: list[Arrived | Exception] = []
        while len(self._flight):
            try:
                found.append(self._flight.oldest())  # type: ignore[arg-type]  # None only where nothing is in flight
            except Exception as error:  # raised at the end of the step
                found.append(error)
        return found

    def _restore(self) -> None:
        for bucket in self.buckets:
            if bucket.out:
                bucket.restore()
        self._begin_anew()

    def _begin_anew(self) -> None:
        for bucket in self.buckets:
            bucket.out = False
        self.rounds += 1

    def _share_order(self) -> None:
        """Adopt rank 0's order; collective."""
        known = self.proposed or list(range(len(self.buckets)))[::-1]
        order = np.array(known, dtype=np.int64)
        self.parts.exchange.broadcast_(order.view(np.uint8))
        self.order = order.tolist()

    def _publish(self, arrived: Sequence[Any], delivered: Sequence[Delivered]) -> None:
        """Write the means of all buckets to the vector's sink; indices are taken as they arrived, on the host."""
        sink, acc, backend = self.parts.sink, self.parts.acc, self.parts.backend
        places = {b: each.reduced.index for b, each in zip(self.order, arrived, strict=True)}
        means: dict[int, Any] = {b: each.reduced.mean for b, each in zip(self.order, delivered, strict=True)}
        if isinstance(places[0], range):
            index, mean, cuts = range(len(acc)), backend.array_of(sink.whole()), [*(b.lo for b in self.buckets), len(acc)]
        else:
            lengths = [len(places[b]) for b in range(len(self.buckets))]
            index = backend.from_host(np.concatenate([places[b] + bucket.lo for b, bucket in enumerate(self.buckets)]))
            mean, cuts = backend.empty(sum(lengths), np.float32), np.cumsum([0, *lengths]).tolist()
        for b, (begin, end) in enumerate(pairwise(cuts)):
            mean[begin:end] = means[b]
        sink.write(index, mean, acc)
        for bucket in self.buckets:
            for stage in bucket.aggregator.works.stages:
                stage.ended(self.parts.backend, bucket.aggregator.works.acc)

    def stats(
        self, number: int, notice: Notice, delivered: Any, seconds: dict[str, float], details: dict[str, float]
    ) -> Stats:
        """What a step did, over all buckets and with the roll call; the threshold is their mean, weighted by length."""
        exchange = self.parts.exchange
        n, size = len(self.parts.acc), exchange.size
        ordered = [self.buckets[b] for b in self.order]
        each = [b.aggregator.stats(number, notice, d, {}, {}) for b, d in zip(ordered, delivered, strict=True)]
        shares = [(bucket.hi - bucket.lo) / n for bucket in ordered]
        loads = sum((d.due.workloads for d in delivered), np.zeros(size, dtype=np.int64))
        called = {"bytes_sent": exchange.nbytes_sent, "bytes_received": exchange.nbytes_received,
                  "control_bytes": exchange.nbytes_control, "collectives": exchange.collectives}  # fmt: skip
        totals = {key: called.get(key, 0) + sum(getattr(one, key) for one in each) for key in TOTALS}
        weighted = {key: sum(getattr(s, key) * share for s, share in zip(each, shares, strict=True)) for key in WEIGHTED}
        return Stats(
            step=number, set_density=notice.k / n, imbalance=imbalance(loads), seconds=seconds,
            index_form=next((one.index_form for one in each if one.index_form), ""),
            details={**details, "buckets": float(len(each)), "early": float(self.early)}, **totals, **weighted,
        )  # fmt: skip

    # Settings that change midway

    def hold(self) -> None:
        """The held elements have changed: buckets give up what they still had to send of them."""
        for bucket in self.buckets:
            bucket.hold(self.parts.held.stretches)

    def kept(self, *, copy: bool = True) -> torch.Tensor:
        """The residual without gradients added for a step that is not done yet."""
        if not copy and not any(bucket.out for bucket in self.buckets):
            return self.residual
        kept = self.residual.clone()
        for bucket in self.buckets:
            if bucket.out:
                kept[bucket.lo : bucket.hi].copy_(bucket.before)
        return kept

    # Going on when another rank dies

    def quiet(self) -> None:
        """Wait until the thread is idle; local."""
        self._flight.quiet()

    def survive(self, delivery: CommittedDelivery) -> None:
        """Commit all buckets of a step together from now on."""
        self.commit = delivery.commit
        self._flight.carry = delivery.survival.carrying(self._flight.carry)

    def owing(self, lo: int, hi: int) -> Floats:
        """This rank's residual in [lo, hi), including gradients added for this step."""
        values: Floats = self.parts.acc[lo:hi]
        return values

    def regrouped(self, make: Make, rank: int, size: int) -> Callable[[], None]:
        """Prepare to go on among fewer ranks; see Aggregator. Buckets in flight are restored."""
        each = [bucket.aggregator.regrouped(make, rank, size) for bucket in self.buckets]

        def finish() -> None:
            self._arrived()
            self._restore()
            if not self._order_stands:  # some ranks may have received it before the death, and some not
                self.order = []
            for one in each:
                one()
            self.works.selection = self.buckets[0].aggregator.works.selection

        return finish

    def close(self) -> None:
        """End the thread and free communicators; collective."""
        exchange = self.parts.exchange
        if exchange.is_open and not exchange.gone:
            meet(exchange, "close")
        for bucket in self.buckets:
            bucket.aggregator.works.scorer.close()
        with contextlib.suppress(CollectiveError):
            self.recall(exchange.gone)
        self._flight.close()
        if self._polling is not None:
            self._polling.close()
            self._polling = None
        exchange.close()

    # State: one per bucket, in the order of the vector

    def state(self) -> State:
        """What the next step depends on besides the residual."""
        states = [bucket.aggregator.state() for bucket in self.buckets]
        return {"step": self.number, "order": list(self.order), "buckets": states}

    def upgraded(self, state: State) -> State:
        """Translate a state that an earlier version saved; it had no buckets."""
        return state

    def check(self, state: State) -> None:
        """Raise ConfigurationError unless load() could take the state."""
        order, states = state["order"], state["buckets"]
        if len(states) != len(self.buckets) or (order and sorted(order) != list(range(len(self.buckets)))):
            raise ConfigurationError(
                f"the state has {len(states)} buckets in the order {order}, this is of {len(self.buckets)} buckets"
            )
        for bucket, each in zip(self.buckets, states, strict=True):
            bucket.aggregator.check(each)

    def load(self, state: State) -> None:
        """Load a state that state() returned; the caller loads the residual."""
        self.recall()
        self._damaged, self.order = "", [int(number) for number in state["order"]]
        self._order_stands = bool(self.order)
        for bucket, each in zip(self.buckets, state["buckets"], strict=True):
            bucket.aggregator.load(each)

    def resize(
        self, states: Mapping[int, State], residuals: Mapping[int, Floats], old: int, new: int, rank: int
    ) -> tuple[State, Floats]:
        """This rank's state and residual among `new` ranks; see Aggregator."""
        merged, parts = list[State](), list[Floats]()
        for number, bucket in enumerate(self.buckets):
            theirs = {source: state["buckets"][number] for source, state in states.items()}
            stretches = {source: residual[bucket.lo : bucket.hi] for source, residual in residuals.items()}
            one, residual = bucket.aggregator.resize(theirs, stretches, old, new, rank)
            merged.append(one)
            parts.append(residual)
        first = next(iter(states.values()))
        return {"step": first["step"], "order": first["order"], "buckets": merged}, np.concatenate(parts)
