"""The order of a step, for every scheme.

    prepare   local       add up the gradient and collect candidates, in one pass
    deliver   collective  agree on a threshold and on borders, unite indices, encode, reduce at the owners
    apply     local       settle: keep what was not sent, and adapt; publish: write the mean where the optimizer reads it

deliver gets arrays and returns arrays: it touches no part's state, only what prepare handed to it. At once it reads the
accumulator, read-only. In flight it runs in a thread while the next step is computed, it gets a snapshot, and its result is
applied at a fixed later step, never "when it arrives". Values at indices that only the agreement finds cannot be in
the snapshot: they follow with the next delivery (`Ahead`), so that indices travel one step ahead of their values.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mpisparse.arrays import Bools, Floats, Ints
from mpisparse.comm.agreement import FINE, DensityDiffers, FrozenDiffers, Refusal, ReplicasDiffer, refuse
from mpisparse.comm.roll_call import STEP, answers, at_work, begin
from mpisparse.core.records import Ahead, Arrived, Delivered, Outgoing, Refused, Works
from mpisparse.core.stages import Sent
from mpisparse.select.candidates import NONE
from mpisparse.select.plans import Outcome, nothing_agreed
from mpisparse.select.view import Live
from mpisparse.wire.indices import unite

if TYPE_CHECKING:
    from mpisparse.backends.flat import Pieces
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.agreement import Notice
    from mpisparse.comm.exchange import Exchange


@dataclass
class Clock:
    """Seconds by phase; a lap charges all time since the last one to its phase."""

    seconds: dict[str, float] = field(default_factory=dict)
    last: float = field(default_factory=time.perf_counter)

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now


def details_of(works: Works) -> dict[str, float]:
    """What the statistics say of the scheme's own parts; local."""
    details = works.scorer.details() if works.scorer.tells else {}
    for stage in works.stages:
        details |= stage.details()
    return details


def agree(works: Works, notice: Notice, clock: Clock) -> Bools | None:
    """Raise on all ranks if any cannot go on; in flight, the delivery does that. Collective.

    Returns which parameters had a gradient on some rank; None: all.
    """
    exchange = works.exchange
    exchange.nbytes_sent = exchange.nbytes_received = exchange.nbytes_control = 0
    used = None if works.flight is not None else share_readiness(exchange, notice)
    clock.lap("wait")
    return used


def run(works: Works, pieces: Pieces | None, notice: Notice, clock: Clock) -> Delivered | None:
    """Do one step; collective. Returns what was applied in it: None in the first steps with deliveries in flight."""
    if works.flight is None:
        outgoing = prepare(works, pieces, notice, clock)
        delivered = settle(works, deliver(works.exchange, works.backend, outgoing, clock), clock)
    else:
        arrived = works.flight.due()
        clock.lap("wait")
        delivered = settle(works, arrived, clock)
        outgoing = prepare(works, pieces, notice, clock)
        works.flight.send(outgoing._replace(notice=told(works.exchange, outgoing.notice)))
        if notice.status != FINE:  # this rank moves nothing until all ranks raise why, in the same later step
            delivered = None
    publish(works, delivered, clock)
    return delivered


def prepare(works: Works, pieces: Pieces | None, notice: Notice, clock: Clock) -> Outgoing:
    """Add up the gradient and collect candidates; local."""
    plan, scorer, late = works.selection.plan(notice.k), works.scorer, works.flight is not None
    found = NONE
    if notice.status == FINE:
        found = scorer.accumulate(pieces, *plan.scope, plan.floor)
        notice = notice if found.bad < 0 else notice.nonfinite(found.bad)
    live = Live(works.backend, works.seen, scorer.keys, works.take, found, scorer.tags, scorer.by_magnitude)
    clock.lap("accumulate")
    ahead = _take_ahead(works) if late and not plan.own else None
    view = plan.look(live, notice) if plan.looks else live
    if late:
        _clear(works, view.leaving)
        for stage in works.stages:
            stage.prepared(works.backend, works.acc)
    return Outgoing(notice, plan, view, works.stages, works.reducer, scorer.figures() if plan.own else (), ahead, late)


def deliver(exchange: Exchange, backend: Backend, out: Outgoing, clock: Clock) -> Delivered:
    """Agree on what is sent and average it over ranks; collective. Arrays in, arrays out."""
    used = share_readiness(exchange, out.notice) if out.late else None
    figures = tuple(exchange.allgather(np.array(out.figures)).mean(axis=0).tolist()) if out.figures else ()
    agreed, tags, form, indices = out.plan.agree(exchange, backend, out.notice, out.view), None, "", 0
    exchange.nbytes_control = exchange.nbytes_received  # all messages so far, of any kind
    clock.lap("agree")
    if agreed.union is None:
        found, loads = agreed.mine, agreed.workloads.tolist()
        union, tags, form, indices = unite(
            exchange, backend, found.index, found.magnitude, agreed.threshold, agreed.regions, loads, out.view.tags()
        )
        agreed = out.plan.united(agreed, union)
        clock.lap("unite")
    due, sent = out.ahead or (agreed, Sent(agreed.union, out.view.take(agreed.union)))
    for stage in out.stages:
        sent = stage.send(backend, out.view, sent)
    reduced = out.reducer.reduce(exchange, backend, sent.index, sent.values, due.regions)
    clock.lap("reduce")
    if reduced.index_nbytes:
        form, indices = "coded", indices + reduced.index_nbytes
    moved = (exchange.nbytes_sent, exchange.nbytes_received, exchange.nbytes_control)
    return Delivered(agreed, due, sent, reduced, tags, used, figures, *moved, indices, form)


