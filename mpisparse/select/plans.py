"""What a selection passes to the step: a plan before the pass, and the ranks' agreement after it.

A Selection keeps its state between steps and is local. The Plan that it makes for a step is frozen; its `agree` is
collective, reads only its arguments and changes nothing, so it may run in a thread while the next step is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from mpisparse.arrays import Ints, State
from mpisparse.comm.regions import Region, even_regions
from mpisparse.select.candidates import NONE, Candidates

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.agreement import Notice
    from mpisparse.comm.exchange import Exchange
    from mpisparse.select.view import Live, View


class Agreed(NamedTuple):
    """What the ranks agreed to send. All but `mine` is the same on all ranks.

    mine: the elements that this rank selected. workloads: how many each rank selected. regions: which rank sums what. union:
    the elements that are sent, if ranks know them without a message. own: each rank sends its own elements, not the union.
    k: how many were wanted, if that differs from the set k. lesson: what the selection learns from.
    """

    mine: Candidates
    threshold: float
    workloads: Ints
    regions: list[Region]
    union: Any = None
    own: bool = False
    reselected: int = 0
    refined: int = 0
    k: int | None = None
    lesson: Any = None


def nothing_agreed(n: int, size: int) -> Agreed:
    """An agreement to send nothing."""
    idle = np.zeros(size, dtype=np.int64)
    return Agreed(NONE, 0.0, idle, even_regions(n, size), union=NONE.index)


class Outcome(NamedTuple):
    """The outcome of an exchange: the mean's index, bytes per rank if sizes travel, and means of the ranks' figures."""

    index: Ints  # type: ignore[assignment]  # hides tuple.index
    nbytes: int
    figures: tuple[float, ...]


class Plan(Protocol):
    """One step's selection: where to collect candidates (`scope`), the key they must reach (`floor`), and how to agree.

    own: the values to send are known when a delivery starts, as when each rank sends its own elements. looks: deliver
    gets what look() returns, not the accumulator.
    """

    @property
    def own(self) -> bool: ...
    @property
    def looks(self) -> bool: ...
    @property
    def scope(self) -> tuple[int, int]: ...
    @property
    def floor(self) -> float: ...

    def look(self, live: Live, notice: Notice) -> View:
        """Return what deliver may read, after the pass; local."""
        ...

    def agree(self, exchange: Exchange, backend: Backend, notice: Notice, view: View) -> Agreed:
        """Agree on what is sent. Raises StepRefused on all ranks if any has seen a non-finite value. Collective."""
        ...

    def united(self, agreed: Agreed, union: Ints) -> Agreed:
        """Return the agreement with the united indices of all ranks; local."""
        ...


class Selection(Protocol):
    """Plans where and how many elements each step selects, and learns from it. `step` counts the steps done.

    added: keys of state() that earlier versions did not save, with the values that they had then.
    """

    @property
    def step(self) -> int: ...
    @property
    def added(self) -> State: ...
    def plan(self, k: int) -> Plan: ...
    def learn(self, agreed: Agreed, outcome: Outcome) -> None: ...
    def state(self) -> State: ...
    def check(self, state: State) -> None: ...
    def load(self, state: State) -> None: ...
    def resize(self, states: Sequence[State]) -> State: ...

    def packed(self, agreed: Agreed) -> State:
        """An agreement in flight as plain values and arrays."""
        ...

    def unpacked(self, state: State) -> Agreed:
        """The agreement that packed() packed, as far as settling needs it."""
        ...


def pack_agreed(agreed: Agreed) -> State:
    """What all kinds of agreements have in common, as plain values and arrays."""
    return {
        "threshold": agreed.threshold,
        "workloads": agreed.workloads,
        "ranks": np.array([r.rank for r in agreed.regions], dtype=np.int64),
        "bounds": np.array([0, *(r.hi for r in agreed.regions)], dtype=np.int64),
        "union": agreed.union,
        "k": agreed.k,
    }


def unpack_agreed(state: State, **more: Any) -> Agreed:
    """The agreement that pack_agreed() packed."""
    bounds, ranks = np.asarray(state["bounds"]).tolist(), np.asarray(state["ranks"]).tolist()
    regions = [Region(rank, lo, hi) for rank, lo, hi in zip(ranks, bounds[:-1], bounds[1:], strict=True)]
    union = np.asarray(state["union"], dtype=np.int64)
    workloads = np.asarray(state["workloads"], dtype=np.int64)
    return Agreed(NONE, float(state["threshold"]), workloads, regions, union=union, k=state["k"], **more)
