"""An exchange with nobody: for a scheme that is put together only to look at a state, without other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpisparse.comm.hierarchy import Nodes


class NoExchange:
    """Has a rank and a size, and sends nothing."""

    threaded = is_open = False
    virtual = True
    gone = ""
    spare = 0

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def polling(self) -> NoExchange:
        return self

    def close(self) -> None:
        """Do nothing: there is no communicator."""


def nodes_of(saved: Mapping[str, Any], size: int, n: int) -> Nodes:
    """The nodes that a state was saved on; raises ValueError if they are impossible."""
    ranks, node, place = (saved[key] for key in ("ranks", "node", "place"))
    known = all(type(number) is int for number in (ranks, node, place))
    if not known or ranks < 2 or size % ranks or not 0 <= node < size // ranks or not 0 <= place < ranks:
        raise ValueError(f"rank {place!r} of node {node!r} with {ranks!r} ranks is none of {size} ranks")
    inside: Any = NoExchange(place, ranks)
    between: Any = NoExchange(node, size // ranks)
    return Nodes(size // ranks, ranks, node, place, inside, between, n)
