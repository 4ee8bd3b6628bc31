"""Scheme auto at work: it measures its first steps, chooses an exchange, and looks again when steps take longer or shorter.

How one exchange replaces another is in changing, when there is good reason to in judge, what was chosen so far in course.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np
import torch

from mpisparse.arrays import Bools, Floats, State
from mpisparse.backends.flat import Pieces
from mpisparse.comm.agreement import Notice
from mpisparse.core import step
from mpisparse.core.records import Delivered, Parts, Works
from mpisparse.core.step import Clock
from mpisparse.errors import ConfigurationError
from mpisparse.measures import PREDICTED
from mpisparse.plan import choices
from mpisparse.plan.candidates import BY_NAME, NODES, WEIGHTS, Candidate, first
from mpisparse.plan.changing import Changing
from mpisparse.plan.course import Course, Files
from mpisparse.plan.judge import Judge, checked_measurement
from mpisparse.plan.making import Makes
from mpisparse.plan.predict import Window
from mpisparse.plan.telling import Chosen, discontinuity, say, told
from mpisparse.schemes.companion import Companion, Site
from mpisparse.schemes.optimizers import is_adaptive

WARM = 4  # steps before the first choice, beside one that is not timed
WINDOW = 50  # steps from one look at the times to the next
FROZEN = "parameters that are frozen"


class Bounds(Makes, Files, Protocol):
    """What may be chosen, and how it is put together: the options of scheme auto."""

    @property
    def density(self) -> float: ...
    @property
    def slowdown(self) -> float: ...
    def suiting(self, *, plain: bool, weights: bool) -> Iterator[Candidate]: ...


class Choosing(Changing):
    """Changes to what it chooses by times, or replays."""

    def __init__(self, parts: Parts, site: Site, options: Bounds, unfit: str) -> None:
        super().__init__(parts, site, options, unfit)
        self.options = options
        self.judge = Judge(parts.exchange, len(parts.residual), options.slowdown, self.making.nodes)
        self.course = Course(parts.exchange, parts.slots, options, self.barred)
        known = list(options.suiting(plain=False, weights=False))
        self.begin_with(self.course.begun(known[0] if parts.exchange.size == 1 else first(known)))
        self._due = 1 + WARM  # the number of steps after which times are looked at: the same on all ranks
        self._why = "replayed"  # what is pending
        self._predicted: dict[str, float] = {}
        self._sparse = False  # whether any gradient was a sparse tensor
        self._tell()

    # A step

    def agreement(self, works: Works, notice: Notice, clock: Clock, peek: step.Peek | None = None) -> Bools | None:
        """Agree as any step does, and note how long this rank computed and waited; collective."""
        self.times.called()
        before = self.now
        used = super().agreement(works, notice, clock, peek)
        self.times.agreed()
        if self.now != before:
            self._tell()
            say(self.parts.exchange, self.now, self.steps, f"{before.name} does not go with {FROZEN}")
        return used

    def one_step(self, works: Works, pieces: Pieces | None, notice: Notice, clock: Clock) -> Delivered | None:
        """Do a step as any other; then choose for the next one, if it is time. Collective."""
        self._sparse = self._sparse or self._finds_sparse(pieces)
        delivered = super().one_step(works, pieces, notice, clock)
        self.times.exchanged(self.now.every)
        self._look(self.steps)
        self.times.ended()
        return delivered

    def _finds_sparse(self, pieces: Pieces | None) -> bool:
        """Whether a gradient of this step is a sparse tensor; where weights are exchanged the optimizer has just used it."""
        if self.now.kind != WEIGHTS:
            return pieces is not None and bool(pieces.sparse)
        return any(p.grad is not None and p.grad.layout is not torch.strided for p in self.site.places.params)

    # Choosing: after a step, on all ranks alike

    def _look(self, done: int) -> None:
        """Choose for the step of this number, if it is time; collective."""
        course = self.course
        if (due := course.due(done)) is not None:
            self._why = "replayed"
            self.change(due)
            self._tell()
        elif done > course.until and done >= self._due and self.parts.exchange.size > 1 and self.pending is None:
            kinds = self._plain, not self._hindrance, not self._sparse
            row = np.array([len(self.times), *self.times.medians(), *kinds])
            count, computing, waiting, moving, plain, weights, strided = self.parts.exchange.allgather(row).T.tolist()
            if min(count) < WARM:  # few of the steps exchange, or a state was loaded
                return
            self.times.clear()
            course.looked = done
            known = self.options.suiting(plain=all(plain), weights=all(weights))
            both = [way for each in known for way in self._ways(each, strided=all(strided))]
            self._weigh(Window(computing, waiting, moving), done, both)
            self._due = done + self.judge.windows * WINDOW

    def _ways(self, candidate: Candidate, *, strided: bool) -> list[Candidate]:
        """A candidate in all ways in which it may be exchanged now; the same on all ranks.

        strided: no gradient is a sparse tensor, which nodes that exchange weights could not average.
        """
        nodes = self.making.nodes is not None and not self.parts.held.stretches
        nodes = nodes and (strided or candidate.kind != WEIGHTS)
        return [candidate, *([candidate.by(NODES)] if nodes else [])]

    def barred(self, candidate: Candidate) -> str:
        """Why a candidate cannot be here, whatever the optimizer; empty if it can."""
        if candidate.way == NODES and self.making.nodes is None:
            return "there are no nodes whose ranks can sum first"
        return self.unfit if candidate.kind == WEIGHTS else ""

    @property
    def _plain(self) -> bool:
        """Whether optimizers are attached, and none that divides by what it has seen of gradients."""
        return bool(self.optimizers) and not any(map(is_adaptive, self.optimizers))

    @property
    def _hindrance(self) -> str:
        """Why weights cannot be exchanged; empty if they can. What is frozen may have something that waits."""
        frozen = FROZEN if self.parts.held.stretches else ""
        return self.unfit or frozen or self.companion.hindrance

    def _weigh(self, window: Window, done: int, known: list[Candidate]) -> None:
        """Choose, the first time, and if steps are far from what was predicted; collective."""
        verdict = self.judge.verdict(window, self.now, known, choices.returns(self.course.history))
        if verdict is None:
            self.course.write(done)
            return
        self._why = verdict.says
        if verdict.candidate != self.now:
            self.change(verdict.candidate)
        self._predicted = {PREDICTED + each.candidate.name: each.step for each in verdict.predictions}
        self._tell()
        if verdict.says and self.pending is None:
            say(self.parts.exchange, self.now, done, self._why)

    def change(self, candidate: Candidate) -> None:
        self.course.note(self.steps, candidate)
        super().change(candidate)

    # Weights: after an optimizer's step

    def turned(self) -> Companion:
        """Do what is pending, if weights may be exchanged on all ranks; collective."""
        candidate, before, done = self.pending, self.now, self.steps
        assert candidate is not None
        if before.kind != WEIGHTS and self._hindered(done):
            return self.companion
        super().turned()
        self.times.clear()
        self.times.interrupted()
        self._tell()
        say(self.parts.exchange, self.now, done, self._why + discontinuity(before, candidate))
        return self.companion

    def _hindered(self, done: int) -> bool:
        """Tell whether weights cannot be exchanged on some rank, as was chosen before; collective. Then gradients are."""
        found = [why for why in self.parts.exchange.gather_texts(self._hindrance) if why]
        if found and self.options.deterministic is None:
            self._leave_out(done, found[0])
        elif any(why != FROZEN for why in found):
            raise ConfigurationError(
                f"r{self.parts.exchange.rank} | deterministic: {self.options.deterministic} has exchanges of weights, which "
                f"cannot be here: {found[0]}"
            )
        return bool(found)

    def _leave_out(self, done: int, why: str) -> None:
        """Go on with what was in use before weights were chosen; nothing later is followed. Local."""
        name, before = self.course.take_back(done, self.now)
        self.pending = None
        if before != self.now:
            self.go_on_with(before)
        self._tell()
        self._why = f"{name} does not go with {why}"
        say(self.parts.exchange, self.now, done, self._why)

    # Telling

    def _tell(self) -> None:
        """Have statistics, and the log, say what is in use, and what the last look has predicted."""
        self.told = {**told(self.now, self.judge.measured, self.course.breaks), **self._predicted}
        stages = [stage for stage in self.works.stages if not isinstance(stage, Chosen)]
        self.works.stages = (*stages, Chosen(self.now.density / self.options.density, self.told))
        self._scale()
        self.course.write(self.steps)

    # State: that of the exchange in use, what was chosen, and what it rests on

    def state(self) -> State:
        measured = self.judge.measured
        history = [list(each) for each in self.course.history]
        return {**super().state(), "history": history, "measured": None if measured is None else measured.record()}

    def check(self, state: State) -> None:
        _history(state)
        checked_measurement(state["measured"])
        super().check(state)

    def flattened(self, state: State, residual: Floats) -> State:
        history = _history(state)
        if state["pending"] is None:  # otherwise what comes next was noted, and may be as it is
            history = choices.flattened(history, _done(state))
        return {**super().flattened(state, residual), "measured": None, "history": [list(each) for each in history]}

    def of(self, state: State) -> Companion:
        self.course.leave(self.steps)
        return super().of(state)

    def load(self, state: State) -> None:
        """Take what state() gave; the residual is the caller's. Collective."""
        done, history = _done(state), _history(state)
        if self.making.nodes is None and history and BY_NAME[history[-1][1]].way == NODES:
            history = choices.flattened(history, done)
        measured = checked_measurement(state["measured"])
        self.judge.load(measured if measured is not None and measured.covers(BY_NAME[state["choice"]]) else None)
        self._predicted = {}
        self.times.clear()
        self.times.interrupted()
        self._why = "chosen before"
        self._due = done + (1 + WARM if self.judge.measured is None else WINDOW)
        self.course.load(history, done)
        if self.course.looked > done:
            self._due = self.course.looked + WINDOW
        super().load(state)
        self._tell()

    def resize(
        self, states: Mapping[int, State], residuals: Mapping[int, Floats], old: int, new: int, rank: int
    ) -> tuple[State, Floats]:
        """This rank's state and residual among `new` ranks, which measure anew."""
        state, residual = super().resize(states, residuals, old, new, rank)
        return {**state, "measured": None}, residual


def _history(state: State) -> choices.History:
    """What was chosen before a state."""
    return choices.checked(state["history"], "the history of choices in the state")


def _done(state: State) -> int:
    """The number of the optimizer's steps before a state."""
    return int(state["around"]["done"] if BY_NAME[state["choice"]].kind == WEIGHTS else state["step"])
