"""Select everything: the whole vector in every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpisparse.arrays import Floats, Ints, State
from mpisparse.comm.agreement import FINE, Notice
from mpisparse.select.candidates import NONE
from mpisparse.select.plans import Agreed, Outcome
from mpisparse.select.search import share_counts
from mpisparse.select.view import Live, View

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.exchange import Exchange

NO_VALUES: Floats = np.empty(0, dtype=np.float32)


def everything(n: int) -> Agreed:
    """The agreement to send all elements: nobody has selected any."""
    return Agreed(NONE, 0.0, np.zeros(1, dtype=np.int64), [], union=range(n))


class EverythingPlan(NamedTuple):
    """One step in which all is sent; `own` in flight."""

    n: int
    own: bool = False
    looks: bool = True
    scope: tuple[int, int] = (0, 0)  # no candidates are collected in the pass
    floor: float = 0.0

    def look(self, live: Live, notice: Notice) -> View:
        """All that the scorer compares by; a copy in flight."""
        if not self.own:
            return live._replace(take=lambda _: live.keys.vector)
        values = live.keys.vector.copy() if notice.status == FINE else NO_VALUES  # which is refused before it is read
        return live._replace(take=lambda _: values)

    def agree(self, exchange: Exchange, backend: Backend, notice: Notice, view: View) -> Agreed:
        """Agree that all values are finite; collective."""
        share_counts(exchange, notice, NONE.index, self.n)
        return everything(self.n)

    def united(self, agreed: Agreed, union: Ints) -> Agreed:
        """There is nothing to unite."""
        return agreed


class Everything:
    """The whole vector, from step to step. late: deliver gets a copy of it."""

    def __init__(self, n: int, *, late: bool = False) -> None:
        self.n = n
        self.late = late
        self.step = 0

    def plan(self, k: int) -> EverythingPlan:
        """The coming step."""
        return EverythingPlan(self.n, own=self.late)

    def learn(self, agreed: Agreed, outcome: Outcome) -> None:
        """Go on to the next step."""
        self.step += 1

    def state(self) -> State:
        """What the next step depends on."""
        return {"step": self.step}

    def check(self, state: State) -> None:
        """Raise unless load() could take the state."""
        int(state["step"])

    def load(self, state: State) -> None:
        """Take what state() gave."""
        self.step = int(state["step"])

    def resize(self, states: Sequence[State]) -> State:
        """All ranks have done the same steps."""
        return {"step": states[0]["step"]}

    def packed(self, agreed: Agreed) -> State:
        """An agreement in flight as plain values: there is nothing to agree on."""
        return {}

    def unpacked(self, state: State) -> Agreed:
        """What packed() was given."""
        return everything(self.n)
