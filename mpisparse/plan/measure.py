"""Measuring what predictions rest on: links between ranks, and the passes of a candidate over memory."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from mpisparse.backends.device import load_backend
from mpisparse.backends.flat import Held, Slot, pieces_of, zeros
from mpisparse.comm.agreement import Notice
from mpisparse.comm.exchange import Exchange
from mpisparse.comm.hierarchy import Nodes
from mpisparse.comm.virtual import run_virtual
from mpisparse.core.records import Parts
from mpisparse.core.step import Clock
from mpisparse.model.layout import Layout
from mpisparse.plan.candidates import Candidate
from mpisparse.plan.predict import Links
from mpisparse.schemes import configure
from mpisparse.schemes.companion import Scheme, Site
from mpisparse.vectors import FlatSink, NoSink

TRIES = 5
FIRST = 4  # steps that find a threshold
SMALLEST, LARGEST = 1 << 14, 1 << 22  # bytes that a rank sends to measure bandwidth
CALL = 1e-5  # seconds of a message between two ranks of a node, where there are none to measure
LONG = 0.02  # seconds of a message that is long enough
FEW, MANY = 1 << 13, 1 << 20  # elements of which passes are measured


def links(exchange: Exchange) -> Links:
    """Measure the links between the ranks of an exchange, which changes nothing else; collective."""
    if exchange.size == 1:
        return Links(0.0, 1e12, 1e12)
    row, size = np.zeros(16, dtype=np.uint8), exchange.size
    small = _typical(exchange, lambda: exchange.allgather(row), 3 * TRIES)
    rounds = max(1, (size - 1).bit_length())
    nbytes = SMALLEST
    while True:
        share = nbytes // size
        payload, counts = np.zeros(share * size, dtype=np.uint8), [share] * size
        starts = [share * rank for rank in range(size)]
        values = np.zeros(nbytes // 4, dtype=np.float32)
        sent = _typical(exchange, functools.partial(exchange.alltoallv, payload, counts, starts))
        back = _typical(exchange, functools.partial(exchange.allgatherv, payload[:share], counts, starts))
        added = _typical(exchange, functools.partial(exchange.allreduce_, values))
        if sent + back > LONG or nbytes >= LARGEST:
            break
        nbytes *= 4
    moved, least = share * (size - 1), small / 10
    return Links(
        small / rounds,
        2 * moved / max(sent + back - 2 * small, least),
        2 * values.nbytes * (size - 1) / size / max(added - 2 * small, least),
    )


def all_links(exchange: Exchange, nodes: Nodes | None) -> dict[str, Any]:
    """Links between all ranks, inside nodes and between nodes, for Measured, the same on all ranks; collective."""
    known: dict[str, Any] = {"links": links(exchange)}
    if nodes is None:
        return known
    known |= {"ranks_a_node": nodes.ranks, "inside": _of_the_slowest(exchange, inside(nodes))}
    if nodes.count > 1:
        known["between"] = _of_the_slowest(exchange, links(nodes.between))
    return known


def inside(nodes: Nodes) -> Links:
    """Links between the ranks of a node as its sums use them, over shared memory where there is room; collective in it."""
    few, many = (_summing(replace(nodes, n=elements).with_memory()) for elements in (FEW, MANY))
    moved = 8 * (MANY - FEW) * (nodes.ranks - 1) / nodes.ranks  # bytes that a rank sends for the sums, and to gather them
    bandwidth, rounds = moved / max(many - few, few / 10), 2 * (nodes.ranks - 1).bit_length()
    return Links(few / rounds, bandwidth, bandwidth)


def _summing(nodes: Nodes) -> float:
    """Seconds of the sum of a node's vectors, and of gathering it; collective in it."""
    vector, total = zeros(nodes.n, torch.float32).numpy(), zeros(nodes.shard.hi - nodes.shard.lo, torch.float32).numpy()
    add = load_backend().add

    def call() -> None:
        nodes.reduce_scatter(vector, total, add)
        nodes.gather(total, vector)

    return _typical(nodes.inside, call)


