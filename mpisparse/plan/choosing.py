"""An aggregator that measures its first steps, chooses an exchange, and looks again when steps take longer or shorter.

It is the aggregator of the exchange in use: a change gives it other works. Between exchanges of gradients that happens
after any step, on the same residual. To one of weights, or from there, it happens after the optimizer's step: see families.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from mpisparse.arrays import Bools, Floats, State
from mpisparse.backends.flat import Pieces
from mpisparse.comm.agreement import Notice
from mpisparse.core import step
from mpisparse.core.aggregator import Aggregator
from mpisparse.core.records import Delivered, Parts, Works
from mpisparse.core.stages import Stage
from mpisparse.core.step import Clock
from mpisparse.errors import ConfigurationError
from mpisparse.measures import PREDICTED
from mpisparse.plan import choices, families
from mpisparse.plan.candidates import ALL, BY_NAME, WEIGHTS, Candidate, first
from mpisparse.plan.judge import Judge, checked_measurement
from mpisparse.plan.predict import Window, predict
from mpisparse.schemes.companion import Companion, Scheme, Site
from mpisparse.schemes.drift.companion import check_held
from mpisparse.schemes.optimizers import is_adaptive
from mpisparse.vectors import NoSink

if TYPE_CHECKING:
    from mpisparse.schemes.options import Options

WARM = 4  # steps before the first choice, beside one that is not timed
WINDOW = 50  # steps from one look at the times to the next
EMPTYING = BY_NAME["dense fp32"]  # sends all that waits
FROZEN = "parameters that are frozen"


class Bounds(Protocol):
    """What may be chosen, and how it is put together: the options of scheme auto."""

    @property
    def density(self) -> float: ...
    @property
    def slowdown(self) -> float: ...
    @property
    def log(self) -> str | None: ...
    @property
    def deterministic(self) -> str | None: ...
    def suiting(self, *, plain: bool, weights: bool) -> Iterator[Candidate]: ...
    def of(self, candidate: Candidate) -> Options: ...


@dataclass(frozen=True)
class Chosen(Stage):
    """Tells what was chosen, and has k follow its density. scale: that density over the set one."""

    scale: float
    told: Mapping[str, float] = field(default_factory=dict)

    @property
    def k_scale(self) -> float:
        return self.scale

    def details(self) -> dict[str, float]:
        return dict(self.told)


class Choosing(Aggregator):
    """One of several aggregators at a time.

    now: the candidate in use. pending: the one that replaces it after an optimizer's step. inner: its own aggregator.
    replayed: choices by step, which are followed up to the step `until`; only later ones are made by times.
    optimizers: those attached; scaled: those with a GradScaler. unfit: why weights cannot be exchanged.
    """

    def __init__(self, parts: Parts, site: Site, options: Bounds, unfit: str) -> None:
        self.parts, self.site = parts, site
        self.options = options
        self.unfit = unfit
        self.staleness, self.density, self.last, self._damaged = 0, 1.0, None, ""
        self._polling = None
        self.optimizers: list[torch.optim.Optimizer] = []
        self.scaled: list[torch.optim.Optimizer] = []
        self.judge = Judge(parts.exchange, len(parts.residual), options.slowdown)
        self.model = choices.digest_of(parts.slots)
        self.until = -1.0
        self.replayed: dict[int, str] = {}
        self.earlier: choices.Log | None = None
        if parts.exchange.is_open:  # not where a state is only checked
            self._read()
        known = list(options.suiting(plain=False, weights=False))
        begin = known[0] if parts.exchange.size == 1 else first(known)
        begin = BY_NAME[self.replayed.get(0, begin.name)]
        self.pending: Candidate | None = begin if begin.kind == WEIGHTS else None
        self.now = begin if self.pending is None else EMPTYING
        self.companion: families.Family = families.OfGradients(self)
        self.inner = self._made(self.now).aggregator
        self.works = self.inner.works
        self.history: choices.History = [(0, begin.name)]
        self._times: list[tuple[float, float, float]] = []  # of steps: computation, waiting, exchange
        self._due = 1 + WARM  # the number of steps after which times are looked at: the same on all ranks
        self._looked = 0
        self._emptied = False  # the last step was one of EMPTYING
        self._why = "replayed"  # what is pending
        self._ended = self._begun = 0.0
        self._spent = 0.0, 0.0
        self._tell()

    def _read(self) -> None:
        """Have rank 0 read what is to be replayed, or what an earlier run chose that this one may go on with; collective."""
        if self.options.deterministic is not None:
            self.replayed = dict(choices.read_together(Path(self.options.deterministic), self.model, self.parts.exchange))
            self.until = float("inf")
            if self.unfit and _of_weights(self.replayed.values()):
                raise ConfigurationError(
                    f"deterministic: {self.options.deterministic} has exchanges of weights, which cannot be here: "
                    f"{self.unfit}"
                )
        elif self.options.log is not None and self.parts.exchange.rank == 0:
            self.earlier = choices.read_earlier(Path(self.options.log), self.model, self.parts.exchange.size)

    # A step

    def agreement(self, works: Works, notice: Notice, clock: Clock, peek: step.Peek | None = None) -> Bools | None:
        """Agree as any step does, and note how long this rank computed and waited; collective."""
        called, ended, self._ended = time.perf_counter(), self._ended, 0.0
        used = step.agree(works, notice, clock, peek)
        self._begun = time.perf_counter()
        self._spent = called - ended if ended else 0.0, self._begun - called
        return used

    def one_step(self, works: Works, pieces: Pieces | None, notice: Notice, clock: Clock) -> Delivered | None:
        """Do a step as any other; then choose for the next one, if it is time. Collective."""
        delivered = step.run(works, pieces, notice, clock)
        computing, waiting = self._spent
        if computing and self._begun:
            self._times.append((computing, waiting, time.perf_counter() - self._begun))
        self._begun = 0.0
        self._emptied = self.now == EMPTYING
        self._look(works.selection.step)
        self._ended = time.perf_counter()
        return delivered

    # Choosing: after a step, on all ranks alike

    def _look(self, done: int) -> None:
        """Choose for the step of this number, if it is time; collective."""
        if done in self.replayed:
            self._why = "replayed"
            self._change(BY_NAME[self.replayed[done]], done)
            self._tell()
        elif done > self.until and done >= self._due and self.parts.exchange.size > 1 and self.pending is None:
            own = np.median(self._times or [(0.0, 0.0, 0.0)], axis=0)
            kinds = self._plain, not self._hindrance
            computing, waiting, moving, plain, weights = self.parts.exchange.allgather(np.array([*own, *kinds])).T.tolist()
            self._times.clear()
            self._looked = done
            known = list(self.options.suiting(plain=all(plain), weights=all(weights)))
            self._weigh(Window(computing, waiting, moving), done, known)
            self._due = done + self.judge.windows * WINDOW

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
        verdict = self.judge.verdict(window, self.now, known, choices.returns(self.history))
        if verdict is None:
            self._write()
            return
        self._why = verdict.says
        if verdict.candidate != self.now:
            self._change(verdict.candidate, done)
        self._tell({PREDICTED + each.candidate.name: each.step for each in verdict.predictions})
        if verdict.says and self.pending is None:
            self._say(done)

    # Changing

    def _change(self, candidate: Candidate, done: int) -> None:
        """Exchange by another candidate from the next step on, or as soon as may be where weights are exchanged. Local."""
        self.history.append((done, candidate.name))
        gradients = WEIGHTS not in (self.now.kind, candidate.kind)
        self.pending = None if gradients else candidate
        if gradients:
            self._go_on_with(candidate)
        elif self.now.kind != WEIGHTS and self.now != EMPTYING:
            self._go_on_with(EMPTYING)

    def _go_on_with(self, candidate: Candidate) -> None:
        """Exchange gradients by another candidate. What owners remember goes to the residual. Local."""
        before, exchange = self.works, self.parts.exchange
        waiting = before.reducer.at_rest(before.reducer.state(), before.acc, exchange.rank, exchange.size)
        for stage in before.stages:
            waiting = stage.at_rest(waiting, before.acc)
        self._take(candidate)

    def _take(self, candidate: Candidate) -> Scheme:
        """Have another candidate's works, after as many steps. Local."""
        done = self.number
        self.works.scorer.close()
        made = self._made(candidate)
        self.now, self.inner, self.works = candidate, made.aggregator, made.aggregator.works
        self.works.selection.load({**self.works.selection.state(), "step": done})
        self.works.scorer.load(self.works.scorer.state())  # one that expects an empty accumulator takes note
        return made

    @property
    def turning(self) -> bool:
        """Whether the coming steps exchange weights instead of gradients, other weights, or gradients instead of these."""
        return self.pending is not None and (self.now.kind == WEIGHTS or self._emptied)

    def turned(self) -> Companion:
        """Do what is pending, after an optimizer's step; collective. Returns the companion of the coming steps."""
        candidate, before, done = self.pending, self.companion, self.number
        assert candidate is not None
        if self.now.kind != WEIGHTS and self._hindered(done):
            return before
        breaks = "" if self.now.kind == candidate.kind == WEIGHTS else _discontinuity(candidate)
        if candidate.kind != WEIGHTS:
            assert isinstance(before, families.OfWeights)
            before.end_together()
            self.parts.residual.zero_()
            self._take(candidate)
            self.companion = families.OfGradients(self)
        elif isinstance(before, families.OfWeights):
            self._other_weights(candidate, before)
        else:
            companion = self._with_weights(self._take(candidate))
            companion.begin_together(done)
        self.pending = None
        self._ended = 0.0  # this was no computation
        self._tell()
        self._say(done, breaks)
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
        at, name = self.history.pop()
        before = BY_NAME[self.history[-1][1]] if self.history else EMPTYING
        if not self.history or before != EMPTYING:
            self.history.append((at, EMPTYING.name))  # what all that waited was sent by
        if before.kind == WEIGHTS:
            before = EMPTYING
        self.pending, self.replayed, self.until, self._looked = None, {}, -1.0, done
        if before != EMPTYING:
            self.history.append((done, before.name))
            self._go_on_with(before)
        self._tell()
        self._why = f"{name} does not go with {why}"
        self._say(done)

    def _other_weights(self, candidate: Candidate, before: families.OfWeights) -> None:
        """Exchange weights by another candidate, with the same shared ones; what owners remember is kept. Local."""
        shared, reducer = self.parts.residual.clone(), self.works.reducer
        companion = self._with_weights(self._take(candidate))
        self.parts.residual.copy_(shared)
        self.works.reducer = self.works.reducer.loaded(reducer.state())
        companion.done = before.done

    def _with_weights(self, made: Scheme) -> families.OfWeights:
        """Note the companion of an exchange of weights."""
        companion: Any = made.companion
        self.companion = weights = families.OfWeights(self, companion)
        return weights

    def _made(self, candidate: Candidate, residual: torch.Tensor | None = None) -> Scheme:
        """Put a candidate's scheme together, on the same residual or another one. Local."""
        self.parts.exchange.spare = 0  # it says itself what it tells in a roll call
        parts = self.parts if residual is None else replace(self.parts, residual=residual)
        parts = replace(parts, sink=NoSink()) if candidate.kind == WEIGHTS else parts
        return self.options.of(candidate).build(parts, self.site)

    def _tried(self, candidate: Candidate) -> Aggregator:
        """The same, to look at only: what is in use goes on as it is. Local."""
        spare = self.parts.exchange.spare
        try:
            return self._made(candidate, torch.zeros_like(self.parts.residual)).aggregator
        finally:
            self.parts.exchange.spare = spare

    # Telling

    def _say(self, done: int, breaks: str = "") -> None:
        """Rank 0 prints what is in use from now on, and why."""
        if self.parts.exchange.rank == 0 and not self.parts.exchange.virtual:
            says = f"r0 | auto: {self.now.name} from step {done} on: {self._why}{breaks}"
            print(says, file=sys.stderr, flush=True)

    def _tell(self, predicted: Mapping[str, float] | None = None) -> None:
        """Have statistics, and the log, say what is in use."""
        breaks = len(choices.discontinuities(self.history))
        told: dict[str, float] = {"choice": float(ALL.index(self.now)), "discontinuities": float(breaks)}
        if self.judge.measured is not None:
            told |= {"computing_seconds": self.judge.measured.computing}
            told |= {"predicted_seconds": predict(self.now, self.judge.measured).step}
        stages = [stage for stage in self.works.stages if not isinstance(stage, Chosen)]
        chosen = Chosen(self.now.density / self.options.density, {**told, **(predicted or {})})
        self.works.stages = (*stages, chosen)
        self._scale()
        self._write()

    def _write(self) -> None:
        """Write the log on rank 0; local.

        That of an earlier run stays until this one has done a step, or follows it. One that is replayed stays.
        """
        exchange, path, replayed = self.parts.exchange, self.options.log, self.options.deterministic
        if self.earlier is not None and self.number == 0:
            return
        if path is None or (replayed is not None and os.path.realpath(path) == os.path.realpath(replayed)):
            return
        if exchange.is_open and exchange.rank == 0:
            choices.write(Path(path), self._log())

    def _log(self) -> choices.Log:
        """What was chosen, with what is still to be followed of an earlier run up to its last look."""
        coming = {} if self.options.deterministic is not None else self.replayed
        later = sorted((step, name) for step, name in coming.items() if step > self.number)
        return choices.Log([*self.history, *later], self.model, self.parts.exchange.size, self._looked)

    # State: that of the exchange in use, and what was chosen

    def state(self) -> State:
        """What the next step depends on beside the residual."""
        measured = self.judge.measured
        return {
            "step": self.number,
            "choice": self.now.name,
            "pending": None if self.pending is None else self.pending.name,
            "history": [list(each) for each in self.history],
            "measured": None if measured is None else measured.record(),
            "inner": super().state(),
        }

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
        choices.checked(state["history"], "the history of choices in the state")
        checked_measurement(state["measured"])
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
        made = self._take(candidate)
        self.companion = self._with_weights(made) if candidate.kind == WEIGHTS else families.OfGradients(self)
        return self.companion

    def load(self, state: State) -> None:
        """Take what state() gave; the residual is the caller's. Collective."""
        here = self._log()
        self.pending = None if state["pending"] is None else BY_NAME[state["pending"]]
        self.history = choices.checked(state["history"], "the history of choices in the state")
        self.judge.load(checked_measurement(state["measured"]))
        self._times.clear()
        self._ended, self._emptied, self._why = 0.0, False, "chosen before"
        done = int(state["step"])
        self._looked = done
        self._due = done + (1 + WARM if self.judge.measured is None else WINDOW)
        if self.options.deterministic is None:
            self._replay(done, here, self.earlier)
        super().load(self.inner.upgraded(_arrays(state["inner"])))
        self._tell()

    def _replay(self, done: int, *logs: choices.Log | None) -> None:
        """Follow the choices of the run that the state is of, as far as it went on after that; collective.

        logs: of runs that may be that one; those of rank 0 count.
        """
        self.replayed, self.until = {}, -1.0
        fitting = [log for log in logs if log is not None and log.looked > done and log.until(done) == self.history]
        known = [(log.looked, log.history[len(self.history) :]) for log in fitting]
        known = [(at, later) for at, later in known if not (self.unfit and _of_weights(name for _, name in later))]
        for looked, later in json.loads(self.parts.exchange.gather_texts(json.dumps(known[:1]))[0]):
            self.replayed, self.until = dict(later), looked
            self._due, self._looked = looked + WINDOW, looked

    def resize(
        self, states: Mapping[int, State], residuals: Mapping[int, Floats], old: int, new: int, rank: int
    ) -> tuple[State, Floats]:
        """This rank's state and residual among `new` ranks, which measure anew; see Aggregator."""
        one = self.upgraded(next(iter(states.values())))
        fresh = self._tried(BY_NAME[one["choice"]])
        inner = {source: _arrays(state["inner"]) for source, state in states.items()}
        merged, residual = fresh.resize(inner, residuals, old, new, rank)
        return {**one, "measured": None, "inner": merged}, residual


def _of_weights(names: Iterable[str]) -> bool:
    """Whether any of these candidates exchanges weights."""
    return any(BY_NAME[name].kind == WEIGHTS for name in names)


def _discontinuity(candidate: Candidate) -> str:
    """What a change between gradients and weights does, in words."""
    if candidate.kind == WEIGHTS:
        return "; a discontinuity: all that waits was sent first; evaluate and save inside `with sync.global_weights():`"
    return "; a discontinuity: weights and the optimizers' states become their means"


def _arrays(state: State) -> State:
    """A state whose vectors may be tensors, with arrays."""
    return {key: value.cpu().numpy() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
