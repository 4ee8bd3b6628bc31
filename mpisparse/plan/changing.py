"""An aggregator that is the one of the exchange in use: a change gives it other works.

Between exchanges of gradients that happens after any step, on the same residual. To one of weights, or from there, it
happens after the optimizer's step: see families.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mpisparse.arrays import Floats, State
from mpisparse.backends.flat import Pieces
from mpisparse.comm.agreement import Notice
from mpisparse.core import step
from mpisparse.core.aggregator import Aggregator
from mpisparse.core.records import Delivered, Parts, Works
from mpisparse.core.step import Clock
from mpisparse.errors import ConfigurationError
from mpisparse.plan import families
from mpisparse.plan.candidates import BY_NAME, EMPTYING, WEIGHTS, Candidate
from mpisparse.schemes.companion import Companion, Scheme, Site
from mpisparse.schemes.drift.companion import check_held
from mpisparse.vectors import NoSink

if TYPE_CHECKING:
    from mpisparse.schemes.options import Options


class Makes(Protocol):
    """How a candidate is put together: the options of its scheme."""

    def of(self, candidate: Candidate) -> Options: ...


class Changing(Aggregator):
    """One of several aggregators at a time.

    now: the candidate in use. pending: the one that replaces it after an optimizer's step. inner: its own aggregator.
    emptied: the last step was one of EMPTYING.
    told: what statistics say of it.
    optimizers: those attached; scaled: those with a GradScaler. unfit: why weights cannot be exchanged.
    """

    def __init__(self, parts: Parts, site: Site, makes: Makes, unfit: str) -> None:
        self.parts, self.site, self.makes, self.unfit = parts, site, makes, unfit
        self.staleness, self.density, self.last, self._damaged = 0, 1.0, None, ""
        self._polling = None
        self.optimizers: list[torch.optim.Optimizer] = []
        self.scaled: list[torch.optim.Optimizer] = []
        self.told: Mapping[str, float] = {}
        self.companion: families.Family = families.OfGradients(self)

    def begin_with(self, candidate: Candidate) -> None:
        """Exchange by a first candidate: one of weights after a step that sends whole gradients. Local."""
        self.pending = candidate if candidate.kind == WEIGHTS else None
        self.now = candidate if self.pending is None else EMPTYING
        self.inner = self._made(self.now).aggregator
        self.works = self.inner.works
        self.emptied = False

    def one_step(self, works: Works, pieces: Pieces | None, notice: Notice, clock: Clock) -> Delivered | None:
        """Do a step as any other; collective."""
        delivered = step.run(works, pieces, notice, clock)
        self.emptied = self.now == EMPTYING
        return delivered

    # Changing

    def change(self, candidate: Candidate) -> None:
        """Exchange by another candidate from the next step on, or as soon as may be where weights are exchanged. Local."""
        gradients = WEIGHTS not in (self.now.kind, candidate.kind)
        self.pending = None if gradients else candidate
        if gradients:
            self.go_on_with(candidate)
        elif self.now.kind != WEIGHTS and self.now != EMPTYING:
            self.go_on_with(EMPTYING)

    def go_on_with(self, candidate: Candidate) -> None:
        """Exchange gradients by another candidate. What owners remember goes to the residual. Local."""
        before, exchange = self.works, self.parts.exchange
        waiting = before.reducer.at_rest(before.reducer.state(), before.acc, exchange.rank, exchange.size)
        for stage in before.stages:
            waiting = stage.at_rest(waiting, before.acc)
        self._take(candidate)

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
        elif isinstance(before, families.OfWeights):
            self._other_weights(candidate)
        else:
            self._with_weights(candidate).begin_together()
        self.pending = None
        return self.companion

    def _other_weights(self, candidate: Candidate) -> None:
        """Exchange weights by another candidate, with the same shared ones; what owners remember is kept. Local."""
        shared, reducer = self.parts.residual.clone(), self.works.reducer
        self._with_weights(candidate)
        self.parts.residual.copy_(shared)
        self.works.reducer = self.works.reducer.loaded(reducer.state())

    def _with_weights(self, candidate: Candidate) -> families.OfWeights:
        """Have the works of an exchange of weights, and its companion, after as many steps. Local."""
        done = self.steps
        companion: Any = self._take(candidate).companion
        self.companion = weights = families.OfWeights(self, companion)
        weights.done = done
        return weights

    def _take(self, candidate: Candidate) -> Scheme:
        """Have another candidate's works, after as many steps. Local."""
        done = self.steps
        self.works.scorer.close()
        made = self._made(candidate)
        self.now, self.inner, self.works = candidate, made.aggregator, made.aggregator.works
        self.works.selection.load({**self.works.selection.state(), "step": done})
        self.works.scorer.load(self.works.scorer.state())  # one that expects an empty accumulator takes note
        return made

    def _made(self, candidate: Candidate, residual: torch.Tensor | None = None) -> Scheme:
        """Put a candidate's scheme together, on the same residual or another one. Local."""
        self.parts.exchange.spare = 0  # it says itself what it tells in a roll call
        parts = self.parts if residual is None else replace(self.parts, residual=residual)
        parts = replace(parts, sink=NoSink()) if candidate.kind == WEIGHTS else parts
        return self.makes.of(candidate).build(parts, self.site)

    def _tried(self, candidate: Candidate) -> Aggregator:
        """The same, to look at only: what is in use goes on as it is. Local."""
        spare = self.parts.exchange.spare
        try:
            return self._made(candidate, torch.zeros_like(self.parts.residual)).aggregator
        finally:
            self.parts.exchange.spare = spare

    # State: that of the exchange in use

    def state(self) -> State:
        """What the next step depends on beside the residual."""
        pending = None if self.pending is None else self.pending.name
        return {"step": self.number, "choice": self.now.name, "pending": pending, "inner": super().state()}

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
        fresh = self._tried(candidate)
        fresh.check(fresh.upgraded(_arrays(state["inner"])))

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
        self.pending = None if state["pending"] is None else BY_NAME[state["pending"]]
        self.emptied = False
        super().load(self.inner.upgraded(_arrays(state["inner"])))

    def resize(
        self, states: Mapping[int, State], residuals: Mapping[int, Floats], old: int, new: int, rank: int
    ) -> tuple[State, Floats]:
        """This rank's state and residual among `new` ranks; see Aggregator."""
        one = self.upgraded(next(iter(states.values())))
        fresh = self._tried(BY_NAME[one["choice"]])
        inner = {source: _arrays(state["inner"]) for source, state in states.items()}
        merged, residual = fresh.resize(inner, residuals, old, new, rank)
        return {**one, "inner": merged}, residual


def _arrays(state: State) -> State:
    """A state whose vectors may be tensors, with arrays."""
    return {key: value.cpu().numpy() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
