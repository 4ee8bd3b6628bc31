"""A rank's own weights, as GradientSync exchanges gradients: what it reads before an exchange, and gives back after it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from mpisparse.arrays import Bools
from mpisparse.backends.flat import Pieces, Slot
from mpisparse.backends.kinds import FP32
from mpisparse.comm.agreement import BROKEN, Notice
from mpisparse.errors import ConfigurationError
from mpisparse.schemes.companion import Places


class NotFrozen:
    """Freezing changes nothing: a parameter that does not train may still have drifted."""

    changed = False
    digest = 0

    def look(self) -> None:
        """Nothing to see."""

    def names(self) -> str:
        return ""


class NotWatched:
    """No hooks on the model."""

    removed = False

    def remove(self) -> None:
        self.removed = True


class OwnWeights:
    """The weights as pieces of a flat float32 vector.

    Weights of another type are refused unless a float32 remainder is kept of each: the exchange then works on weight plus
    remainder, of which the weight is the rounded part.
    """

    holds = False

    def __init__(self, places: Places, *, remainder: bool) -> None:
        self.places = places
        self.frozen = NotFrozen()
        self.watch = NotWatched()
        others = [slot for slot in places.slots if slot.dtype is not torch.float32]
        if others and not remainder:
            raise ConfigurationError(
                f'scheme "drift" needs float32 weights (autocast is fine), and parameter {others[0].name} is '
                f"{str(others[0].dtype).removeprefix('torch.')}; convert the model, or pass remainder=True"
            )
        self.remainders = {i: torch.zeros(slot.end - slot.begin) for i, slot in enumerate(places.slots) if slot in others}
        self.masters: dict[int, torch.Tensor] = {}  # weight + remainder, during an exchange
        self.kinds = np.full(len(places.slots), FP32, dtype=np.uint8)

    # What GradientSync calls around an exchange

    def look(self) -> None:
        """Nothing is frozen."""

    def take(self, k: int, trouble: str) -> tuple[Pieces | None, Notice]:
        """The weights, and what to tell the ranks."""
        unused = np.zeros(len(self.places.slots), dtype=bool)
        trouble = trouble or self.places.misfit([None] * len(self.places.slots)) or ""
        if trouble:
            return None, Notice(k, unused, BROKEN, trouble=trouble)
        return self.pieces(), Notice(k, unused)

    def publish(self, used: Bools | None) -> None:
        """Round the weights that the exchange moved as float32."""
        for i, master in self.masters.items():
            own = self._flat(i)
            own.copy_(master)
            self.remainders[i] = master.sub_(own.float())
        self.masters = {}

    def refused(self) -> None:
        """The exchange is refused: the weights are as they were."""
        self.masters = {}

    def drop(self) -> None:
        """There is nothing to drop."""

    def restart(self) -> None:
        """A state was loaded."""
        self.masters = {}

    def out_of_sight(self, memories: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def hold_late(self) -> None:
        """Nothing waits."""

    # Weights as one vector

    @torch.no_grad()
    def pieces(self) -> Pieces:
        """Where the weights lie, in float32."""
        for i, remainder in self.remainders.items():
            self.masters[i] = self._flat(i).float() + remainder
        alive = [self.masters.get(i, p.data) for i, p in enumerate(self.places.params)]
        pointers = np.array([t.data_ptr() if t.numel() else 0 for t in alive], dtype=np.uint64)
        return Pieces(pointers, self.places.ends, self.kinds, [], alive)

    @torch.no_grad()
    def flat(self) -> torch.Tensor:
        """A copy of all weights as one float32 vector, remainders included."""
        out = torch.empty(self.places.size)
        for i, slot in enumerate(self.places.slots):
            out[slot.begin : slot.end] = self._flat(i).float()
            if i in self.remainders:
                out[slot.begin : slot.end] += self.remainders[i]
        return out

    @torch.no_grad()
    def set_flat(self, values: torch.Tensor) -> None:
        """Set all weights, and their remainders."""
        for i, slot in enumerate(self.places.slots):
            part, own = values[slot.begin : slot.end], self._flat(i)
            own.copy_(part)
            if i in self.remainders:
                self.remainders[i] = part - own.float()

    def _flat(self, i: int) -> torch.Tensor:
        return flat_view(self.places.slots[i], self.places.params[i].data)


def flat_view(slot: Slot, weight: torch.Tensor) -> torch.Tensor:
    """A weight's elements in the order of the flat vector, on the same memory."""
    return weight.as_strided((slot.end - slot.begin,), (1,), weight.storage_offset())
