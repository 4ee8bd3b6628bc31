"""Every rank's largest elements of each chunk of the vector; each rank sends its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from mpisparse.arrays import Ints
from mpisparse.comm.agreement import Notice
from mpisparse.select.candidates import NONE
from mpisparse.select.everything import Everything
from mpisparse.select.plans import Agreed
from mpisparse.select.search import share_counts
from mpisparse.select.view import Live, View

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.exchange import Exchange


class Chunks(NamedTuple):
    """A stretch [begin, end) of the vector in chunks of `length` elements."""

    begin: int
    end: int
    length: int


def cut(n: int, length: int) -> list[Chunks]:
    """A vector in chunks of equal length, but for a shorter one at the end."""
    whole = n // length * length
    return [chunks for chunks in (Chunks(0, whole, length), Chunks(whole, n, n - whole)) if chunks.end > chunks.begin]


def largest(backend: Backend, values: Any, stretches: Sequence[Chunks], share: float) -> Any:
    """The index of a share of each chunk, at least one element: the largest ones that are not zero. Ascending."""
    found = [NONE.index]
    for begin, end, length in stretches:
        part = abs(values[begin:end])
        rows = (part if isinstance(part, torch.Tensor) else torch.from_numpy(part)).reshape(-1, length)
        columns = torch.topk(rows, max(1, round(share * length)), dim=1, sorted=False).indices
        found.append((columns.cpu() + torch.arange(begin, end, length, device="cpu")[:, None]).reshape(-1).numpy())
    index = np.sort(np.concatenate(found))
    held = backend.to_host(backend.values_at(values, backend.from_host(index))) != 0.0
    return backend.from_host(index[held])


class ChunkPlan(NamedTuple):
    """One step in which each rank sends its own largest elements of each chunk."""

    stretches: Sequence[Chunks]
    share: float
    n: int
    own: bool = False
    looks: bool = False
    scope: tuple[int, int] = (0, 0)  # no candidates are collected in the pass
    floor: float = 0.0

    def look(self, live: Live, notice: Notice) -> View:
        """The keys of the scorer."""
        return live

    def agree(self, exchange: Exchange, backend: Backend, notice: Notice, view: View) -> Agreed:
        """Agree that all values are finite; collective."""
        share_counts(exchange, notice, NONE.index, self.n)
        live: Live = view  # type: ignore[assignment]  # all values are read
        mine = largest(backend, live.keys.vector, self.stretches, self.share)
        return Agreed(NONE, 0.0, np.zeros(exchange.size, dtype=np.int64), [], union=mine)

    def united(self, agreed: Agreed, union: Ints) -> Agreed:
        """Nothing to unite."""
        return agreed


class ChunkSelection(Everything):
    """Plans each step's selection of the largest elements of each chunk."""

    def __init__(self, n: int, stretches: Sequence[Chunks]) -> None:
        super().__init__(n)
        self.stretches = stretches

    def plan(self, k: int) -> ChunkPlan:  # type: ignore[override]  # another kind of plan
        """The coming step."""
        return ChunkPlan(self.stretches, k / self.n, self.n)
