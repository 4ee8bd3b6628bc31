"""Momentum between what successive steps send: at every element, sent = share x masked + (1 - share) x sent before.

A masked element whose momentum still matters goes on being sent, until what all ranks receive of it is zero: then what
was still to come of it, (1 - share) / share x sent, goes to the residual. So nothing is lost: at every moment
all that was sent + residual + (1 - share) / share x (sent last) = all that was accumulated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpisparse.arrays import Bools, Bytes, Floats, Ints
from mpisparse.errors import ConfigurationError

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend


@dataclass(frozen=True)
class Blended:
    """What is sent in a step: where, how much, and which of it was selected now."""

    index: Ints
    values: Floats
    selected: Bytes


class Blend:
    """The elements that are on their way, the same on all ranks, with what this rank sent of them last."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.index: Ints = np.empty(0, dtype=np.int64)
        self.value: Floats = np.empty(0, dtype=np.float32)

    @property
    def pending(self) -> np.float32:
        """What is still to come of an element, as a multiple of what was sent last."""
        return np.float32((1.0 - self.share) / self.share)

    def mix(self, backend: Backend, index: Ints, values: Floats) -> Blended:
        """What to send, given the values selected now."""
        carried, previous = backend.from_host(self.index), backend.from_host(self.value)
        return Blended(*backend.blend(index, values, carried, previous, self.share))

    def settle(self, backend: Backend, acc: Floats, sent: Blended, mean: Floats, left: Floats) -> None:
        """Note what was sent and add to acc what was `left`; elements of which nothing arrived come to rest."""
        self.index, self.value = backend.drop_decayed(
            acc, sent.index, sent.values, sent.selected, mean, left, float(self.pending)
        )

    def rest(self, backend: Backend, acc: Floats, waits: Callable[[Ints], Bools]) -> None:
        """Have what is still to come of frozen elements in acc, and no longer on its way."""
        index, value = backend.to_host(self.index), backend.to_host(self.value)
        frozen = waits(index)
        if frozen.any():
            left = self.pending * value[frozen]
            backend.add_at(acc, backend.from_host(index[frozen]), backend.from_host(left))
            self.index, self.value = backend.from_host(index[~frozen]), backend.from_host(value[~frozen])

    def state(self) -> dict[str, Any]:
        """What the next step depends on."""
        return {"blend.index": self.index, "blend.value": self.value, "blend.pending": float(self.pending)}

    def check(self, state: dict[str, Any], n: int) -> None:
        """Raise ConfigurationError unless the state is of elements of a vector of n."""
        index, value = np.asarray(state["blend.index"]), np.asarray(state["blend.value"])
        fits = len(index) == len(value) and np.isfinite(value).all() and (np.diff(index) > 0).all()
        if not fits or (len(index) and not 0 <= index[0] <= index[-1] < n):
            raise ConfigurationError(f"the elements on their way in the state do not lie in {n} elements")

    def load(self, state: dict[str, Any]) -> None:
        """Take what state() gave."""
        self.index = np.array(state["blend.index"], dtype=np.int64)
        self.value = np.array(state["blend.value"], dtype=np.float32)
