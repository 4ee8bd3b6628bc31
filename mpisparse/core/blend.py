"""Momentum between what successive steps send: at every element, sent = share x selected + (1 - share) x sent before.

A selected element whose momentum still matters goes on being sent until all that the ranks receive of it is zero. What was
still to be sent of it, (1 - share) / share x sent, then goes to the residual. So nothing is lost: at every moment
all that was sent + residual + (1 - share) / share x (sent last) = all that was accumulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpisparse.arrays import Floats, Ints, State
from mpisparse.backends.flat import Held
from mpisparse.core.stages import Sent, Stage
from mpisparse.errors import ConfigurationError

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.select.view import View
    from mpisparse.wire.reduction import Reduced


@dataclass(frozen=True, eq=False)
class Blend(Stage):
    """The elements that are still being sent, the same on all ranks, with what this rank sent of them last."""

    share: float
    index: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    value: Floats = field(default_factory=lambda: np.empty(0, dtype=np.float32))

    @property
    def pending(self) -> np.float32:
        """What is still to be sent of an element, as a multiple of what was sent last."""
        return np.float32((1.0 - self.share) / self.share)

    def send(self, backend: Backend, view: View, sent: Sent) -> Sent:
        """Blend the selected values with what was sent before."""
        carried, previous = backend.from_host(self.index), backend.from_host(self.value)
        index, values, selected = backend.blend(sent.index, sent.values, carried, previous, self.share)
        return Sent(index, backend.copy(values), (values, selected))

    def settle(self, backend: Backend, acc: Any, union: Any, sent: Sent, reduced: Reduced) -> Stage:
        """Note what was sent and keep what the codec left; elements of which nothing arrived are no longer sent."""
        values, selected = sent.note
        cleared = backend.empty(len(union), np.float32)
        backend.fill(cleared, 0.0)
        backend.put(acc, union, cleared)
        index, value = backend.drop_decayed(
            acc, sent.index, values, selected, reduced.mean, reduced.left, float(self.pending)
        )
        return replace(self, index=index, value=value)

    def hold(self, backend: Backend, acc: Any, held: Held) -> Stage:
        """Move what is still to be sent of held elements into the accumulator."""
        index, value = backend.to_host(self.index), backend.to_host(self.value)
        frozen = held.covers(index)
        if not frozen.any():
            return self
        left = self.pending * value[frozen]
        backend.add_at(acc, backend.from_host(index[frozen]), backend.from_host(left))
        return replace(self, index=backend.from_host(index[~frozen]), value=backend.from_host(value[~frozen]))

    def state(self) -> State:
        return {"blend.index": self.index, "blend.value": self.value, "blend.pending": float(self.pending)}

    def check(self, state: State, n: int) -> None:
        index, value = np.asarray(state["blend.index"]), np.asarray(state["blend.value"])
        fits = len(index) == len(value) and np.isfinite(value).all() and (np.diff(index) > 0).all()
        if not fits or (len(index) and not 0 <= index[0] <= index[-1] < n):
            raise ConfigurationError(f"the elements that are still being sent in the state do not lie in {n} elements")

    def loaded(self, state: State) -> Stage:
        index, value = np.array(state["blend.index"], dtype=np.int64), np.array(state["blend.value"], dtype=np.float32)
        return replace(self, index=index, value=value)

    def at_rest(self, state: State, residual: Any) -> State:
        """Move what was still to be sent into the residual."""
        index, value = np.asarray(state["blend.index"]), np.asarray(state["blend.value"])
        residual[index] += np.float32(state["blend.pending"]) * value
        return {**state, "blend.index": index[:0], "blend.value": value[:0]}

    def resize(self, states: Sequence[State]) -> State:
        return {key: states[0][key] for key in ("blend.index", "blend.value", "blend.pending")}
