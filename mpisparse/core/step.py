"""The order of a step, for every scheme.

    prepare   local       accumulate the gradient and collect candidates, in one pass
    deliver   collective  agree on a threshold and on borders, unite indices, encode, reduce at the owners
    apply     local       settle: keep what was not sent, and adapt; publish: write the mean where the optimizer reads it

deliver takes arrays and returns arrays: it touches the state of no part, only what prepare passed to it. At staleness 0
it reads the accumulator, read-only. In flight it runs in a thread while the next step is computed. It then works on a
snapshot, and its result is applied at a fixed later step, never "when it arrives". Values at indices that only the
agreement finds cannot be in the snapshot. They are sent with the next delivery (`Ahead`), so indices travel one step
ahead of their values.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mpisparse.arrays import Bools, Bytes, Floats, Ints
from mpisparse.comm.agreement import FINE, DensityDiffers, FrozenDiffers, Refusal, ReplicasDiffer, refuse
from mpisparse.comm.roll_call import STEP, answers, at_work, begin, riders
from mpisparse.core.records import Ahead, Arrived, Delivered, Opened, Outgoing, Refused, Works
from mpisparse.core.stages import Sent
from mpisparse.select.candidates import NONE, Candidates
from mpisparse.select.exclusive import ExclusivePlan
from mpisparse.select.plans import Outcome, nothing_agreed
from mpisparse.select.riders import unpack
from mpisparse.select.view import Live
from mpisparse.wire.indices import unite
from mpisparse.wire.on_host import landed

if TYPE_CHECKING:
    from mpisparse.backends.flat import Pieces
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.agreement import Notice
    from mpisparse.comm.exchange import Exchange
    from mpisparse.select.plans import Plan

Peek = Callable[[int, int, float], Candidates]  # the candidates that a pass over [lo, hi) will find above a floor


@dataclass
class Clock:
    """Seconds by phase; a lap charges the time since the last lap to its phase."""

    seconds: dict[str, float] = field(default_factory=dict)
    last: float = field(default_factory=time.perf_counter)

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now


def details_of(works: Works) -> dict[str, float]:
    """Figures of the scheme's own parts for the statistics; local."""
    details = works.scorer.details() if works.scorer.tells else {}
    for stage in works.stages:
        details |= stage.details()
    return details


def peeking(works: Works, pieces: Pieces | None) -> Peek | None:
    """Return a function that finds the step's candidates before the gradient is added, or None if none can. Local.

    pieces: what the step adds; None: it was added during backward.
    """
    if not works.scorer.peeks or works.held.stretches or (pieces is not None and pieces.sparse):
        return None
    return partial(works.scorer.peek, pieces)


def agree(works: Works, notice: Notice, clock: Clock, peek: Peek | None = None) -> Bools | None:
    """Raise on all ranks if any cannot go on; in flight, the delivery does that. Collective.

    peek: finds this step's candidates before the gradient is added, if that is possible. Returns which parameters had a
    gradient on some rank; None: all.
    """
    exchange, works.opened = works.exchange, None
    if exchange.size > 1:
        exchange.reset_counters()
        if peek is not None and exchange.spare and notice.status == FINE and notice.call is None:
            return _open(works, notice, clock, peek)
    used = None if works.flight is not None else share_readiness(exchange, notice)
    clock.lap("wait")
    return used


def _open(works: Works, notice: Notice, clock: Clock, peek: Peek) -> Bools | None:
    """As agree(); if the regions are known already, send the first counts along with the roll call."""
    exchange, backend, plan = works.exchange, works.backend, works.selection.plan(notice.k)
    assert isinstance(plan, ExclusivePlan)  # no other plan has spare bytes in its roll call
    opening = plan.opened(backend, peek)
    if opening is not None:
        notice = announce(exchange, notice.nonfinite(opening.found.bad), opening.rider)
        clock.lap("accumulate")
    used = share_readiness(exchange, notice)
    if opening is not None:
        rows = unpack(backend, riders(notice.call), len(plan.rungs))
        works.opened = None if rows is None else Opened(plan._replace(told=rows), opening.found)
    clock.lap("wait")
    return used


def run(works: Works, pieces: Pieces | None, notice: Notice, clock: Clock) -> Delivered | None:
    """Do one step; collective. Returns the delivery that it applied: None in the first steps with deliveries in flight."""
    if works.flight is None:
        outgoing = prepare(works, pieces, notice, clock)
        carry = works.carry or deliver
        delivered = settle(works, carry(works.exchange, works.carrier, outgoing, clock), clock)
    else:
        arrived = works.flight.due()
        clock.lap("wait")
        delivered = settle(works, arrived, clock)
        outgoing = prepare(works, pieces, notice, clock)
        works.flight.send(outgoing._replace(notice=announce(works.exchange, outgoing.notice)))
        if notice.status != FINE:  # this rank changes nothing until all ranks raise the reason, in the same later step
            delivered = None
    publish(works, delivered, clock)
    return delivered


