"""The selection of a rank's own influential weights, as whole layers or single weights, by a policy that learns."""

from __future__ import annotations

import math
from typing import Any

from mpisparse.arrays import State
from mpisparse.schemes.speculative.granularity import Filter, Filtered
from mpisparse.schemes.speculative.policy import Policy, Seen
from mpisparse.select.candidates import NONE
from mpisparse.select.own import DUE, Chooser
from mpisparse.select.pickers import Picked
from mpisparse.select.plans import Outcome
from mpisparse.select.view import Live

UNKNOWN = math.nan, math.nan, 0.0
NOTHING = Filtered(NONE.index, 0.0, (True,), ())


class Granular(Chooser):
    """Filters by score, as finely as the policy says. The lesson of a choice is how it was filtered.

    turns: every 16th step goes by magnitude, because scores that do not grow with unsent values could starve some.
    """

    def __init__(self, filter_: Filter, policy: Policy, *, turns: bool = False) -> None:
        self.filter = filter_
        self.policy = policy
        self.turns = turns

    def choose(self, live: Live, k: int, step: int) -> Picked:
        view = live.by_magnitude() if self.turns and step % DUE == DUE - 1 else live
        filtered = self.filter.run(view.keys.vector[:], k, self.policy.share(step), step)
        return Picked(filtered.index, filtered.threshold, filtered)

    def learn(self, step: int, lesson: Any, outcome: Outcome) -> None:
        loss, confidence, seconds = outcome.figures or UNKNOWN
        known = [None if math.isnan(x) else x for x in (loss, confidence)]
        self.policy.learn(Seen(step, known[0], known[1], outcome.nbytes, seconds))

    def state(self) -> State:
        return {"policy": self.policy.state()}

    def check(self, state: State) -> None:
        self.policy.check(state["policy"])

    def load(self, state: State) -> None:
        self.policy.load(state["policy"])
