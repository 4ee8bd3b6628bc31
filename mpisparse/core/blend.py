"""Momentum over what successive steps send: at every element, sent = share x selected + (1 - share) x sent before.

An element once selected is sent in every step until all that the ranks receive of it is zero. What was still to be sent
of it, (1 - share) / share x sent, then goes to the residual. So nothing is lost: at every moment
all that was sent + residual + (1 - share) / share x (sent last) = all that was accumulated.

In flight, the values sent last travel with the delivery that blends them, and return when it is settled.
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
from mpisparse.wire.reduction import NO_INDEX, NO_VALUES

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.select.view import View
    from mpisparse.wire.reduction import Reduced


@dataclass(frozen=True, eq=False)
class Blend(Stage):
    """The elements that are still being sent, with the values that this rank sent last.

    own: each rank sends its own elements, and stops when its own values arrive as zero; else all ranks send the same
    elements until their mean is zero. late: in flight; index and value are on the host. keeps: what is not sent returns to
    the accumulator.
    """

    share: float
    own: bool = False
    late: bool = False
    keeps: bool = True
    index: Ints = field(default_factory=NO_INDEX.copy)
    value: Floats = field(default_factory=NO_VALUES.copy)

    @property
    def pending(self) -> np.float32:
        """What is still to be sent of an element, as a multiple of what was sent last."""
        return np.float32((1.0 - self.share) / self.share)

    def carried(self, backend: Backend) -> Stage:
        return replace(self, index=backend.to_host(self.index), value=backend.to_host(self.value))

    def departed(self, backend: Backend, acc: Any) -> Stage:
        return replace(self, index=NO_INDEX.copy(), value=NO_VALUES.copy())

    def returned(self, stage: Blend) -> Stage:
        return self._with(stage.index, stage.value)

    def send(self, backend: Backend, view: View, sent: Sent) -> Sent:
        """Blend the selected values with what was sent before."""
        carried, previous = backend.from_host(self.index), backend.from_host(self.value)
        index, values, selected = backend.blend(sent.index, sent.values, carried, previous, self.share)
        return Sent(index, backend.copy(values), (values, selected))

    def settle(self, backend: Backend, acc: Any, union: Any, sent: Sent, reduced: Reduced) -> Stage:
        """Record what was sent and keep the codec's error; stop sending elements of which nothing arrived."""
        if sent.note is None:  # another number of ranks sent it, and at_rest() moved it to the residual
            return self
        values, selected = sent.note
        arrived = values - reduced.left if self.own else reduced.mean
        if self.late and not self.keeps:
            index, values, selected, arrived = map(backend.to_host, (sent.index, values, selected, arrived))
            going = (selected != 0) | (arrived != 0)
            return self._with(index[going], values[going])
        if not self.late:  # in flight, sent values were taken out at departure
            cleared = backend.empty(len(union), np.float32)
            backend.fill(cleared, 0.0)
            backend.put(acc, union, cleared)
        index, value = backend.drop_decayed(acc, sent.index, values, selected, arrived, reduced.left, float(self.pending))
        if self.own:
            backend.add_at(acc, reduced.kept_index, reduced.kept)
        if self.late:
            return self._with(backend.to_host(index), backend.to_host(value))
        return replace(self, index=index, value=value)

    def _with(self, index: Ints, value: Floats) -> Stage:
        """Return the stage with what a late delivery brings back added to what earlier ones did; on the host."""
        both = np.union1d(self.index, index)
        total = np.zeros(len(both), dtype=np.float32)
        for places, values in ((self.index, self.value), (index, value)):
            total[np.searchsorted(both, places)] += values
        return replace(self, index=both, value=total)

    def hold(self, backend: Backend, acc: Any, held: Held) -> Stage:
        """Move what is still to be sent of held elements into the accumulator."""
        index, value = backend.to_host(self.index), backend.to_host(self.value)
        frozen = held.covers(index)
        if not frozen.any():
            return self
        left = self.pending * value[frozen]
        backend.add_at(acc, backend.from_host(index[frozen]), backend.from_host(left))
        rest = index[~frozen], value[~frozen]
        index, value = rest if self.late else map(backend.from_host, rest)
        return replace(self, index=index, value=value)

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
        pending = np.float32(state["blend.pending"])
        residual[index] += pending * value
        rest = {**state, "blend.index": index[:0], "blend.value": value[:0]}
        if "flight" in state:
            rest["flight"] = [self._recalled(packed, pending, residual) for packed in state["flight"]]
        return rest

    def _recalled(self, packed: State, pending: np.float32, residual: Any) -> State:
        """Return a saved delivery that brings back nothing to blend; what was still to be sent joins the residual."""
        if packed.get("note") is None:
            return packed
        residual[np.asarray(packed["sent"])] += pending * np.asarray(packed["note"][0])
        lost = {} if self.keeps else {"sent": NO_INDEX, "left": NO_VALUES, "kept_index": NO_INDEX, "kept": NO_VALUES}
        return {**packed, "note": None, **lost}

    def resize(self, states: Sequence[State]) -> State:
        return {key: states[0][key] for key in ("blend.index", "blend.value", "blend.pending")}