def prepare(works: Works, pieces: Pieces | None, notice: Notice, clock: Clock) -> Outgoing:
    """Accumulate the gradient and collect candidates; local."""
    opened, works.opened = works.opened, None
    plan = works.selection.plan(notice.k) if opened is None else opened.plan
    scorer, found = works.scorer, NONE
    if notice.status == FINE:
        found = scorer.accumulate(pieces, *(plan.scope if opened is None else (0, 0)), plan.floor)
        notice = notice if found.bad < 0 else notice.nonfinite(found.bad)
    found = found if opened is None else opened.found
    clock.lap("accumulate")
    return prepared(works, plan, found, notice)._replace(opened=opened is not None)


def prepared(works: Works, plan: Plan, found: Candidates, notice: Notice) -> Outgoing:
    """Return what deliver may read: views of the accumulator, which holds the gradient now, and the candidates. Local."""
    scorer, late = works.scorer, works.flight is not None
    unsent = works.seen if scorer.unsent is None else scorer.unsent
    live = Live(works.backend, unsent, scorer.keys, works.take, found, scorer.tags, scorer.by_magnitude)
    ahead = _take_ahead(works) if late and not plan.own else None
    view, stages = plan.look(live, notice) if plan.looks else live, works.stages
    if works.carrier is not works.backend:
        view = view.carried(works.carrier) if plan.looks else live.copied(works.carrier)
        stages = tuple([stage.carried(works.backend) for stage in stages])
    if late:
        if len(view.leaving):
            scorer.depart(works.backend, works.backend.from_host(view.leaving))
        works.stages = tuple([stage.departed(works.backend, works.acc) for stage in works.stages])
    figures = scorer.figures() if plan.own else ()
    return Outgoing(notice, plan, view, stages, works.reducer, figures, ahead, late)


def deliver(exchange: Exchange, backend: Backend, out: Outgoing, clock: Clock) -> Delivered:
    """Agree on what is sent and average it over ranks; collective. Arrays in, arrays out."""
    used, differ = _readiness_late(exchange, out.notice) if out.late else (None, False)
    figures = tuple(exchange.allgather(np.array(out.figures)).mean(axis=0).tolist()) if out.figures else ()
    agreed, tags, form, indices = out.plan.agree(exchange, backend, out.notice, out.view), None, "", 0
    exchange.nbytes_control = exchange.nbytes_received  # all messages so far, of any kind
    clock.lap("agree")
    if agreed.union is None:
        found, loads = agreed.mine, agreed.workloads.tolist()
        union, tags, form, indices = unite(
            exchange, backend, found.index, found.magnitude, agreed.threshold, agreed.regions, loads, out.view.tags(),
            out.notice if out.opened else None,
        )  # fmt: skip
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
    return Delivered(agreed, due, sent, reduced, tags, used, figures, *moved, indices, exchange.collectives, form, differ)


def settle(works: Works, delivered: Arrived | None, clock: Clock) -> Delivered | None:
    """Keep what was not sent, and adapt; local. Raises on all ranks, in the same step, what a late delivery refused."""
    if delivered is None:
        return None
    if isinstance(delivered, Refused):
        raise delivered.refusal
    on_carrier, delivered, backend = delivered.reduced, _landed(works, delivered), works.backend
    due, sent, reduced = delivered.due, delivered.sent, delivered.reduced
    if sent.note is None and reduced.left is not None:
        keep = backend.put if works.flight is None else backend.add_at  # in flight, sent values were taken out at departure
        keep(works.acc, sent.index, reduced.left)
        if len(reduced.kept_index):
            backend.add_at(works.acc, reduced.kept_index, reduced.kept)
    works.stages = tuple([s.settle(backend, works.acc, due.union, sent, reduced) for s in works.stages])
    if works.flight is not None and works.held.stretches:  # some may have been frozen since this was sent
        works.stages = tuple([stage.hold(backend, works.acc, works.held) for stage in works.stages])
    if reduced.error is not None:
        works.reducer = works.reducer.after(works.carrier, on_carrier)
    if delivered.tags is not None:
        works.scorer.received(due.union, delivered.tags)
    if works.scorer.follows:
        works.scorer.sent(due.union)
    clock.lap("feedback")
    works.selection.learn(delivered.agreed, Outcome(on_carrier.index, reduced.nbytes, delivered.figures))
    works.waiting = delivered.agreed
    works.differ = works.differ or delivered.differ
    clock.lap("adapt")
    return delivered


