"""From what was measured, or is asked for, to the step of each candidate, and to a choice. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

from mpisparse.errors import ConfigurationError
from mpisparse.plan.candidates import FLAT, NODES, OVERLAPPED, SPARSE, WEIGHTS, Candidate
from mpisparse.plan.costs import Log, Machine, overlapped
from mpisparse.plan.messages import EVEN, Selections, messages

BACKWARD = 2 / 3  # of the computation, if that is not measured
BUCKET = 8e6  # bytes of gradients that set out together
INDEXED = 12  # bytes of an element that a node gathers with its index
ALIKE = 0.05  # predictions this close are equal: then the richer exchange is better
SURE = 1.25  # by so much the exchange of a richer candidate may be dearer than predicted and still fit
FAR = 0.2  # a step that is off by more than this share calls for another look
EASED = 0.5  # so does an exchange that takes less than this share of its prediction, if there is a richer one
MOST = 4.0  # times that exchanges may take longer, or shorter, than their messages and passes say


@dataclass(frozen=True)
class Links:
    """Between ranks that all send at once: seconds per round of messages; bytes per second of a rank, and of reductions."""

    latency: float
    bandwidth: float
    reducing: float

    def machine(self, ranks: int) -> Machine:
        """The cost model of so many ranks."""
        return Machine({ranks: self.latency}, {ranks: self.bandwidth}, {ranks: self.reducing})


@dataclass(frozen=True)
class Measured:
    """What predictions rest on.

    computing: seconds of a step without its exchange, of the slowest rank. passes: seconds of the passes over memory of each
    candidate that exchanges in each step, by name. inside, between: links within a node, and of one rank while all of its
    node send to others; known where there are several nodes of several ranks. backward: its share of the computation.
    correction: measured over predicted time of the exchange in use.
    """

    ranks: int
    elements: int
    computing: float
    links: Links
    passes: Mapping[str, float] = field(default_factory=dict)
    ranks_a_node: int = 1
    inside: Links | None = None
    between: Links | None = None
    backward: float = BACKWARD
    correction: float = 1.0

    def covers(self, candidate: Candidate) -> bool:
        """Whether the links that a candidate uses were measured: where there are no nodes, those of nodes were not."""
        return candidate.way != NODES or None not in (self.inside, self.between)

    def record(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Measured:
        """What record() was made of; raises TypeError or KeyError for anything else."""
        links = {name: None if record[name] is None else Links(**record[name]) for name in ("links", "inside", "between")}
        return cls(**{**record, **links})


@dataclass(frozen=True)
class Prediction:
    """A candidate's exchange and its whole step, in seconds.

    Where not every step exchanges, both are means over steps.
    """

    candidate: Candidate
    exchange: float
    step: float


def ways(candidate: Candidate, measured: Measured) -> list[Candidate]:
    """A candidate in all ways in which it can be exchanged."""
    nodes = measured.between is not None and 1 < measured.ranks_a_node < measured.ranks
    early = candidate.kind != WEIGHTS and measured.ranks > 1
    known = [FLAT, *([NODES] if nodes else []), *([OVERLAPPED] if early else [])]
    return [candidate.by(way) for way in known]


def predict(candidate: Candidate, measured: Measured, selections: Selections = MappingProxyType({})) -> Prediction:
    """Predict a step. selections: what selecting takes, where that is known."""
    passes, ranks, way = measured.passes.get(candidate.each_step.name, 0.0), measured.ranks, candidate.way
    buckets = max(1, round(4 * measured.elements / BUCKET)) if way == OVERLAPPED else 1
    inside = 0.0
    if ranks == 1:
        moved = 0.0
    elif way == NODES:
        inside, moved = _by_node(candidate, measured, selections)
        passes /= measured.ranks_a_node
    else:
        each = -(-measured.elements // buckets)
        moved = buckets * _moving(candidate, each, ranks, measured.links, selections)
    exchange = measured.correction * (inside + (passes + moved) / candidate.every)
    backward = measured.backward * measured.computing if way == OVERLAPPED else 0.0
    ready = [backward * (number + 1) / buckets for number in range(buckets)]
    done = overlapped(ready, [exchange / buckets] * buckets, backward)
    return Prediction(candidate, exchange, measured.computing - backward + done)


def _moving(candidate: Candidate, elements: int, ranks: int, links: Links, selections: Selections) -> float:
    """Seconds of deciding what is sent, and of its messages."""
    selected = selections.get((candidate.flat.name, ranks), EVEN)
    return links.machine(ranks).seconds(messages(candidate, elements, ranks, selected), 0.0, selected.seconds)


def _by_node(candidate: Candidate, measured: Measured, selections: Selections) -> tuple[float, float]:
    """Seconds of the sums of a node, which belong to each step, and of the exchange of a shard between nodes."""
    assert measured.inside is not None
    assert measured.between is not None
    ranks, nodes = measured.ranks_a_node, measured.ranks // measured.ranks_a_node
    shard = -(-measured.elements // ranks)
    inside = Log(ranks)
    inside.add("alltoallv", 4 * shard)
    inside.add("allgather", 4 * shard if candidate.kind != SPARSE else math.ceil(INDEXED * candidate.density * shard))
    seconds = measured.inside.machine(ranks).seconds(inside, 0.0)
    return seconds, _moving(candidate, shard, nodes, measured.between, selections)


def choose(predictions: Sequence[Prediction], computing: float, slowdown: float, now: Candidate | None = None) -> Prediction:
    """The richest whose step is at most slowdown x computing; if there is none, the fastest. Richest come first.

    Of the ways of an exchange the quickest counts.

    now: what is in use. It is left for a richer one only if that is sure to fit, and for another one only if it does not fit
    itself, or no longer is among the fastest.
    """
    limit = slowdown * computing
    predictions = _quickest(predictions, now, limit)
    at = None if now is None else next((i for i, p in enumerate(predictions) if p.candidate.flat == now.flat), None)
    for i, each in enumerate(predictions):
        careful = (SURE - 1) * each.exchange if at is not None and i < at else 0.0
        if each.step + careful <= limit:
            return each
    fastest = min(each.step for each in predictions)
    known = [] if at is None else [predictions[at]]
    return next(each for each in [*known, *predictions] if each.step <= (1 + ALIKE) * fastest)


def _quickest(predictions: Sequence[Prediction], now: Candidate | None, limit: float) -> list[Prediction]:
    """Of each exchange its quickest way; that in use, if it is as quick as any and not the only one above the limit."""
    best: dict[Candidate, Prediction] = {}
    for each in predictions:
        known = best.setdefault(each.candidate.flat, each)
        if each.step < known.step:
            best[each.candidate.flat] = each
    used = next((each for each in predictions if each.candidate == now), None)
    if used is not None:
        quickest = best[used.candidate.flat].step
        if used.step <= (1 + ALIKE) * quickest and (used.step <= limit or quickest > limit):
            best[used.candidate.flat] = used
    return list(best.values())


def check_slowdown(slowdown: object) -> float:
    """Return the slowdown as a float; raise unless it is a finite number of at least 1."""
    if isinstance(slowdown, bool) or not isinstance(slowdown, int | float) or not 1 <= slowdown < float("inf"):
        raise ConfigurationError(
            f"slowdown must be a number >= 1, how long a step may take with its exchange, got {slowdown!r}; 1.1 allows the "
            "exchange a tenth of the computation"
        )
    return float(slowdown)


def reason(chosen: Prediction, computing: float, slowdown: float) -> str:
    """Why a candidate was chosen, in words."""
    ratio = chosen.step / computing if computing > 0 else float("inf")
    says = f"predicted step {1e3 * chosen.step:.3g} ms, {ratio:.2f} times the computation"
    if chosen.step <= slowdown * computing:
        return f"{says}: the richest exchange within {slowdown:g} times"
    return f"{says}: the fastest, none is within {slowdown:g} times"


@dataclass(frozen=True)
class Question:
    """What would be: nodes of ranks_a_node ranks, each node with a link of so many bytes per second and a delay."""

    bandwidth: float
    delay: float
    ranks: int
    ranks_a_node: int = 1

    def __post_init__(self) -> None:
        if self.ranks % self.ranks_a_node:
            raise ConfigurationError(
                f"{self.ranks} ranks do not fill nodes of {self.ranks_a_node}; pass a multiple of it as the number of ranks"
            )


def supposed(measured: Measured, near: Links, question: Question) -> Measured:
    """What would be measured there. near: links between ranks of one node.

    All ranks of a node share its link, over which they send what is for other nodes.
    """
    ranks, each = question.ranks, question.ranks_a_node
    if each == ranks:
        return replace(measured, ranks=ranks, ranks_a_node=each, links=near, inside=near, between=None)
    latency = near.latency + question.delay

    def shared(share: float) -> Links:
        rate = question.bandwidth / (each * share)
        return Links(latency, min(rate, near.bandwidth), min(rate, near.reducing))

    links = shared((ranks - each) / (ranks - 1))
    return replace(measured, ranks=ranks, ranks_a_node=each, links=links, inside=near, between=shared(1.0))


@dataclass(frozen=True)
class Window:
    """Medians over some steps, for each rank: seconds of computation, of waiting for other ranks, and of the exchange.

    Where not every step exchanges, each is of the mean step from one exchange to the next.
    """

    computing: Sequence[float]
    waiting: Sequence[float]
    moving: Sequence[float]

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return max(map(sum, zip(self.computing, self.waiting, self.moving, strict=True)))

    @property
    def exchange(self) -> float:
        """Seconds that the exchange takes once all ranks are there."""
        return max(self.moving) + min(self.waiting)

    def off(self, predicted: float) -> bool:
        """Tell whether steps are far from what was predicted."""
        return abs(self.step - predicted) > FAR * predicted

    def eased(self, predicted: float) -> bool:
        """Tell whether the exchange takes far less than predicted, which may hardly show in a step that computes long."""
        return self.exchange < EASED * predicted

    def blame(self, before: Measured) -> str:
        """Which of both has changed, in words: a rank computes slower than all did, or the exchange takes longer."""
        slowest = max(range(len(self.computing)), key=lambda rank: self.computing[rank])
        if abs(self.computing[slowest] - before.computing) <= FAR * before.computing:
            return "the exchange takes longer or shorter than before"
        rest = [seconds for rank, seconds in enumerate(self.computing) if rank != slowest]
        alone = bool(rest) and self.computing[slowest] > (1 + FAR) * max(*rest, before.computing)
        return f"rank {slowest} computes slower than the others" if alone else "computation takes longer or shorter"


def corrected(measured: Measured, window: Window, now: Candidate) -> Measured:
    """What was measured, with the computation of a window, and with the exchange in use as long as it was there."""
    measured = replace(measured, computing=max(window.computing), correction=1.0)
    predicted = predict(now, measured).exchange
    ratio = window.exchange / predicted if predicted > 0 else 1.0
    return replace(measured, correction=min(MOST, max(1 / MOST, ratio)))
