"""A rank's own weights, with the interface by which GradientSync reads and publishes gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from mpisparse.arrays import Bools, Floats, Ints
from mpisparse.backends.flat import Pieces, Slot, zeros
from mpisparse.backends.kinds import FP32
from mpisparse.comm.agreement import BROKEN, Notice
from mpisparse.errors import ConfigurationError
from mpisparse.schemes.companion import Places


class NotFrozen:
    """Ignores freezing, because a parameter that does not train may still have drifted."""

    changed = False
    digest = 0

    def look(self) -> None:
        """Nothing to check."""

    def names(self) -> str:
        return ""


class NotWatched:
    """No hooks on the model. removed: the exchange was closed, or another one has its parameters."""

    removed = False

    def remove(self) -> None:
        self.removed = True


class OwnWeights:
    """The weights as pieces of a flat float32 vector.

    Weights of fewer bits are refused unless a float32 remainder of each is kept. The exchange then works on weight plus
    remainder; the weight is the rounded part.
    """

    holds = False

    def __init__(self, places: Places, *, remainder: bool, scheme: str = "drift") -> None:
        self.places = places
        self.scheme = scheme
        self.frozen = NotFrozen()
        self.watch = NotWatched()
        others = [slot for slot in places.slots if slot.dtype is not torch.float32]
        if others and not remainder:
            hint = ", or pass remainder=True" if scheme == "drift" else ""
            raise ConfigurationError(
                f'scheme "{scheme}" needs float32 weights (autocast is fine), and parameter {others[0].name} is '
                f"{str(others[0].dtype).removeprefix('torch.')}; convert the model{hint}"
            )
        wide = next((slot.name for slot in others if slot.dtype is torch.float64), None)
        if wide is not None:
            raise ConfigurationError(
                f'scheme "{scheme}" exchanges float32 weights, and parameter {wide} is float64, which an exchange would '
                "round; convert the model to float32"
            )
        if scattered := self._scattered():
            raise ConfigurationError(f'scheme "{scheme}" moves weights in place: {scattered}')
        self.remainders = {
            i: zeros(slot.end - slot.begin, torch.float32, self.device)
            for i, slot in enumerate(places.slots)
            if slot in others
        }
        self.masters: dict[int, torch.Tensor] = {}  # weight + remainder, during an exchange
        self.missed = ""  # why received values could not be added to the weights
        self._pieces: Pieces | None = None
        self._aside: list[torch.Tensor] | None = None  # these weights, while the model holds others
        self.kinds = np.full(len(places.slots), FP32, dtype=np.uint8)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next((p.device for p in self.places.params), torch.device("cpu"))

    # What GradientSync calls around an exchange

    def look(self) -> None:
        """Nothing is frozen."""

    def take(self, k: int, trouble: str) -> tuple[Pieces | None, Notice]:
        """Return the weights, and the notice for the other ranks."""
        self.refused()
        unused = np.zeros(len(self.places.slots), dtype=bool)
        trouble = trouble or self.missed or self._misfit()
        if trouble:
            return None, Notice(k, unused, BROKEN, trouble=trouble)
        self._pieces = self.pieces()
        return self._pieces, Notice(k, unused)

    def where(self) -> Pieces | None:
        """Where the weights lie, in float32, until publish(); None if they are no longer the tensors of construction."""
        if self._pieces is None and not self._misfit():
            self._pieces = self.pieces()
        return self._pieces

    def to_move(self) -> Pieces | None:
        """As where(), to add received values to the weights; if that is impossible, `missed` says why."""
        self.missed = self.missed or ("" if self.where() is not None else self._misfit())
        return self.where()

    def seen(self) -> Pieces | None:
        """As where(), to be read at once, during an exchange or between two."""
        if self._pieces is not None:
            return self._pieces
        pieces = None if self._misfit() else self.pieces()
        self.masters = {}
        return pieces

    def _misfit(self) -> str:
        return self.places.misfit([None] * len(self.places.slots)) or self._scattered()

    def _scattered(self) -> str:
        """A text that names a weight with gaps in its memory, which cannot be read and moved in place."""
        pairs = zip(self.places.slots, self.places.params, strict=True)
        name = next((slot.name for slot, p in pairs if not slot.matches(p)), None)
        if name is None:
            return ""
        return f"parameter {name} has gaps in its memory, as a part of a larger tensor has; make it contiguous"

    def publish(self, used: Bools | None) -> None:
        """Round the weights that the exchange moved as float32."""
        for i, master in self.masters.items():
            own = self._flat(i)
            own.copy_(master)
            self.remainders[i] = master.sub_(own.float())
        self.refused()

    def refused(self) -> None:
        """Called when the exchange is refused; the weights are unchanged."""
        self.masters, self._pieces = {}, None

    def drop(self) -> None:
        """There is nothing to drop."""

    def restart(self) -> None:
        """Called when a state was loaded."""
        self.refused()
        self.missed = ""

    def out_of_sight(self, memories: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def hold_late(self) -> None:
        """Nothing to hold back."""

    # Weights as one vector

    @torch.no_grad()
    def pieces(self) -> Pieces:
        """Where the weights lie, in float32."""
        for i, remainder in self.remainders.items():
            self.masters[i] = self._flat(i).float() + remainder
        own = self._aside or [p.data for p in self.places.params]
        alive = [self.masters.get(i, p) for i, p in enumerate(own)]
        pointers = np.array([t.data_ptr() if t.numel() else 0 for t in alive], dtype=np.uint64)
        return Pieces(pointers, self.places.ends, self.kinds, [], alive)

    @torch.no_grad()
    def flat(self) -> torch.Tensor:
        """A copy of all weights as one float32 vector, remainders included."""
        return self.with_remainder(self.rounded(), self.remainder())

    @torch.no_grad()
    def rounded(self, *, in_model: bool = False) -> torch.Tensor:
        """A copy of all weights as one float32 vector, without remainders. in_model: of what the model holds now."""
        out = torch.empty(self.places.size, dtype=torch.float32, device=self.device)
        for i, slot in enumerate(self.places.slots):
            out[slot.begin : slot.end] = self._flat(i, in_model=in_model)
        return out

    @torch.no_grad()
    def at(self, index: Ints) -> Floats:
        """A copy of float32 weights at an ascending index."""
        parts = [self._flat(i)[torch.from_numpy(places)] for i, places, _ in self._split(index)]
        return torch.cat([zeros(0, torch.float32), *parts]).numpy()

    @torch.no_grad()
    def put(self, index: Ints, values: Floats) -> None:
        """Set float32 weights at an ascending index."""
        for i, places, part in self._split(index):
            self._flat(i)[torch.from_numpy(places)] = torch.from_numpy(values[part])

    def _split(self, index: Ints) -> Iterator[tuple[int, Ints, slice]]:
        """The parameters that an ascending index touches: which, at which of their elements, and where in the index."""
        cuts = [0, *np.searchsorted(index, self.places.ends).tolist()]
        for i, (start, stop) in enumerate(pairwise(cuts)):
            if start < stop:
                yield i, index[start:stop] - self.places.slots[i].begin, slice(start, stop)

    def remainder(self) -> torch.Tensor:
        """A copy of the remainders, concatenated."""
        return torch.cat([zeros(0, torch.float32, self.device), *self.remainders.values()])

    def remainder_of(self, values: torch.Tensor) -> torch.Tensor:
        """What the weights' types cannot hold of a vector, concatenated."""
        parts = [(values[slot.begin : slot.end], slot.dtype) for slot in self._rounding()]
        return torch.cat([values[:0], *(part - part.to(dtype).float() for part, dtype in parts)])

    def with_remainder(self, values: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
        """Add remainders to a vector, in place."""
        at, remainder = 0, remainder.to(values.device)
        for slot in self._rounding():
            values[slot.begin : slot.end] += remainder[at : at + slot.end - slot.begin]
            at += slot.end - slot.begin
        return values

    @torch.no_grad()
    def set_flat(self, values: torch.Tensor, remainder: torch.Tensor | None = None) -> None:
        """Set all weights, and their remainders to the given ones plus what rounding loses now."""
        at, values = 0, values.to(self.device)
        remainder = None if remainder is None else remainder.to(self.device)
        for i, slot in enumerate(self.places.slots):
            part, own = values[slot.begin : slot.end], self._flat(i)
            own.copy_(part)
            if i in self.remainders:
                given = 0.0 if remainder is None else remainder[at : at + slot.end - slot.begin]
                self.remainders[i] = part - own.float() + given
                at += slot.end - slot.begin

    @torch.no_grad()
    def add(self, values: Floats) -> None:
        """Add a vector of the host to the weights, during an exchange or between two."""
        vector = torch.from_numpy(values).to(self.device)
        for i, slot in enumerate(self.places.slots):
            part, own, master = vector[slot.begin : slot.end], self._flat(i), self.masters.get(i)
            if master is not None:
                master += part
            elif i in self.remainders:
                whole = own.float() + self.remainders[i] + part
                own.copy_(whole)
                self.remainders[i] = whole - own.float()
            else:
                own += part

    def _rounding(self) -> list[Slot]:
        """The slots that have a remainder."""
        return [self.places.slots[i] for i in self.remainders]

    # Other weights in the model

    @property
    def lent(self) -> bool:
        """Whether the model holds other weights now."""
        return self._aside is not None

    def lend(self, others: Sequence[torch.Tensor]) -> None:
        """Put other weights into the model."""
        self._aside = [p.data for p in self.places.params]
        for p, other in zip(self.places.params, others, strict=True):
            p.data = other

    def take_back(self) -> bool:
        """Put these weights back into the model; return whether others were in it."""
        aside, self._aside = self._aside, None
        for p, own in zip(self.places.params, aside or (), strict=aside is not None):
            p.data = own
        return aside is not None

    def _flat(self, i: int, *, in_model: bool = False) -> torch.Tensor:
        own = self.places.params[i].data if self._aside is None or in_model else self._aside[i]
        return flat_view(self.places.slots[i], own)


def flat_view(slot: Slot, weight: torch.Tensor) -> torch.Tensor:
    """A weight's elements in the order of the flat vector, on the same memory."""
    return weight.as_strided((slot.end - slot.begin,), (1,), weight.storage_offset())
