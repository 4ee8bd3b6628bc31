"""Select whole groups of neighbouring elements, in exclusive regions, by one key per group."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpisparse.arrays import Ints, State
from mpisparse.comm.agreement import Notice
from mpisparse.comm.regions import Groups, Region
from mpisparse.select.around import StateInside
from mpisparse.select.exclusive import ExclusivePlan, ExclusiveSelection
from mpisparse.select.plans import Agreed, Outcome
from mpisparse.select.view import Live, View

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.exchange import Exchange


class GroupPlan(NamedTuple):
    """One step: the plan for a vector with one element per group, whose union is then expanded to the groups' elements.

    to_host: the backend's.
    """

    inner: ExclusivePlan
    n: int
    width: int
    to_host: Callable[[Any], Ints]
    own: bool = False
    looks: bool = True

    @property
    def scope(self) -> tuple[int, int]:
        return self.inner.scope

    @property
    def floor(self) -> float:
        return self.inner.floor

    def look(self, live: Live, notice: Notice) -> View:
        """The groups' keys instead of the vector."""
        return live._replace(acc=live.keys.vector)

    def agree(self, exchange: Exchange, backend: Backend, notice: Notice, view: View) -> Agreed:
        """Agree on a threshold for groups. Collective."""
        agreed = self.inner.agree(exchange, backend, notice._replace(k=self.inner.k), view)
        return agreed if agreed.union is None else self.united(agreed, agreed.union)

    def united(self, agreed: Agreed, union: Ints) -> Agreed:
        """Count elements, not groups."""
        scaled = [Region(r.rank, r.lo * self.width, min(r.hi * self.width, self.n)) for r in agreed.regions]
        chosen = Groups(self.n, self.width, self.to_host(union))
        return agreed._replace(union=chosen, regions=scaled, workloads=agreed.workloads * self.width)


class GroupSelection(StateInside):
    """Plans each step's selection of groups of `width` neighbours; `inner` selects among them."""

    inner: ExclusiveSelection

    def __init__(self, inner: ExclusiveSelection, n: int, width: int) -> None:
        self.inner = inner
        self.n = n
        self.width = width

    @property
    def step(self) -> int:
        return self.inner.step

    @property
    def added(self) -> State:
        return self.inner.added

    def plan(self, k: int) -> GroupPlan:
        """Plan the coming step, with as many groups as k elements fill."""
        groups = self.inner.selector.n
        plan = self.inner.plan(min(groups, max(1, round(k / self.width))))
        return GroupPlan(plan, self.n, self.width, self.inner.backend.to_host)

    def learn(self, agreed: Agreed, outcome: Outcome) -> None:
        """Go on to the next step."""
        self.inner.learn(agreed._replace(union=self.inner.backend.from_host(agreed.union.numbers)), outcome)

    def packed(self, agreed: Agreed) -> State:
        raise NotImplementedError  # groups are never in flight

    def unpacked(self, state: State) -> Agreed:
        raise NotImplementedError


def count_of(n: int, width: int) -> int:
    """How many groups n elements make."""
    return int(np.ceil(n / width))
