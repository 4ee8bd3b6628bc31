"""What a run has chosen so far, what it is still to follow of an earlier run, and the file that has both."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from mpisparse.backends.flat import Slot
from mpisparse.comm.exchange import Exchange
from mpisparse.errors import ConfigurationError
from mpisparse.plan import choices
from mpisparse.plan.candidates import BY_NAME, WEIGHTS, Candidate


class Files(Protocol):
    """Where choices are written, and which are to be replayed."""

    @property
    def log(self) -> str | None: ...
    @property
    def deterministic(self) -> str | None: ...


class Course:
    """The choices of a run: those that were made, and those to come of a run that is followed.

    coming: choices by step, which are followed up to the step `until`; only later ones are made by times.
    looked: the step after which the ranks looked at their times last. earlier: the log of a run that may have gone on;
    left: that of this one when a state was loaded.
    barred: why a candidate cannot be here; empty if it can.
    """

    def __init__(self, exchange: Exchange, slots: Sequence[Slot], files: Files, barred: Callable[[Candidate], str]) -> None:
        self.exchange, self.files, self.barred = exchange, files, barred
        self.model = choices.digest_of(slots)
        self.history: choices.History = []
        self.coming: dict[int, str] = {}
        self.until = -1.0
        self.looked = 0
        self.earlier: choices.Log | None = None
        self.left: choices.Log | None = None
        if exchange.is_open:  # not where a state is only checked
            self._read()

    def _read(self) -> None:
        """Have rank 0 read what is to be replayed, or what an earlier run chose that this one may go on with; collective."""
        replayed, log = self.files.deterministic, self.files.log
        if log is not None and (replayed is None or Path(log) != Path(replayed)):
            earlier = choices.read_earlier(Path(log), self.model, self.exchange)
            self.earlier = earlier if replayed is None else None
        if replayed is not None:
            self.coming = dict(choices.read_together(Path(replayed), self.model, self.exchange))
            self.until = float("inf")
            for candidate in map(BY_NAME.__getitem__, self.coming.values()):
                if why := self.barred(candidate):
                    what = "exchanges of weights, which" if candidate.kind == WEIGHTS else f"{candidate.name!r}, which"
                    raise ConfigurationError(f"deterministic: {replayed} has {what} cannot be here: {why}")

    def begun(self, candidate: Candidate) -> Candidate:
        """The first candidate: the given one, unless another one is to be replayed."""
        self.history = [(0, self.coming.get(0, candidate.name))]
        return BY_NAME[self.history[0][1]]

    def note(self, done: int, candidate: Candidate) -> None:
        """After so many steps a candidate was chosen."""
        self.history.append((done, candidate.name))

    def take_back(self, done: int, sent: Candidate) -> tuple[str, Candidate]:
        """Take the last choice back, an exchange of weights before which all that waited was sent; follow nothing any more.

        sent: the exchange that has sent it. Returns the name of what was taken back, and the candidate to go on with, which
        may be `sent`; between all ranks if nodes cannot be here any more.
        """
        at, name = self.history.pop()
        before = BY_NAME[self.history[-1][1]] if self.history else sent
        if not self.history or before != sent:
            self.history.append((at, sent.name))
        before = before.flat if self.barred(before) else before
        if before.kind == WEIGHTS:
            before = sent
        if before != sent:
            self.note(done, before)
        self.coming, self.until, self.looked = {}, -1.0, done
        return name, before

    @property
    def breaks(self) -> int:
        """How often the run has gone from gradients to weights or back."""
        return len(choices.discontinuities(self.history))

    def due(self, done: int) -> Candidate | None:
        """The candidate to follow after so many steps, if another one was chosen since the last one was noted."""
        since = self.history[-1][0] if self.history else -1
        steps = [step for step in self.coming if since < step <= done]
        return BY_NAME[self.coming[max(steps)]] if steps else None

    def leave(self, done: int) -> None:
        """A state will be loaded, after so many steps: it may be of this run, which it then follows."""
        self.left = self.log(done)

    def load(self, history: choices.History, done: int) -> None:
        """Go on as a state says, after so many steps; collective."""
        self.history, self.looked = history, done
        if self.files.deterministic is None:
            self._follow(done, self.left, self.earlier)

    def _follow(self, done: int, *logs: choices.Log | None) -> None:
        """Follow the choices of the run that the history is of, as far as it went on after that; collective.

        logs: of runs that may be that one; those of rank 0 count.
        """
        self.coming, self.until = {}, -1.0
        fitting = [log for log in logs if log is not None and log.looked > done and log.until(done) == self.history]
        known = [(log.looked, log.history[len(self.history) :]) for log in fitting]
        known = [(at, later) for at, later in known if not self._any_barred(name for _, name in later)]
        for looked, later in json.loads(self.exchange.gather_texts(json.dumps(known[:1]))[0]):
            self.coming, self.until, self.looked = dict(later), looked, looked

    def _any_barred(self, names: Iterable[str]) -> bool:
        """Whether any of these candidates cannot be here."""
        return any(self.barred(BY_NAME[name]) for name in names)

    def log(self, done: int) -> choices.Log:
        """What was chosen after so many steps, with what is still to be followed of an earlier run up to its last look."""
        coming = {} if self.files.deterministic is not None else self.coming
        later = sorted((step, name) for step, name in coming.items() if step > done)
        return choices.Log([*self.history, *later], self.model, self.exchange.size, self.looked)

    def write(self, done: int) -> None:
        """Write the log on rank 0; local.

        That of an earlier run stays until this one has done a step, or follows it. One that is replayed stays.
        """
        path, replayed = self.files.log, self.files.deterministic
        if self.earlier is not None and done == 0:
            return
        if path is None or (replayed is not None and os.path.realpath(path) == os.path.realpath(replayed)):
            return
        if self.exchange.is_open and self.exchange.rank == 0:
            choices.write(Path(path), self.log(done))
