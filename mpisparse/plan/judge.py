"""Judges exchanges by what was measured: predicts their steps, and tells when there is good reason to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mpisparse.comm.exchange import Exchange
from mpisparse.comm.hierarchy import Nodes
from mpisparse.errors import ConfigurationError
from mpisparse.plan import measure
from mpisparse.plan.candidates import CHOICES, Candidate
from mpisparse.plan.predict import Measured, Prediction, Window, choose, corrected, predict, reason

LONGEST = 4  # windows: each time links are measured in vain, the next look comes after twice as many steps
WINS = 2  # looks in a row that a candidate must win to replace the one in use
MOST_WINS = 8  # it is twice as many after each return to a candidate that had been left, but no more than these


@dataclass(frozen=True)
class Verdict:
    """The candidate of the coming steps, with all predictions. says: why, in words, if it is news; else empty."""

    candidate: Candidate
    predictions: Sequence[Prediction]
    says: str = ""


class Judge:
    """What was measured, and which candidate is about to win.

    nodes: those whose ranks may sum first, if there are any. windows: to the next look at the times. rival: what has won the
    last looks, `won` of them in a row.
    """

    def __init__(self, exchange: Exchange, elements: int, slowdown: float, nodes: Nodes | None = None) -> None:
        self.exchange, self.elements, self.slowdown, self.nodes = exchange, elements, slowdown, nodes
        self.measured: Measured | None = None
        self.windows = 1
        self.rival: Candidate | None = None
        self.won = 0

    def load(self, measured: Measured | None) -> None:
        """Go on with what was measured before."""
        self.measured, self.windows, self.rival, self.won = measured, 1, None, 0

    def verdict(self, window: Window, now: Candidate, known: Sequence[Candidate], returns: int) -> Verdict | None:
        """Choose among known candidates, richest first; None if all is as it was predicted. Collective.

        returns: how often a candidate came back that had been left.
        """
        before, why = self.measured, ""
        if before is not None and not before.covers(now):
            before = None
        if before is None:
            measured = self._with_passes(self._measure(window), known)
        else:
            expected = predict(now, before)
            eased = now.flat != known[0].flat and window.eased(expected.exchange)
            off = self._of_rank_0(int(window.off(expected.step) or eased))
            if not off and self.rival is None:
                self.windows = 1
                return None
            why = f"steps took {1e3 * window.step:.3g} ms, {window.blame(before)}; " if off else ""
            fresh = replace(before, **measure.all_links(self.exchange, self.nodes))
            measured = corrected(self._with_passes(fresh, known), window, now)
        self.measured = measured
        predictions = [predict(each, measured) for each in known]
        best = choose(predictions, measured.computing, self.slowdown, None if before is None else now)
        winner = CHOICES[self._of_rank_0(CHOICES.index(best.candidate))]
        if before is not None and not self._has_won(winner, now, returns):
            return Verdict(now, predictions)
        self.windows, self.rival, self.won = 1, None, 0
        return Verdict(winner, predictions, why + reason(predict(winner, measured), measured.computing, self.slowdown))

    def _has_won(self, winner: Candidate, now: Candidate, returns: int) -> bool:
        """Count the looks that a candidate has won in a row; tell whether they are enough. Local."""
        if winner == now:
            self.windows, self.rival, self.won = min(2 * self.windows, LONGEST), None, 0
            return False
        self.won = self.won + 1 if winner == self.rival else 1
        self.windows, self.rival = 1, winner
        return self.won >= min(MOST_WINS, WINS << returns)

    def _measure(self, window: Window) -> Measured:
        links = measure.all_links(self.exchange, self.nodes)
        return Measured(self.exchange.size, self.elements, max(window.computing), **links)

    def _with_passes(self, measured: Measured, known: Sequence[Candidate]) -> Measured:
        """Measure the passes of exchanges that are not known yet; the slowest rank counts. Collective."""
        new = [each for each in dict.fromkeys(one.each_step for one in known) if each.name not in measured.passes]
        if not new:
            return measured
        with self.exchange.place.exempt("measuring"):
            own = np.array([measure.passes(each, measured.elements) for each in new])
        slowest = self.exchange.allgather(own).max(axis=0).tolist()
        names = (each.name for each in new)
        return replace(measured, passes={**measured.passes, **dict(zip(names, slowest, strict=True))})

    def _of_rank_0(self, number: int) -> int:
        """Take over rank 0's number, so that no rounding parts the ranks; collective."""
        row = np.array([number], dtype=np.int64)
        self.exchange.broadcast_(row.view(np.uint8))
        return int(row[0])


def checked_measurement(record: object) -> Measured | None:
    """What a state says was measured; raise ConfigurationError if it says something else."""
    try:
        return None if record is None else Measured.of(record)  # type: ignore[arg-type]  # which is what may be wrong
    except (KeyError, TypeError) as error:
        raise ConfigurationError(f"what was measured is malformed in the state: {error}") from error
