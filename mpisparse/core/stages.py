"""Optional parts of a step, as a list: each may change what is sent, and what is kept of it.

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
    """What this rank sends: an ascending index, the values, and what a stage wants to know of them afterwards.

    A stage that sets a note keeps what was not sent by itself; else the step does. A note is LOST, or arrays of one value
    for each element, which a delivery in flight is saved with.
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

    def departed(self, backend: Backend, acc: Any) -> Stage:
        """A delivery in flight sets out, with its values and this stage; return the stage that stays. Local."""
        return self

    def returned(self, stage: Any) -> Stage:
        """Return the stage with what the one took along that set out with a delivery which was dropped. Local."""
        return self

    def send(self, backend: Backend, view: View, sent: Sent) -> Sent:
        """Return what is sent instead. Reads only."""
        return sent

    def settle(self, backend: Backend, acc: Any, union: Any, sent: Sent, reduced: Reduced) -> Stage:
        """Keep in the accumulator what was not sent; return the stage of the next step."""
        return self

    def ended(self, backend: Backend, acc: Any) -> None:
        """The mean is published: the step ends."""

    def hold(self, backend: Backend, acc: Any, held: Held) -> Stage:
        """Return the stage after other elements than before are held back."""
        return self

    def details(self) -> dict[str, float]:
        """What the statistics say of it."""
        return {}

    def state(self) -> State:
        """What the next step depends on."""
        return {}

    def upgraded(self, state: State) -> State:
        """Translate a state that an earlier version saved."""
        return state

    def check(self, state: State, n: int) -> None:
        """Raise ConfigurationError unless the state is one of a vector of n elements."""

    def loaded(self, state: State) -> Stage:
        """Return the stage that state() was taken of."""
        return self

    def at_rest(self, state: State, residual: Floats) -> State:
        """Return a saved state with nothing on its way; what was still to be sent goes to the saved residual, in place."""
        return state

    def resize(self, states: Sequence[State]) -> State:
        """Return the state on another number of ranks, from those taken over."""
        return {key: states[0][key] for key in self.state()}


class Dropped(Stage):
    """No error feedback: what is still in the accumulator at the end of a step is lost."""

    def ended(self, backend: Backend, acc: Any) -> None:
        backend.fill(acc, 0.0)


class LateDropped(Stage):
    """No error feedback in flight: what is not sent is lost when the others set out, and what the codec leaves too."""

    def departed(self, backend: Backend, acc: Any) -> Stage:
        backend.fill(acc, 0.0)
        return self

    def send(self, backend: Backend, view: View, sent: Sent) -> Sent:
        return sent if sent.note is not None else sent._replace(note=LOST)
