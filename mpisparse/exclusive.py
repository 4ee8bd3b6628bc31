"""Selection inside exclusive regions: one threshold for all ranks, each of which selects where no other does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpisparse.agree import Found, Inputs, Settled, Settlement, both, share_block_counts, share_counts
from mpisparse.parts import Chosen, Clock, Parts, imbalance
from mpisparse.rows import unite
from mpisparse.score import Magnitude
from mpisparse.selector import ExclusiveSelector
from mpisparse.threshold import TINY, Rungs

BALANCED, DRAWS = 0.1, 3  # borders are drawn anew until the imbalance is at most so much, at most so often


@dataclass
class _Last:
    """What adapt() needs of the step that is being done."""

    settled: Settled
    union: np.ndarray[Any, np.dtype[np.int64]]
    k: int


class ExclusiveChooser:
    """What reaches the threshold is selected: of the scores, or (mask "gradient") of the accumulator.

    `exact`: the threshold is the score that k elements reach, by gathering all; otherwise it is found by counts.
    """

    def __init__(
        self, parts: Parts, scorer: Magnitude, selector: ExclusiveSelector, *, mask: str = "score", exact: bool = False
    ) -> None:
        self.parts = parts
        self.scorer = scorer
        self.selector = selector
        self.masked = parts.acc if mask == "gradient" else scorer.scores
        self.exact = exact
        self.by_ladder = mask == "score" and not exact
        self.last: _Last | None = None
        selector.backend = parts.backend

    @property
    def step(self) -> int:
        """The number of steps done."""
        return self.selector.step

    def choose(self, inputs: Inputs, clock: Clock) -> Chosen:
        """Accumulate, agree on a threshold, and unite what the ranks selected."""
        exchange, backend = self.parts.exchange, self.parts.backend
        scope, rungs = self.selector.scope(exchange.rank), self._rungs(inputs.k)
        found = self.scorer.accumulate(inputs, *(scope if len(rungs) else (0, 0)), float(rungs[0]) if len(rungs) else 0.0)
        clock.lap("accumulate")
        settled = (self._settle if self.by_ladder else self._settle_percentile)(inputs, scope, rungs, found)
        regions = self.selector.regions()
        clock.lap("agree")
        union = unite(exchange, backend, settled.found, settled.threshold, regions, settled.workloads.tolist())
        clock.lap("unite")
        self.last = _Last(settled, union, inputs.k)
        return Chosen(union, regions, settled.workloads, settled.threshold, settled.reselected, settled.refined)

    def adapt(self) -> None:
        """Go on to the next step: its controller, blocks and borders."""
        assert self.last is not None
        settled, controller = self.last.settled, self.selector.controller
        if self.last.k < len(self.scorer.scores):
            controller = controller.after(settled.rungs, settled.total, settled.rung, self.last.k)
        self.selector.adapt(self.last.union, controller)
        self.last = None

    def _rungs(self, k: int) -> Rungs:
        return self.selector.controller.ladder(k) if k < len(self.scorer.scores) else np.zeros(1, dtype=np.float32)

    def _settle(self, inputs: Inputs, scope: tuple[int, int], rungs: Rungs, found: Found) -> Settled:
        """Agree on the threshold; where borders are drawn in the step, once for them and once inside them."""
        exchange, selector = self.parts.exchange, self.selector
        settlement = Settlement(exchange, self.parts.backend, self.scorer.scores, selector.controller, inputs)
        settled = settlement.settle(scope, rungs, found, everywhere=selector.in_step)
        everywhere, floor = settled.found, settled.rungs[0]
        for _ in range(DRAWS if selector.in_step else 0):
            selector.draw(share_block_counts(exchange, self.parts.backend, everywhere, settled.threshold, selector.edges))
            mine = next((r.lo, r.hi) for r in selector.regions() if r.rank == exchange.rank)
            settled = both(settled, settlement.settle(mine, settled.rungs, everywhere.within(self.parts.backend, *mine)))
            if imbalance(settled.workloads) <= BALANCED:
                break
            if settled.rungs[0] < floor:  # selected again below: the next borders need candidates from there
                floor = settled.rungs[0]
                everywhere = Found(*self.parts.backend.select(self.scorer.scores, *scope, float(floor)))
        return settled

    def _settle_percentile(self, inputs: Inputs, scope: tuple[int, int], rungs: Rungs, found: Found) -> Settled:
        """A threshold by the scores in the ranks' regions, and what reaches it in the masked vector."""
        exchange, backend, scores = self.parts.exchange, self.parts.backend, self.scorer.scores
        if self.exact:
            rungs = np.array([self._percentile(inputs.k, scope)], dtype=np.float32)
            settled = Settled(found, rungs, 0, np.array([inputs.k]), np.zeros(exchange.size, dtype=np.int64))
        else:
            settled = Settlement(exchange, backend, scores, self.selector.controller, inputs).settle(scope, rungs, found)
        selected = Found(*backend.select(self.masked, *scope, settled.threshold))
        counts = np.array([len(selected.index)], dtype=np.int64)
        return replace(settled, found=selected, workloads=share_counts(exchange, inputs, counts, len(scores))[:, 0])

    def _percentile(self, k: int, scope: tuple[int, int]) -> float:
        """The score that k of all ranks' scores in their regions reach: by gathering and sorting all, for tests."""
        regions = sorted(self.selector.regions(), key=lambda r: r.rank)
        mine = self.parts.backend.to_host(self.scorer.scores[slice(*scope)]).view(np.uint8)
        every = self.parts.exchange.allgatherv(mine, [4 * (r.hi - r.lo) for r in regions], [4 * r.lo for r in regions])
        n = len(self.scorer.scores)
        return max(float(np.partition(np.abs(every.view(np.float32)), n - k)[n - k]), TINY)

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
