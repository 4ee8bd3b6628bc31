"""Ranks on nodes: which ranks share a node, an exchange inside it, and one between equal places of all nodes.

Inside a node a vector is cut into one shard per rank. Ranks at the same place on their nodes have the same shard. They
exchange it at the same time as the ranks at other places exchange theirs. Sums inside a node are made in rank order.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from mpisparse.arrays import Bytes, Floats
from mpisparse.comm.exchange import Exchange
from mpisparse.comm.regions import Region, even_regions
from mpisparse.comm.shared_rows import shared_rows
from mpisparse.errors import ConfigurationError
from mpisparse.names import AUTO, FLAT, NODE

RANKS_PER_NODE = "MPISPARSE_RANKS_PER_NODE"  # ranks 0 to K-1 are a node, and so on, wherever they run: for tests
ROUND = 1 << 19  # elements of a shard per message inside a node: these stay in cache
IN_CACHE = 1 << 16  # elements that are summed at a time, where memory is shared


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job, which all have the same number of ranks, and where this rank is.

    count: number of nodes; ranks: ranks per node; node, place: this rank's node, and its number there. inside: an exchange
    among the ranks of its node, in the order of their places; between: among the ranks at the same place, in the order of
    the nodes. n: elements of a vector. rows: shared memory for the vectors of the node's ranks; none if they send messages.
    first: the node's first rank.
    """

    count: int
    ranks: int
    node: int
    place: int
    inside: Exchange
    between: Exchange
    n: int
    rows: Sequence[Floats] = ()
    first: int = 0

    @property
    def shard(self) -> Region:
        """This rank's shard of a vector."""
        return even_regions(self.n, self.ranks)[self.place]

    @property
    def layout(self) -> dict[str, int]:
        """What a saved state depends on: ranks per node, and this rank's node and place in it."""
        return {"ranks": self.ranks, "node": self.node, "place": self.place}

    def room(self) -> Floats:
        """Memory for this rank's vector, from which reduce_scatter() is fastest."""
        return self.rows[self.place] if self.rows else np.zeros(self.n, dtype=np.float32)

    def with_memory(self) -> Nodes:
        """The same nodes, whose ranks share memory for their vectors if they can; collective inside the node."""
        return replace(self, rows=shared_rows(self.inside, self.n))

    def vector(self) -> tuple[Floats, bool]:
        """Memory for a vector of the node, and whether its ranks share it or have one each; collective inside the node."""
        rows = shared_rows(self.inside, self.n, [0]) if self.rows else ()
        return (rows[0], True) if rows else (np.zeros(self.n, dtype=np.float32), False)

    def reduce_scatter(self, vector: Floats, total: Floats, add: Any) -> None:
        """Write this rank's shard of the sum of the node's vectors to `total`; collective inside the node.

        If memory is shared, no rank may write to its row again before the next meet().
        """
        if self.rows:
            mine = self.rows[self.place]
            if vector.ctypes.data != mine.ctypes.data:
                mine[:] = vector
            self.meet()
            region = self.shard
            self.inside.nbytes_received += 4 * (region.hi - region.lo) * (self.ranks - 1)
            for start in range(region.lo, region.hi, IN_CACHE):
                stop = min(start + IN_CACHE, region.hi)
                _add_up(total[start - region.lo : stop - region.lo], [row[start:stop] for row in self.rows], add)
            return
        for places, counts in self._rounds():
            payload = self.inside.alltoallv(vector.view(np.uint8), _nbytes(counts), _nbytes(places))
            at = places[self.place] - self.shard.lo
            rows = payload.view(np.float32).reshape(self.ranks, -1)
            _add_up(total[at : at + counts[self.place]], rows, add)

    def gather(self, shard: Floats, vector: Floats) -> None:
        """Write the shards of all ranks of the node to a vector; collective inside the node."""
        if self.rows:
            self.rows[0][self.shard.lo : self.shard.hi] = shard
            self.meet()
            vector[:] = self.rows[0]
            self.inside.nbytes_received += 4 * (len(vector) - len(shard))
            return
        for places, counts in self._rounds():
            ends = [0, *accumulate(counts)]
            at = places[self.place] - self.shard.lo
            mine = shard[at : at + counts[self.place]].view(np.uint8)
            parts = self.inside.allgatherv(mine, _nbytes(counts), _nbytes(ends[:-1])).view(np.float32)
            for place, count, end in zip(places, counts, ends, strict=False):
                vector[place : place + count] = parts[end : end + count]

    def _rounds(self) -> Iterator[tuple[list[int], list[int]]]:
        """The begin of each place's part of a round, and its number of elements."""
        shards = even_regions(self.n, self.ranks)
        for start in range(0, max(region.hi - region.lo for region in shards), ROUND):
            places = [min(region.lo + start, region.hi) for region in shards]
            yield places, [min(region.hi - place, ROUND) for region, place in zip(shards, places, strict=True)]

    def meet(self) -> None:
        """Wait until all ranks of the node have written what others read; collective inside the node."""
        self.inside.allgather(np.zeros(1, dtype=np.uint8))

    def gather_bytes(self, payload: Bytes, counts: Sequence[int]) -> list[Bytes]:
        """Gather counts[p] bytes from every place p of the node; collective inside the node."""
        ends = [0, *accumulate(counts)]
        arrived = self.inside.allgatherv(payload, counts, ends[:-1])
        return [arrived[end : end + count] for end, count in zip(ends, counts, strict=False)]

    def close(self) -> None:
        """Free both communicators; collective."""
        self.inside.close()
        self.between.close()


