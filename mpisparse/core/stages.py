"""Optional stages of a step, as a list: each may change what is sent and what is kept.

A stage is immutable. `send` runs in deliver and only reads; `settle` runs in apply and returns the stage of the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mpisparse.arrays import Floats, Ints, State

if TYPE_CHECKING:
    from mpisparse.backends.flat import Held
    from mpisparse.backends.protocol import Backend
    from mpisparse.select.view import View
    from mpisparse.wire.reduction import Reduced

LOST = "lost"


class Sent(NamedTuple):
    """What this rank sends: an ascending index, the values, and a stage's note about them.

    If a stage sets a note, the stage keeps what was not sent; otherwise the step does. A note is LOST, or arrays with one
    value per element, which are saved with a delivery in flight.
    """

    index: Ints  # type: ignore[assignment]  # hides tuple.index
    values: Any
    note: Any = None


class Stage:
    """The protocol, with defaults that change nothing."""

    observes = False  # whether observed metrics change anything

    @property
    def k_scale(self) -> float:
        """The factor on k."""
        return 1.0

    def observe(self, metric: float) -> Stage:
        """Return the stage after a metric was observed; larger is better, and it is the same on all ranks."""
        return self

    def carried(self, backend: Backend) -> Stage:
        """Return the stage for a delivery that uses kernels of the host; `backend` has what it remembers. Local."""
        return self

    def departed(self, backend: Backend, acc: Any) -> Stage:
        """A delivery in flight departs with its values and this stage; return the stage that stays behind. Local."""
        return self

    def returned(self, stage: Any) -> Stage:
        """A delivery was dropped: return this stage merged with the one that departed with it. Local."""
        return self

    def send(self, backend: Backend, view: View, sent: Sent) -> Sent:
        """Return what is sent instead. Reads only."""
        return sent

    def settle(self, backend: Backend, acc: Any, union: Any, sent: Sent, reduced: Reduced) -> Stage:
        """Keep in the accumulator what was not sent; return the stage of the next step."""
        return self

    def ended(self, backend: Backend, acc: Any) -> None:
        """Called at the end of a step, when the mean is published."""

    def hold(self, backend: Backend, acc: Any, held: Held) -> Stage:
        """Return the stage for a changed set of held elements."""
        return self

    def details(self) -> dict[str, float]:
        """Figures of this stage for the statistics."""
        return {}

    def state(self) -> State:
        """What the next step depends on."""
        return {}

    def upgraded(self, state: State) -> State:
        """Translate a state that an earlier version saved."""
        return state

    def check(self, state: State, n: int) -> None:
        """Raise ConfigurationError unless the state belongs to a vector of n elements."""

    def loaded(self, state: State) -> Stage:
        """Return the stage that a state describes."""
        return self

    def at_rest(self, state: State, residual: Floats) -> State:
        """Return a saved state with nothing in flight; what was still to be sent goes to the saved residual, in place."""
        return state

    def resize(self, states: Sequence[State]) -> State:
        """Return the state on another number of ranks, from the states taken over."""
        return {key: states[0][key] for key in self.state()}


class Dropped(Stage):
    """No error feedback: clear the accumulator at the end of a step."""

    def ended(self, backend: Backend, acc: Any) -> None:
        backend.fill(acc, 0.0)


class LateDropped(Stage):
    """No error feedback in flight: unsent values are lost at departure, and so is the codec's error."""

    def departed(self, backend: Backend, acc: Any) -> Stage:
        backend.fill(acc, 0.0)
        return self

    def send(self, backend: Backend, view: View, sent: Sent) -> Sent:
        return sent if sent.note is not None else sent._replace(note=LOST)
