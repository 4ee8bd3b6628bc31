"""What exchanging by nodes takes here: sums inside a node, and links between the ranks of the same place."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpisparse.backends.device import load_backend
from mpisparse.comm.exchange import Exchange
from mpisparse.comm.hierarchy import find_nodes
from mpisparse.names import NODE
from mpisparse.plan.costs import Machine, Nodes

ROUNDS = 9
Links = Callable[[MPI.Intracomm, int], tuple[float, float]]  # bytes per second of large messages, and of reductions


def measure_nodes(comm: MPI.Intracomm, elements: int, machine: Machine, links: Links) -> Nodes | None:
    """Measure how the nodes of these ranks exchange vectors of so many elements; None: they are no equal nodes. Collective.

    machine: of all ranks, whose latencies and processors hold for nodes, too.
    """
    exchange = Exchange(comm)
    nodes = find_nodes(exchange, NODE, elements)
    if nodes is None:
        exchange.close()
        return None
    vector, shard = nodes.room(), nodes.shard
    total, gathered, add = np.zeros(shard.hi - shard.lo, np.float32), np.zeros(elements, np.float32), load_backend().add
    seconds = []
    for _ in range(ROUNDS):
        comm.Barrier()
        start = time.perf_counter()
        nodes.reduce_scatter(vector, total, add)
        nodes.gather(total, gathered)
        taken = np.array([time.perf_counter() - start])
        seconds.append(float(exchange.allgather(taken).max()))
    part: Any = comm.Split(nodes.place, nodes.node)
    linked = np.array(links(part, max(1, elements // nodes.ranks)))
    bandwidth, reducing = exchange.allgather(linked).min(axis=0).tolist()
    part.Free()
    nodes.close()
    exchange.close()
    count = nodes.count
    between = Machine(machine.latency, {count: bandwidth}, {count: reducing}, machine.cores, machine.handling)
    return Nodes(nodes.ranks, between, statistics.median(seconds) / elements)