def _add_up(total: Floats, rows: Sequence[Floats], add: Any) -> None:
    """Sum rows in their order."""
    total[:] = rows[0]
    for row in rows[1:]:
        add(total, row)


def _nbytes(counts: Sequence[int]) -> list[int]:
    """Counts of float32 as bytes."""
    return [4 * count for count in counts]


def find_nodes(exchange: Exchange, hierarchy: str, n: int, *, memory: bool = True) -> Nodes | None:
    """Find out on which nodes the ranks of an exchange are, for vectors of n elements; None: exchange flat. Collective.

    memory: have the ranks of a node share memory.
    """
    if hierarchy == FLAT or exchange.size == 1:
        return None
    homes = exchange.allgather(np.array([_home(exchange)], dtype=np.int64))[:, 0].tolist()
    members = {home: [rank for rank, other in enumerate(homes) if other == home] for home in homes}
    sizes = [len(ranks) for ranks in members.values()]
    if hierarchy == AUTO and len(members) == 1:
        return None
    why = ""
    if len(set(sizes)) > 1:
        why = f"nodes must have the same number of ranks, here they have {', '.join(map(str, sizes))}"
    elif n < sizes[0]:
        why = f"a vector of {n} elements is not shared out over {sizes[0]} ranks of a node"
    if why and hierarchy == NODE and exchange.rank == 0:
        warnings.warn(f'hierarchy="node" has no effect: {why}; all ranks exchange with each other', stacklevel=4)
    if why or sizes[0] == 1:
        return None
    mine = members[homes[exchange.rank]]
    node, place = list(members).index(homes[exchange.rank]), mine.index(exchange.rank)
    inside, between = _split(exchange, node, place), _split(exchange, place, node)
    nodes = Nodes(len(members), len(mine), node, place, inside, between, n, first=mine[0])
    return nodes.with_memory() if memory else nodes


def _home(exchange: Exchange) -> int:
    """A number that the ranks of this rank's node have in common, and no others; collective."""
    texts = exchange.gather_texts(os.environ.get(RANKS_PER_NODE, ""))
    if not any(texts):
        return exchange.comm.lowest_here()
    text = texts[exchange.rank]
    if len(set(texts)) > 1 or not text.isdecimal() or int(text) < 1:
        raise ConfigurationError(
            f"r{exchange.rank} | {RANKS_PER_NODE} must be the same whole number >= 1 on all ranks, got {sorted(set(texts))}"
        )
    return exchange.rank // int(text)


def _split(exchange: Exchange, group: int, place: int) -> Exchange:
    """An exchange among the ranks of a group, in the order of their places; collective over all ranks."""
    comm = exchange.comm.Split(group, place)
    made = Exchange(comm, exchange.segment_nbytes)
    comm.Free()
    made.share_place(exchange)
    return made
