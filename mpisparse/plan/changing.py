"""An aggregator that is the one of the exchange in use: a change gives it other works.

Between exchanges of gradients that happens after any step, on the same residual. To one of weights, or from there, it
happens after the optimizer's step: see families. Where nodes sum first, ranks share out the residual of their node; to
change from there to an exchange between all ranks, each takes its shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mpisparse.arrays import Bools, Floats, State
from mpisparse.backends.flat import Pieces
from mpisparse.comm.agreement import Notice
from mpisparse.core.aggregator import Aggregator
from mpisparse.core.by_node import ByNode
from mpisparse.core.records import Delivered, Parts, Stats, Works
from mpisparse.core.step import Clock, Peek
from mpisparse.errors import ConfigurationError
from mpisparse.plan import families
from mpisparse.plan.candidates import BY_NAME, EMPTYING, FLAT, WEIGHTS, Candidate
from mpisparse.plan.making import Makes, Making
from mpisparse.plan.times import Times
from mpisparse.schemes.companion import Companion, Scheme, Site
from mpisparse.schemes.drift.companion import check_held


class Changing(Aggregator):
    """One of several aggregators at a time.

    now: the candidate in use. pending: the one that replaces it after an optimizer's step. inner: its own aggregator.
    emptied: the last step was one of EMPTYING.
    told: what statistics say of it. times: how long the parts of its steps took.
    optimizers: those attached; scaled: those with a GradScaler. unfit: why weights cannot be exchanged.
    making: puts candidates together.
    """

    def __init__(self, parts: Parts, site: Site, makes: Makes, unfit: str) -> None:
        self.parts, self.site, self.making, self.unfit = parts, site, Making(parts, site, makes), unfit
        self.staleness, self.density, self.last, self._damaged = 0, 1.0, None, ""
        self._polling = None
        self.optimizers: list[torch.optim.Optimizer] = []
        self.scaled: list[torch.optim.Optimizer] = []
        self.told: Mapping[str, float] = {}
        self.times = Times()
        self.companion: families.Family = families.OfGradients(self)

    def begin_with(self, candidate: Candidate) -> None:
        """Exchange by a first candidate: one of weights after a step that sends whole gradients. Local."""
        self.pending = candidate if candidate.kind == WEIGHTS else None
        self.now = candidate if self.pending is None else EMPTYING.by(candidate.way)
        self.inner = self._did = self.making.made(self.now).aggregator
        self.works = self.inner.works
        self.emptied = False

    # A step, by the exchange in use

    def agreement(self, works: Works, notice: Notice, clock: Clock, peek: Peek | None = None) -> Bools | None:
        """Agree as any step does. What waits of frozen parameters must not be shared out over a node; collective."""
        if self.now.kind == WEIGHTS or not isinstance(self.inner, ByNode):
            return self.inner.agreement(works, notice, clock, peek)
        used = self.inner.readiness(notice, clock)
        if self.parts.held.stretches:  # the same on all ranks
            self.go_on_with(self.now.flat)
        return used

    def one_step(self, works: Works, pieces: Pieces | None, notice: Notice, clock: Clock) -> Delivered | None:
        """Do a step as any other; collective."""
        self._did = self.inner
        delivered = self.inner.one_step(works, pieces, notice, clock)
        self.emptied = self.now.flat == EMPTYING
        return delivered

    def stats(
        self, number: int, notice: Notice, delivered: Delivered | None, seconds: dict[str, float], details: dict[str, float]
    ) -> Stats:
        """What a step did, by the exchange that did it."""
        return self._did.stats(number, notice, delivered, seconds, details)

    @property
    def residual(self) -> torch.Tensor:
        """What was added and not sent yet; a copy where nodes sum first."""
        return self.inner.residual

    def restore(self, residual: torch.Tensor) -> None:
        """Restore a saved `residual`; collective."""
        self.inner.restore(residual)

    def _free(self) -> None:
        if self.making.nodes is not None:
            self.making.nodes.close()

    # Changing

    def change(self, candidate: Candidate) -> None:
        """Exchange by another candidate from the next step on, or as soon as may be where weights are exchanged. Local."""
        gradients = WEIGHTS not in (self.now.kind, candidate.kind)
        self.pending = None if gradients else candidate
        if gradients:
            self.go_on_with(candidate)
        elif self.now.kind != WEIGHTS and self.now.flat != EMPTYING:
            self.go_on_with(EMPTYING.by(self.now.way))

    def go_on_with(self, candidate: Candidate) -> None:
        """Exchange gradients by another candidate; collective inside a node if it is one of nodes, otherwise local.

        While parameters are frozen it is exchanged flat: what waits of them stays with each rank.
        """
        self._bring_home()
        self._take(candidate.flat if self.parts.held.stretches else candidate)
        self.inner.restore(self.parts.residual)

    def _bring_home(self) -> None:
        """Have all that waits in the ranks' own residuals, also what owners remember. Local."""
        inner, works, exchange = self.inner, self.works, self.parts.exchange
        if isinstance(inner, ByNode):
            residual = inner.residual
            inner.at_rest(inner.state(), residual.numpy())
            self.parts.residual.copy_(residual)
            return
        waiting = works.reducer.at_rest(works.reducer.state(), works.acc, exchange.rank, exchange.size)
        for stage in works.stages:
            waiting = stage.at_rest(waiting, works.acc)

    @property
    def steps(self) -> int:
        """The number of the optimizer's steps; the exchanges of weights may be fewer."""
        return self.companion.done if isinstance(self.companion, families.OfWeights) else self.number

    @property
    def turning(self) -> bool:
        """Whether the coming steps exchange weights instead of gradients, other weights, or gradients instead of these."""
        return self.pending is not None and (self.now.kind == WEIGHTS or self.emptied)

    def turned(self) -> Companion:
        """Do what is pending, after an optimizer's step; collective. Returns the companion of the coming steps."""
        candidate, before = self.pending, self.companion
        assert candidate is not None
        if candidate.kind != WEIGHTS:
            assert isinstance(before, families.OfWeights)
            before.end_together()
            self.parts.residual.zero_()
            self._take(candidate)
            self.companion = families.OfGradients(self)
        elif isinstance(before, families.OfWeights) and candidate.way == self.now.way:
            self._other_weights(candidate, before)
        else:
            if isinstance(before, families.OfWeights):
                before.end_together()
            self._with_weights(candidate).begin_together()
        self.pending = None
        return self.companion

    def _other_weights(self, candidate: Candidate, before: families.OfWeights) -> None:
        """Exchange weights by another candidate, with the same shared ones; what owners remember is kept. Collective in
        a node."""
        shared, reducer = before.shared.clone(), self.works.reducer
        self._with_weights(candidate).begin_with(shared)
        self.works.reducer = self.works.reducer.loaded(reducer.state())

    def _with_weights(self, candidate: Candidate) -> families.OfWeights:
        """Have the works of an exchange of weights, and its companion, after as many steps. Collective in a node."""
        done = self.steps
        companion: Any = self._take(candidate).companion
        kind = families.OfWeights if candidate.way == FLAT else families.OfWeightsByNode
        self.companion = weights = kind(self, companion)
        weights.done = done
        return weights

    def _take(self, candidate: Candidate) -> Scheme:
        """Have another candidate's works, after as many steps. Collective in a node if it is one of nodes."""
        done = self.steps
        self.works.scorer.close()
        made = self.making.made(candidate)
        self.now, self.inner, self.works = candidate, made.aggregator, made.aggregator.works
        self.works.selection.load({**self.works.selection.state(), "step": done})
        self.works.scorer.load(self.works.scorer.state())  # one that expects an empty accumulator takes note
        return made

    # State: that of the exchange in use

    def state(self) -> State:
        """What the next step depends on beside the residual."""
        pending = None if self.pending is None else self.pending.name
        return {"step": self.number, "choice": self.now.name, "pending": pending, "inner": self.inner.state()}

    def upgraded(self, state: State) -> State:
        return {"pending": None, **state}

    def own(self, state: State) -> State:
        return _arrays(state["inner"])

    def with_own(self, state: State, more: State) -> State:
        return {**state, "inner": {**state["inner"], **more}}

    def check(self, state: State) -> None:
        """Raise ConfigurationError unless load() could take the state."""
        named = [state["choice"], *([] if state["pending"] is None else [state["pending"]])]
        if unknown := [name for name in named if name not in BY_NAME]:
            raise ConfigurationError(f"the state is of a choice {unknown[0]!r}, which is none of {', '.join(BY_NAME)}")
        candidate = BY_NAME[state["choice"]]
        if candidate.kind == WEIGHTS:
            if self.unfit:
                raise ConfigurationError(f"the state is of an exchange of weights, which cannot be here: {self.unfit}")
            families.check_around(state["around"])
        fresh = self.making.tried(candidate, state["inner"])
        fresh.check(fresh.upgraded(_arrays(state["inner"])))

    def fitted(self, state: State, residual: torch.Tensor) -> tuple[State, torch.Tensor]:
        """A state of nodes that are not these ones becomes one of an exchange between all ranks; collective."""
        if BY_NAME[state["choice"]].way == FLAT:
            return state, residual
        here = None if self.making.nodes is None else self.making.nodes.layout
        fits = here is not None and here == {key: state["inner"]["nodes"][key] for key in here}
        if self.parts.exchange.allgather(np.array([fits], dtype=np.int64)).all():
            return state, residual
        residual = residual.clone()
        return self.flattened(state, residual.numpy()), residual

    def flattened(self, state: State, residual: Floats) -> State:
        """A state of nodes as one of an exchange between all ranks: what owners remember goes to the residual. Local."""
        candidate, inner = BY_NAME[state["choice"]], _arrays(state["inner"])
        self.making.tried(candidate, inner).at_rest(inner, residual)
        flat = {**self.making.tried(candidate.flat).state(), "step": inner["step"]}
        return {**state, "choice": candidate.flat.name, "inner": flat}

    def of(self, state: State) -> Companion:
        """Have the works that a state is of, before load(); returns their companion."""
        candidate = BY_NAME[state["choice"]]
        if candidate.kind == WEIGHTS and self.parts.exchange.is_open:
            check_held(self.parts.exchange, self.site.places.params, state["around"]["digest"])
        if candidate.kind == WEIGHTS:
            return self._with_weights(candidate)
        self._take(candidate)
        self.companion = families.OfGradients(self)
        return self.companion

    def load(self, state: State) -> None:
        """Take what state() gave; the residual is the caller's."""
        pending = None if state["pending"] is None else BY_NAME[state["pending"]]
        self.pending = pending if pending is None or self.making.nodes is not None else pending.flat
        self.emptied, self._damaged = False, ""
        self.inner.load(self.inner.upgraded(_arrays(state["inner"])))
        self._scale()

    def resize(
        self, states: Mapping[int, State], residuals: Mapping[int, Floats], old: int, new: int, rank: int
    ) -> tuple[State, Floats]:
        """This rank's state and residual among `new` ranks; see Aggregator."""
        one = self.upgraded(next(iter(states.values())))
        fresh = self.making.tried(BY_NAME[one["choice"]])
        inner = {source: _arrays(state["inner"]) for source, state in states.items()}
        merged, residual = fresh.resize(inner, residuals, old, new, rank)
        return {**one, "inner": merged}, residual


def _arrays(state: State) -> State:
    """A state whose vectors may be tensors, with arrays."""
    return {key: value.cpu().numpy() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