def _of_the_slowest(exchange: Exchange, own: Links) -> Links:
    """The longest latency and the lowest bandwidths of all ranks; collective."""
    rows = exchange.allgather(np.array([own.latency, own.bandwidth, own.reducing]))
    return Links(float(rows[:, 0].max()), *rows[:, 1:].min(axis=0).tolist())


def near() -> Links:
    """Links between ranks of one node where there is only this rank: as fast as it copies memory, twice. Local."""
    values, copy = np.ones((2, LARGEST // 4), dtype=np.float32)
    seconds = []
    for _ in range(1 + TRIES):
        start = time.perf_counter()
        np.copyto(copy, values)
        seconds.append(time.perf_counter() - start)
    bandwidth = values.nbytes / statistics.median(seconds[1:])
    return Links(CALL, bandwidth / 2, bandwidth / 4)


def _typical(exchange: Exchange, call: Callable[[], Any], tries: int = TRIES) -> float:
    """The median seconds of a call on the slowest rank, the same on all ranks; collective."""
    seconds = []
    for turn in range(1 + tries):
        exchange.allgather(np.zeros(1, dtype=np.uint8))  # ranks begin together
        start = time.perf_counter()
        call()
        if turn:
            seconds.append(time.perf_counter() - start)
    return slowest(exchange, statistics.median(seconds))


def slowest(exchange: Exchange, seconds: float) -> float:
    """The largest number of all ranks; collective."""
    return float(exchange.allgather(np.array([seconds])).max())


def passes(candidate: Candidate, elements: int) -> float:
    """Seconds of a step of a rank alone, which exchanges with nobody: its passes over memory. Local.

    A long vector's follow from those of two shorter ones.
    """
    if elements <= MANY:
        return _alone(candidate, elements)
    few, many = _alone(candidate, FEW), _alone(candidate, MANY)
    return few + max(0.0, many - few) * (elements - FEW) / (MANY - FEW)


def _alone(candidate: Candidate, elements: int) -> float:
    seconds: float = run_virtual(1, functools.partial(_steps_alone, candidate, elements))[0]
    return seconds


def _steps_alone(candidate: Candidate, elements: int, comm: Any) -> float:
    """Do some steps of a vector's own scheme, on a virtual rank; the median of the later ones."""
    options = configure(candidate.scheme, **candidate.options)
    random = np.random.default_rng(1)  # the global generators stay as they are
    vector = torch.from_numpy(random.standard_normal(elements, dtype=np.float32))
    model = nn.ParameterList([nn.Parameter(vector.clone())])
    layout, backend = Layout(model), load_backend()
    slot = Slot("vector", 0, elements, (elements,), (1,), torch.float32)
    sink = NoSink() if options.of_weights else FlatSink(elements, backend)
    parts = Parts(zeros(elements, torch.float32), [slot], Held(elements), sink, Exchange(comm), backend)
    scheme = options.build(parts, Site(model, layout))
    seconds = []
    for _ in range(FIRST + TRIES):
        with torch.no_grad():
            model[0].add_(vector, alpha=1e-3)  # weights move
        start = time.perf_counter()
        _one_step(scheme, vector, candidate.density)
        seconds.append(time.perf_counter() - start)
    scheme.aggregator.close()
    return statistics.median(seconds[FIRST:])


def _one_step(scheme: Scheme, vector: torch.Tensor, density: float) -> None:
    aggregator, subject = scheme.aggregator, scheme.companion.subject
    k = max(1, int(density * len(vector)))
    if subject is None:
        pieces, notice = pieces_of(vector), Notice(k, np.zeros(1, dtype=bool))
    else:
        taken, notice = subject.take(k, "")
        assert taken is not None
        pieces = taken
    aggregator.one_step(aggregator.works, pieces, notice, Clock())
    if subject is not None:
        subject.publish(None)
