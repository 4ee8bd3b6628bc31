"""One bucket of a flat vector: neighbouring slots with an aggregator of their own, and their way to the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from mpisparse.arrays import Ints
from mpisparse.backends.flat import Held, Pieces, Slot, zeros
from mpisparse.comm.agreement import DensityDiffers, Notice, Overflow, Refusal, refuse
from mpisparse.core import step
from mpisparse.core.aggregator import Aggregator
from mpisparse.core.records import Arrived, Outgoing, Parts, Refused
from mpisparse.core.step import Clock

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.exchange import Exchange

Build = Callable[[Parts], Aggregator]


def cut(slots: Sequence[Slot], nbytes: float) -> list[int]:
    """The slots at which buckets begin, and the number of slots.

    A bucket is a run of neighbouring slots of at most nbytes of float32, or one longer slot. Buckets are filled from the
    end, because backward mostly begins there, so that a short bucket is the last to be sent.
    """
    cuts, end = [len(slots)], slots[-1].end
    for i in range(len(slots) - 1, 0, -1):
        if end > slots[i].begin and 4 * (end - slots[i - 1].begin) > nbytes:
            cuts.append(i)
            end = slots[i].begin
    if not end and len(cuts) > 1:
        cuts.pop()  # the rest has no elements
    return [0, *reversed(cuts)]


class Target:
    """Receives a bucket's mean in memory of its own, until all buckets are published."""

    def __init__(self, n: int) -> None:
        self.vector = zeros(0, torch.float32)
        self.n = n

    def clear(self) -> None:
        """Nothing is published here."""

    def write(self, index: Any, mean: Any, acc: Any) -> None:
        """Nothing is published here."""

    def whole(self) -> torch.Tensor:
        """The bucket's own vector."""
        if not len(self.vector):
            self.vector = zeros(self.n, torch.float32)
        return self.vector

    def published(self) -> torch.Tensor:
        """The bucket's own vector."""
        return self.whole()


class Bucket:
    """Neighbouring slots [first, last) of a vector, its elements [lo, hi), and their aggregator."""

    def __init__(self, whole: Parts, first: int, last: int, exchange: Exchange, build: Build) -> None:
        self.first, self.last = first, last
        self.lo, self.hi = whole.slots[first].begin, whole.slots[last - 1].end
        self.slots = [replace(s, begin=s.begin - self.lo, end=s.end - self.lo) for s in whole.slots[first:last]]
        self.target = Target(self.hi - self.lo)
        self.held = Held(self.hi - self.lo)
        residual = whole.residual[self.lo : self.hi]
        mine = replace(whole, residual=residual, slots=self.slots, held=self.held, sink=self.target, exchange=exchange)
        self.aggregator = build(replace(mine, early=True))
        self.out = False  # sent, and not applied yet
        self.before = zeros(0, torch.float32)  # the accumulator before it was sent

    def part_of(self, pieces: Pieces) -> Pieces:
        """The pieces of this bucket, taken from those of the whole vector."""
        a, b = self.first, self.last
        mine = {slot.name: slot for slot in self.slots}
        sparse = [(mine[slot.name], grad) for slot, grad in pieces.sparse if slot.name in mine]
        return Pieces(pieces.pointers[a:b], pieces.ends[a:b] - self.lo, pieces.kinds[a:b], sparse, pieces.alive)

    def keep(self) -> None:
        """Keep the accumulator for restore()."""
        if not len(self.before):
            self.before = zeros(self.hi - self.lo, torch.float32, self.aggregator.residual.device)
        self.before.copy_(self.aggregator.residual)

    def restore(self) -> None:
        """Restore what keep() copied, and tell a scorer that expects an empty accumulator."""
        self.aggregator.residual.copy_(self.before)
        scorer = self.aggregator.works.scorer
        scorer.load(scorer.state())

    def hold(self, stretches: Sequence[tuple[int, int]]) -> None:
        """Hold back the bucket's frozen elements; stretches are those of the whole vector."""
        mine = [(max(begin, self.lo) - self.lo, min(end, self.hi) - self.lo) for begin, end in stretches]
        self.held.hold([(begin, end) for begin, end in mine if begin < end])
        self.aggregator.hold()


class Parcel(NamedTuple):
    """A bucket in flight. row: status, flat index and k, for all ranks; outgoing: None if it only refuses."""

    row: Ints
    lo: int
    outgoing: Outgoing | None


def carry(exchange: Exchange, backend: Backend, parcel: Parcel) -> Arrived:
    """Deliver a bucket in the thread; collective. A refusal is returned as the result."""
    exchange.reset_counters()
    try:
        rows = exchange.allgather(parcel.row)
        if rows[:, 0].any():
            refuse(rows, Notice(0, np.zeros(0, dtype=bool)))
        if (rows[:, 2] != rows[0, 2]).any():
            raise DensityDiffers(rows[:, 2].tolist())
        assert parcel.outgoing is not None
        return step.deliver(exchange, backend, parcel.outgoing, Clock())
    except Overflow as overflow:
        return Refused(Overflow(overflow.args[0] + parcel.lo))
    except Refusal as refusal:
        return Refused(refusal)