def settle(works: Works, delivered: Arrived | None, clock: Clock) -> Delivered | None:
    """Keep what was not sent, and adapt; local. Raises on all ranks, in the same step, what a late delivery refused."""
    if delivered is None:
        return None
    if isinstance(delivered, Refused):
        raise delivered.refusal
    due, sent, reduced, backend = delivered.due, delivered.sent, delivered.reduced, works.backend
    if sent.note is None and reduced.left is not None:
        keep = backend.put if works.flight is None else backend.add_at  # in flight, the values left when they were sent
        keep(works.acc, sent.index, reduced.left)
        if len(reduced.kept_index):
            backend.add_at(works.acc, reduced.kept_index, reduced.kept)
    works.stages = tuple([s.settle(backend, works.acc, due.union, sent, reduced) for s in works.stages])
    if reduced.error is not None:
        works.reducer = works.reducer.after(backend, reduced)
    if delivered.tags is not None:
        works.scorer.received(due.union, delivered.tags)
    if works.scorer.follows:
        works.scorer.sent(due.union)
    clock.lap("feedback")
    works.selection.learn(delivered.agreed, Outcome(reduced.index, reduced.nbytes, delivered.figures))
    works.waiting = delivered.agreed
    clock.lap("adapt")
    return delivered


def publish(works: Works, delivered: Delivered | None, clock: Clock) -> None:
    """Write the mean to the sink; local. What its type cannot hold stays in the accumulator."""
    if delivered is None:
        works.sink.clear()
    else:
        works.sink.write(*_not_held(works, delivered.reduced.index, delivered.reduced.mean), works.acc)
        for stage in works.stages:
            stage.ended(works.backend, works.acc)
    clock.lap("publish")


def told(exchange: Exchange, notice: Notice) -> Notice:
    """Tell the other ranks that this one is in a step, and whether it can go on; local.

    In flight the training loop does that, in the order of its other calls, and the thread waits for the answers.
    """
    if notice.call is not None:
        return notice
    values = (notice.status, notice.detail, notice.k, int(notice.unused.any()), notice.frozen, notice.digest)
    return notice._replace(call=begin(exchange, STEP, notice.step, values))


def share_readiness(exchange: Exchange, notice: Notice) -> Bools | None:
    """Raise on all ranks if any is elsewhere or cannot go on, or if densities or frozen parameters differ. Collective.

    Returns which parameters had a gradient on some rank; None if all parameters had one on all ranks.
    """
    if exchange.size == 1:
        return _alone(notice)
    answered = answers(told(exchange, notice).call, exchange)
    rows = answered[:, 2:]
    if rows[:, 0].any():
        refuse(rows, notice)
    if (rows[:, 4] != notice.frozen).any():
        raise FrozenDiffers
    if (rows[:, 2] != notice.k).any() and (at_work(answered)[:, 4] != notice.k).any():
        raise DensityDiffers(rows[:, 2].tolist())
    digests = rows[:, 5]
    if (digests != digests[0]).any() and len(set(at_work(answered)[:, 7].tolist())) > 1:
        raise ReplicasDiffer
    if not rows[:, 3].any():
        return None
    bits = exchange.allreduce_(np.packbits(~notice.unused), "or")
    return np.unpackbits(bits, count=len(notice.unused)).astype(bool)


def _alone(notice: Notice) -> Bools | None:
    """What share_readiness() finds where there is one rank."""
    if notice.status != FINE:
        refuse(np.array([[notice.status, notice.detail]]), notice)
    return ~notice.unused if notice.unused.any() else None


def deliver_late(exchange: Exchange, backend: Backend, out: Outgoing) -> Arrived:
    """Deliver in flight: what the ranks refuse is part of the result, for them to raise in the same step; collective."""
    exchange.reset_counters()
    try:
        return deliver(exchange, backend, out, Clock())
    except Refusal as refusal:
        return Refused(refusal)


def _take_ahead(works: Works) -> Ahead:
    """Send the values of what the ranks have agreed on off; nothing, before the first agreement."""
    agreed, works.waiting = works.waiting or nothing_agreed(len(works.acc), works.exchange.size), None
    return Ahead(agreed, Sent(agreed.union, works.scorer.depart(works.backend, agreed.union)))


def _clear(works: Works, index: Ints) -> None:
    """Set elements of the accumulator to zero: they are in flight."""
    works.backend.put(works.acc, index, np.zeros(len(index), dtype=np.float32))


def _not_held(works: Works, index: Ints, mean: Floats) -> tuple[Ints, Floats]:
    """Return what of a mean may be published. What was frozen since it was sent goes back, the same on all ranks."""
    if works.flight is None or not works.held.stretches:
        return index, mean
    frozen = works.held.covers(index)
    works.backend.add_at(works.acc, index[frozen], mean[frozen])
    return index[~frozen], mean[~frozen]
