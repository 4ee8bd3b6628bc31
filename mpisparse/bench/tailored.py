"""Exchanges tailored to one kind of sparse model each, as small references: exact means of what can be non-zero.

Each is a selection of its own in the order of every scheme (mpisparse.core.step): it says which elements are sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import nn

from mpisparse.arrays import Ints
from mpisparse.bench.sparse_models import PrunedLinear
from mpisparse.comm.agreement import Notice
from mpisparse.comm.exchange import Exchange
from mpisparse.comm.regions import even_regions
from mpisparse.core.aggregator import Aggregator
from mpisparse.core.stages import Dropped
from mpisparse.model.layout import Layout
from mpisparse.select.candidates import NONE, Candidates
from mpisparse.select.everything import Everything
from mpisparse.select.plans import Agreed
from mpisparse.select.scorers import Magnitude
from mpisparse.select.search import share_counts
from mpisparse.select.view import Live, Snapshot, View
from mpisparse.sync import GradientSync
from mpisparse.wire.codecs import find_codec
from mpisparse.wire.own import OwnByOwner
from mpisparse.wire.reduction import ByMpi

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend

# The elements that are sent, ascending. Ranks that send the same ask each other; others look at their accumulator.
Cover = Callable[..., Ints]


class Reduction(NamedTuple):
    """A tailored exchange: makes the cover of a model. own: each rank sends its own elements, not the same ones."""

    cover: Callable[[nn.Module, Layout], Cover]
    own: bool = False


class CoveredPlan(NamedTuple):
    """One step in which the elements of a cover are sent."""

    cover: Cover
    n: int
    own: bool
    looks: bool
    scope: tuple[int, int] = (0, 0)
    floor: float = 0.0

    def look(self, live: Live, notice: Notice) -> View:
        """What this rank sends, where it sends its own elements."""
        index = self.cover(live.acc)
        values = live.take(index)
        return Snapshot(live.backend, Candidates(index, np.abs(values)), values)

    def agree(self, exchange: Exchange, backend: Backend, notice: Notice, view: View) -> Agreed:
        """Agree that all values are finite, and on the cover; collective."""
        share_counts(exchange, notice, NONE.index, self.n)
        index = view.found.index if self.own else self.cover(exchange, notice)
        loads = np.full(exchange.size, len(index), dtype=np.int64)
        return Agreed(NONE, 0.0, loads, even_regions(self.n, exchange.size), union=index, own=self.own, k=len(index))

    def united(self, agreed: Agreed, union: Ints) -> Agreed:
        """There is nothing to unite."""
        return agreed


class Covered(Everything):
    """The cover of a model, from step to step."""

    def __init__(self, cover: Cover, n: int, *, own: bool) -> None:
        super().__init__(n)
        self.cover = cover
        self.own = own

    def plan(self, k: int) -> CoveredPlan:  # type: ignore[override]  # another kind of plan
        """The coming step."""
        return CoveredPlan(self.cover, self.n, self.own, looks=self.own)


class TailoredSync(GradientSync):
    """A GradientSync whose exchange is a tailored one; nothing is kept for later."""

    def __init__(self, model: nn.Module, reduction: Reduction, **options: Any) -> None:
        super().__init__(model, scheme="dense", **options)
        parts = self._aggregator.parts
        self._aggregator = Aggregator(
            parts,
            scorer=Magnitude(parts.residual, parts.backend),
            selection=Covered(reduction.cover(model, self._layout), self._layout.size, own=reduction.own),
            reducer=OwnByOwner(find_codec("fp32")) if reduction.own else ByMpi(),
            stages=[Dropped()],
        )
        self._gradients.add = self._aggregator.add


def _masked(model: nn.Module, layout: Layout) -> Cover:
    """Of a layer with a mask, only the weights that are there."""
    masks = {id(part.weight): part.mask for part in model.modules() if isinstance(part, PrunedLinear)}
    parts = []
    for slot, p in zip(layout.slots, layout.params, strict=True):
        mask = masks.get(id(p))
        inside = np.arange(slot.end - slot.begin) if mask is None else mask.flatten().nonzero()[:, 0].numpy()
        parts.append(slot.begin + inside)
    index = np.concatenate(parts)
    return lambda exchange, notice: index


def _used(model: nn.Module, layout: Layout) -> Cover:
    """Only parameters that have a gradient on some rank."""

    def cover(exchange: Exchange, notice: Notice) -> Ints:
        used = exchange.allreduce_((~notice.unused).astype(np.uint8), "or").astype(bool)
        parts = [np.arange(s.begin, s.end) for s, use in zip(layout.slots, used.tolist(), strict=True) if use]
        return np.concatenate([NONE.index, *parts])

    return cover


def _touched(model: nn.Module, layout: Layout) -> Cover:
    """What is not zero on this rank: of an embedding, the rows that it looked up."""
    return np.flatnonzero


by_mask = Reduction(_masked)
by_use = Reduction(_used)
by_rows = Reduction(_touched, own=True)
