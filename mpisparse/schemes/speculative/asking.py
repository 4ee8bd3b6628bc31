"""What policies learn from: each rank's loss and confidence, and the duration of steps, averaged over ranks in a step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mpisparse.arrays import State
from mpisparse.backends.flat import Pieces
from mpisparse.schemes.speculative.influence import InfluenceScorer
from mpisparse.select.around import Around
from mpisparse.select.candidates import Candidates

if TYPE_CHECKING:
    from mpisparse.select.scorers import Exempt, Lap, Scorer


class Asking(Around):
    """Any scorer, with the rank's figures added.

    noted: the loss of the coming step, as the training loop reported it. confidence: the user's function, if there is one.
    timed: share how long steps take.
    """

    def __init__(self, inner: Scorer, *, confidence: Callable[[], float] | None, timed: bool) -> None:
        super().__init__(inner)
        self.confidence = confidence
        self.timed = timed
        self.noted = math.nan
        self._figures = (math.nan, math.nan, 0.0)
        self._began = time.perf_counter()

    @property
    def influence(self) -> InfluenceScorer | None:
        """The inner scorer, if it scores by influence."""
        return self.inner if isinstance(self.inner, InfluenceScorer) else None

    @property
    def probe_loss(self) -> float:
        """The loss of the last probe; NaN if there was none."""
        return math.nan if self.influence is None else self.influence.probe_loss

    def ready(self, exempt: Exempt, lap: Lap) -> str:
        """Compute loss and confidence; an error in the user's functions is returned as this rank's problem."""
        trouble = super().ready(exempt, lap)
        if trouble:
            return trouble
        try:
            with exempt("probing"):
                confidence = self._confidence()
        except Exception as error:
            self.cause = error
            return f"confidence(): {type(error).__name__}: {error}"
        finally:
            lap("probe")
        probed = math.nan if self.influence is None else self.influence.probed
        now = time.perf_counter()
        loss = probed if math.isnan(self.noted) else self.noted
        self._figures, self._began = (loss, confidence, now - self._began if self.timed else 0.0), now
        return ""

    def _confidence(self) -> float:
        """The callable's value, or exp(-loss) of the last probe or of the reported loss; NaN if nothing is known."""
        if self.confidence is not None:
            return float(self.confidence())
        loss = self.noted if math.isnan(self.probe_loss) else self.probe_loss
        return math.exp(-max(0.0, loss)) if not math.isnan(loss) else math.nan

    def accumulate(self, pieces: Pieces | None, lo: int, hi: int, floor: float) -> Candidates:
        found = super().accumulate(pieces, lo, hi, floor)
        self.noted = math.nan  # only now, because a step refused earlier needs it again
        return found

    def figures(self) -> tuple[float, ...]:
        """Loss, confidence, and the seconds since the last step."""
        return self._figures

    def state(self) -> State:
        return {**super().state(), "noted": self.noted}

    def check(self, state: State) -> None:
        float(state["noted"])
        super().check(state)

    def load(self, state: State) -> None:
        super().load(state)
        self.noted = float(state["noted"])

    def resize(self, states: Sequence[State]) -> State:
        return {**super().resize(states), "noted": states[0]["noted"]}
