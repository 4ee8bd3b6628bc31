"""Selection inside exclusive regions: one threshold for all ranks, each of which selects where no other does."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from mpisparse.core.agree import Inputs, share_counts
from mpisparse.core.records import Chosen, Clock, Parts, imbalance
from mpisparse.select.candidates import Found, count_ties, drop_ties
from mpisparse.select.fill import ascending_shares, fill, is_short
from mpisparse.select.scorers import Magnitude
from mpisparse.select.search import Candidates, Scope, Search, Settled, Settlement, both, not_poor
from mpisparse.select.selector import ExclusiveSelector
from mpisparse.select.threshold import TINY, Rungs
from mpisparse.wire.indices import unite

NO_RUNGS: Rungs = np.empty(0, dtype=np.float32)
BALANCED, DRAWS = 0.1, 3  # borders are drawn anew until the imbalance is at most so much, at most so often


@dataclass(frozen=True)
class _Last:
    """What adapt() needs of the step that is being done; `settled` is None if it says nothing of the next threshold."""

    settled: Settled[Found] | None
    union: np.ndarray[Any, np.dtype[np.int64]]
    k: int


def settle_in_regions(
    search: Search[Scope, Candidates], selector: ExclusiveSelector, scope: Scope, rungs: Rungs, found: Candidates
) -> Settled[Candidates]:
    """Agree on the threshold; where borders are drawn in the step, once for them and once inside them."""
    settled = search.settle(scope, rungs, found, everywhere=selector.in_step)
    everywhere, floor = settled.found, settled.rungs[0]
    draws = DRAWS if search.gathers else 1  # from sums much the same borders would come again
    able = search.able
    for _ in range(draws if selector.in_step else 0):
        counts = search.block_counts(everywhere, settled.threshold, selector.edges)
        able = search.able if search.gathers else not_poor(settled.workloads)
        selector.draw(counts, able, None if search.gathers else settled.workloads)
        mine, inside = search.inside(everywhere, selector.regions())
        settled = both(settled, search.settle(mine, settled.rungs, inside))
        short = settled.workloads.sum() < search.k  # no borders help then, and candidates would be all there is
        if imbalance(settled.workloads[able]) <= BALANCED or (short and settled.rungs[0] <= TINY):
            break
        if settled.rungs[0] < floor:  # selected again below: the next borders need candidates from there
            floor = settled.rungs[0]
            everywhere = search.select(scope, float(floor))
    if len(able) < search.size:  # what only ranks without a part have must not wait
        found = search.add_poor(settled.found, settled.threshold, able, selector.regions())
        settled = both(settled, search.settle(mine, settled.rungs, found))
    return settled


class ExclusiveChooser:
    """What reaches the threshold is selected: of the scores, or (mask "gradient") of the accumulator.

    `exact`: the threshold is the score that k elements reach, by gathering all; otherwise it is found by counts.
    `keeps`: what is not sent waits. Scores that do not grow with it would let some of it wait for ever, so that every 16th
    step selects by the accumulator's magnitude.
    """

    def __init__(
        self, parts: Parts, scorer: Magnitude, selector: ExclusiveSelector, *, mask: str = "score", exact: bool = False,
        keeps: bool = True,
    ) -> None:  # fmt: skip
        self.parts = parts
        self.scorer = scorer
        self.selector = selector
        self.masked = functools.partial(Magnitude.select, scorer) if mask == "gradient" else scorer.select
        self.n = len(parts.acc)
        self.exact = exact
        self.by_ladder = mask == "score" and not exact
        self.magnitude = Magnitude(parts.residual, parts.backend)
        self.scored = self.by_ladder and type(scorer) is not Magnitude
        self.keeps = keeps
        self.last: _Last | None = None
        selector.backend = parts.backend

    @property
    def step(self) -> int:
        """The number of steps done."""
        return self.selector.step

    def choose(self, inputs: Inputs, clock: Clock) -> Chosen:
        """Accumulate, agree on a threshold, and unite what the ranks selected."""
        exchange, backend, controller = self.parts.exchange, self.parts.backend, self.selector.controller
        fills = self.by_ladder and controller.holds
        by_magnitude = fills and self.scored and self.keeps and self.selector.is_due and inputs.k < self.n
        scope, rungs = self.selector.scope(exchange.rank), NO_RUNGS if by_magnitude else self._rungs(inputs.k)
        found = self.scorer.accumulate(inputs, *(scope if len(rungs) else (0, 0)), float(rungs[0]) if len(rungs) else 0.0)
        clock.lap("accumulate")
        search = Settlement(exchange, backend, self.magnitude if by_magnitude else self.scorer, controller, inputs)
        if self.by_ladder:
            settled = settle_in_regions(search, self.selector, scope, rungs, found)
        else:
            settled = self._settle_percentile(search, inputs, scope, rungs, found)
        regions = self.selector.regions()
        sound = self._without_zeros(settled) if fills and self.scored else settled
        filled = fill(search, scope, sound, regions, self.step) if fills else settled
        clock.lap("agree")
        union, tags = unite(
            exchange, backend, filled.found, filled.threshold, regions, filled.workloads.tolist(), self.scorer.tags
        )
        if tags is not None:
            self.scorer.heard(union, tags)
        clock.lap("unite")
        tells = not by_magnitude and not (fills and is_short(search, settled))
        self.last = _Last(settled if tells else None, union, inputs.k)
        return Chosen(union, regions, filled.workloads, filled.threshold, filled.reselected, filled.refined)

    def adapt(self) -> None:
        """Go on to the next step: its controller, blocks and borders."""
        assert self.last is not None
        settled, controller = self.last.settled, self.selector.controller
        if settled is not None and self.last.k < self.n:
            controller = controller.after(settled.rungs, settled.total, settled.rung, self.last.k)
        self.selector.adapt(self.last.union, controller)
        self.last = None

    def _rungs(self, k: int) -> Rungs:
        return self.selector.controller.ladder(k) if k < self.n else np.zeros(1, dtype=np.float32)

    def _settle_percentile(
        self, search: Settlement, inputs: Inputs, scope: tuple[int, int], rungs: Rungs, found: Found
    ) -> Settled[Found]:
        """A threshold by the scores in the ranks' regions, and what reaches it in the masked vector."""
        exchange = self.parts.exchange
        if self.exact:
            rungs = np.array([self._percentile(inputs.k, scope)], dtype=np.float32)
            settled = Settled(found, rungs, 0, np.array([inputs.k]), np.zeros(exchange.size, dtype=np.int64))
        else:
            settled = search.settle(scope, rungs, found)
        selected = self.masked(*scope, settled.threshold)
        if self.exact and self.masked == self.scorer.select:
            selected = self._first_of_equals(inputs.k, selected, settled.threshold)
        counts = np.array([len(selected.index)], dtype=np.int64)
        return replace(settled, found=selected, workloads=share_counts(exchange, inputs, counts, self.n)[:, 0])

    def _without_zeros(self, settled: Settled[Found]) -> Settled[Found]:
        """Leave out what has a score and nothing in the accumulator: it would be sent in place of something. Collective."""
        exchange, residual = self.parts.exchange, self.parts.residual
        selected = settled.found.on_host(self.parts.backend).reaching(settled.threshold)
        held = residual.index_select(0, torch.from_numpy(selected.index).to(residual.device)).cpu().numpy() != 0.0
        counts = exchange.allgather(np.array([len(held), np.count_nonzero(held)], dtype=np.int64))
        if (counts[:, 0] == counts[:, 1]).all():
            return settled
        kept = Found(selected.index[held], selected.magnitude[held])
        return replace(settled, found=kept.on_device(self.parts.backend), workloads=counts[:, 1])

    def _percentile(self, k: int, scope: tuple[int, int]) -> float:
        """The score that k of all ranks' scores in their regions reach: by gathering and sorting all, for tests."""
        regions = sorted(self.selector.regions(), key=lambda r: r.rank)
        mine = self.parts.backend.to_host(self.scorer.select(*scope, 0.0).magnitude).view(np.uint8)
        every = self.parts.exchange.allgatherv(mine, [4 * (r.hi - r.lo) for r in regions], [4 * r.lo for r in regions])
        return max(float(np.partition(every.view(np.float32), self.n - k)[self.n - k]), TINY)

    def _first_of_equals(self, k: int, selected: Found, threshold: float) -> Found:
        """Of elements that just reach the threshold, only so many in ascending order that k are selected."""
        exchange, backend = self.parts.exchange, self.parts.backend
        on_host = selected.on_host(backend)
        rows = exchange.allgather(count_ties(on_host, threshold))
        order = [r.rank for r in self.selector.regions()]
        shares = ascending_shares(rows[order, 1], k - int(rows[:, 0].sum()))
        return drop_ties(on_host, threshold, int(shares[order.index(exchange.rank)]), 0).on_device(backend)

    def state(self) -> dict[str, Any]:
        """What the next choice depends on."""
        return {**self.selector.state(), **self.scorer.state()}

    def check(self, state: dict[str, Any]) -> None:
        """Raise ConfigurationError unless load() could take the state."""
        self.selector.check(state)
        self.scorer.check(state)

    def load(self, state: dict[str, Any]) -> None:
        """Take what state() gave."""
        self.selector.load(state)
        self.scorer.load(state)