def _landed(works: Works, delivered: Delivered) -> Delivered:
    """Return a delivery with its arrays in the accumulator's memory, if it was carried out in another one."""
    backend, due, sent = works.backend, delivered.due, delivered.sent
    if works.carrier is backend:
        return delivered
    index, union = (backend.from_host(i) if isinstance(i, np.ndarray) else i for i in (sent.index, due.union))
    note = tuple(map(backend.from_host, sent.note)) if isinstance(sent.note, tuple) else sent.note
    reduced = landed(backend, delivered.reduced)
    return delivered._replace(due=due._replace(union=union), sent=sent._replace(index=index, note=note), reduced=reduced)


def publish(works: Works, delivered: Delivered | None, clock: Clock) -> None:
    """Write the mean to the sink; local. What its type cannot hold stays in the accumulator."""
    if delivered is None:
        works.sink.clear()
    else:
        works.sink.write(*_not_held(works, delivered.reduced.index, delivered.reduced.mean), works.acc)
        for stage in works.stages:
            stage.ended(works.backend, works.acc)
    clock.lap("publish")


def announce(exchange: Exchange, notice: Notice, rider: Bytes | None = None) -> Notice:
    """Start the roll call: tell the other ranks that this one is in a step, and whether it can go on. Local.

    In flight the training loop starts it, in the order of its other collective calls, and the thread waits for the
    answers. rider: the first counts of the step.
    """
    if notice.call is not None:
        return notice
    values = (notice.status, notice.detail, notice.k, int(notice.unused.any()), notice.frozen, notice.digest, notice.norm)
    return notice._replace(call=begin(exchange, STEP, notice.step, values, rider))


def share_readiness(exchange: Exchange, notice: Notice) -> Bools | None:
    """Raise on all ranks if any is in another call or cannot go on, or if densities or frozen parameters differ. Collective.

    Returns which parameters had a gradient on some rank; None if all parameters had one on all ranks.
    """
    if exchange.size == 1:
        return _alone(notice)
    call = announce(exchange, notice).call
    answered = answers(call, exchange)
    rows = answered[:, 2:]
    call.exchange.norms = rows[:, 6]  # kept in the exchange of all ranks, not in a thread's
    if rows[:, 0].any():
        refuse(rows, notice)
    if (rows[:, 4] != notice.frozen).any():
        raise FrozenDiffers
    if (rows[:, 2] != notice.k).any() and (at_work(answered)[:, 4] != notice.k).any():
        raise DensityDiffers(rows[:, 2].tolist())
    used = None
    if rows[:, 3].any():
        bits = exchange.allreduce_(np.packbits(~notice.unused), "or")
        used = np.unpackbits(bits, count=len(notice.unused)).astype(bool)
    digests = rows[:, 5]
    if (digests != digests[0]).any() and len(set(at_work(answered)[:, 7].tolist())) > 1:
        raise ReplicasDiffer(used)
    return used


def _readiness_late(exchange: Exchange, notice: Notice) -> tuple[Bools | None, bool]:
    """Return what share_readiness() does, and whether replicas differ.

    Rounding alone can make them differ, so the delivery goes on.
    """
    try:
        return share_readiness(exchange, notice), False
    except ReplicasDiffer as differ:
        return differ.used, True


def _alone(notice: Notice) -> Bools | None:
    """As share_readiness(), with a single rank."""
    if notice.status != FINE:
        refuse(np.array([[notice.status, notice.detail]]), notice)
    return ~notice.unused if notice.unused.any() else None


def deliver_late(exchange: Exchange, backend: Backend, out: Outgoing) -> Arrived:
    """Deliver in flight; collective. A refusal is returned, so that all ranks raise it in the same step."""
    exchange.reset_counters()
    try:
        return deliver(exchange, backend, out, Clock())
    except Refusal as refusal:
        return Refused(refusal)


def _take_ahead(works: Works) -> Ahead:
    """Take the values of the last agreement out of the accumulator to send them; none before the first agreement."""
    agreed, works.waiting = works.waiting or nothing_agreed(len(works.acc), works.exchange.size), None
    backend = works.backend
    values = works.scorer.depart(backend, backend.from_host(agreed.union))
    return Ahead(agreed, Sent(agreed.union, backend.to_host(values)))


def _not_held(works: Works, index: Ints, mean: Floats) -> tuple[Ints, Floats]:
    """Return the part of a mean that may be published.

    Elements frozen since they were sent return to the accumulator, with the same values on all ranks.
    """
    if works.flight is None or not works.held.stretches:
        return index, mean
    backend, places = works.backend, works.backend.to_host(index)
    frozen, values = works.held.covers(places), works.backend.to_host(mean)
    backend.add_at(works.acc, backend.from_host(places[frozen]), backend.from_host(values[frozen]))
    return backend.from_host(places[~frozen]), backend.from_host(values[~frozen])
