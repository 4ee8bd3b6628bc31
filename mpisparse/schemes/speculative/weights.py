"""Two sets of weights, each with its optimizer state: the rank's own, which the model computes with, and the global one."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mpisparse.arrays import State
from mpisparse.backends.flat import Slot, checksum
from mpisparse.errors import ConfigurationError
from mpisparse.schemes.companion import Places
from mpisparse.schemes.speculative.local import flat, is_elementwise

PIECE = 1 << 18  # elements of the host compared at a time, so that they stay in cache; on a device, whole parameters

Stretch = tuple[int, int, int]  # a parameter, and where a stretch of its elements begins and ends


@dataclass(frozen=True)
class Tolerance:
    """How far own weights may be from the global ones; relative: of the global weight, or of the layer's largest."""

    value: float
    relative: bool
    by_layer: bool


@dataclass(frozen=True)
class Drift:
    """The largest distance between the sets before and after correction, and how many elements returned."""

    before: float
    after: float
    corrected: int


class TwoSets:
    """The model and the optimizer hold one set, this object the other; swap() exchanges them without a copy."""

    def __init__(self, places: Places, optimizer: torch.optim.Optimizer) -> None:
        self.places = places
        self.optimizer = optimizer
        self.swapped = False
        for slot, p in self._pairs():
            if p.numel() and not slot.matches(p):
                raise ConfigurationError(
                    f"parameter {slot.name} does not fill its memory (strides {list(p.stride())}); make it contiguous first"
                )
        self.weights: list[torch.Tensor] = []
        self.state: list[State] = []
        self.take_over()

    def _pairs(self) -> Iterator[tuple[Slot, torch.nn.Parameter]]:
        return zip(self.places.slots, self.places.params, strict=True)

    @torch.no_grad()
    def take_over(self) -> None:
        """Make the global set equal to what the model and the optimizer hold now; both sets are then equal."""
        self.swapped = False
        self.weights = [_like(slot, p.detach(), p.device) for slot, p in self._pairs()]
        self.state = []
        for slot, p in self._pairs():
            own = self.optimizer.state.get(p, {})
            for name, value in own.items():
                if is_elementwise(name, value, p.shape) and not slot.matches(value):
                    own[name] = _like(slot, value, p.device)
            self.state.append({name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in own.items()})

    def swap(self) -> None:
        """Give the model and the optimizer the other set."""
        for i, p in enumerate(self.places.params):
            p.data, self.weights[i] = self.weights[i], p.data
            own = self.optimizer.state.pop(p, {})
            if self.state[i]:
                self.optimizer.state[p] = self.state[i]
            self.state[i] = own
        self.swapped = not self.swapped

    @contextlib.contextmanager
    def global_in_place(self) -> Iterator[None]:
        """Put the global set into the model and the optimizer inside the block."""
        before = self.swapped
        if not before:
            self.swap()
        try:
            yield
        finally:
            if self.swapped and not before:  # no state was loaded meanwhile
                self.swap()

    def held(self) -> int:
        """A checksum of the weights that the model holds now."""
        return checksum(p.data for p in self.places.params)

    # Validation and correction

    @torch.no_grad()
    def correct(self, tolerance: Tolerance) -> Drift:
        """Return to the global weight and its state wherever the rank's own is farther from it than the tolerance.

        A device is waited for once, and once more where single weights return.
        """
        stretches, largest, sizes = self._distances(tolerance)
        before = max(largest)
        if tolerance.value == 0.0:
            self.synchronize()
            return Drift(before, 0.0, self.places.size)
        if math.isinf(tolerance.value):
            return Drift(before, before, 0)
        found = list(zip(stretches, largest, sizes, strict=True))
        if tolerance.by_layer:
            return Drift(before, *self._correct_layers(tolerance, found))
        within = [most <= tolerance.value and not tolerance.relative for _, most, _ in found]
        off = [stretch for (stretch, _, _), fine in zip(found, within, strict=True) if not fine]
        returned = _read([self._correct_weights(stretch, tolerance) for stretch in off])
        rest = [most for (_, most, _), fine in zip(found, within, strict=True) if fine]
        after = max([*rest, *(most for most, _ in returned)])
        return Drift(before, after, round(sum(count for _, count in returned)))

    @torch.no_grad()
    def synchronize(self, which: Iterable[int] | None = None) -> None:
        """Make the rank's own set the global one, of all parameters or of some."""
        for i in range(len(self.weights)) if which is None else which:
            self._return(i)

    def _distances(self, tolerance: Tolerance) -> tuple[list[Stretch], list[float], list[float]]:
        """All stretches, the largest distance in each, and the largest global weight in each if layers compare with it."""
        stretches, rows = [], []
        for i, n in enumerate(weight.numel() for weight in self.weights):
            piece = PIECE if self.places.device.type == "cpu" else max(1, n)
            stretches += [(i, a, min(a + piece, n)) for a in range(0, n, piece)]
        for stretch in stretches:
            own, shared = self._of(stretch)
            most = (own - shared).abs_().max()
            rows.append((most, shared.abs().max() if tolerance.by_layer and tolerance.relative else most))
        found = _read(rows)
        return stretches, [math.inf if math.isnan(most) else most for most, _ in found], [size for _, size in found]

    def _of(self, stretch: Stretch) -> tuple[torch.Tensor, torch.Tensor]:
        """The own and the global weights of a stretch."""
        i, a, b = stretch
        slot = self.places.slots[i]
        return flat(slot, self.places.params[i].data)[a:b], flat(slot, self.weights[i])[a:b]

    def _correct_layers(self, tolerance: Tolerance, found: list[tuple[Stretch, float, float]]) -> tuple[float, int]:
        """Return the layers that are too far off; the largest distance that remains, and how many elements returned."""
        after, corrected = 0.0, 0
        for i, group in itertools.groupby(found, key=lambda each: each[0][0]):
            _, largest, sizes = zip(*group, strict=True)
            most, size = max(0.0, *largest), max(0.0, *sizes)
            if most <= (tolerance.value * size if tolerance.relative else tolerance.value) and math.isfinite(most):
                after = max(after, most)
            else:
                self._return(i)
                corrected += self.weights[i].numel()
        return after, corrected

    def _correct_weights(self, stretch: Stretch, tolerance: Tolerance) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights of a stretch that are too far off; the largest distance of the others, and their number."""
        own, shared = self._of(stretch)
        distance = (own - shared).abs_()
        fine = distance <= (shared.abs() * tolerance.value if tolerance.relative else tolerance.value)
        far = (fine & distance.isfinite()).logical_not_()
        own.copy_(torch.where(far, shared, own))
        self._return_state(stretch, far)
        return distance.masked_fill_(far, 0.0).max(), far.sum()

    def _return_state(self, stretch: Stretch, far: torch.Tensor) -> None:
        """Give some elements of a stretch the global state; an entry that the global set does not have yet is zero."""
        i, a, b = stretch
        slot, p = self.places.slots[i], self.places.params[i]
        own = self.optimizer.state[p] if self.state[i] else self.optimizer.state.get(p, {})
        for name in {**own, **self.state[i]}:
            here, there = own.get(name), self.state[i].get(name)
            if here is None and isinstance(there, torch.Tensor) and is_elementwise(name, there, p.shape):
                here = own[name] = torch.empty_strided(slot.shape, slot.stride, dtype=there.dtype, device=p.device).zero_()
            if is_elementwise(name, here, p.shape):
                part = flat(slot, here)[a:b]
                given = torch.zeros_like(part) if there is None else flat(slot, there)[a:b]
                part.copy_(torch.where(far, given, part))
            elif here is None:
                own[name] = there.clone() if isinstance(there, torch.Tensor) else there

    def _return(self, i: int) -> None:
        """Give a whole parameter the global weights and state, counters too."""
        p = self.places.params[i]
        p.data.copy_(self.weights[i])
        self.optimizer.state.pop(p, None)
        if self.state[i]:
            self.optimizer.state[p] = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in self.state[i].items()}

    # State

    def own(self) -> dict[str, Any]:
        """The rank's own set, live, whichever the model holds: weights in flat order, the optimizer's entries of every
        parameter, and a checksum of the global weights that it belongs to."""
        params = self.places.params
        here = [p.data for p in params], [self.optimizer.state.get(p, {}) for p in params]
        kept = self.weights, self.state
        (weights, state), (shared, _) = (kept, here) if self.swapped else (here, kept)
        return {
            "digest": checksum(shared),
            "weights": [flat(slot, weight) for slot, weight in zip(self.places.slots, weights, strict=True)],
            "state": [dict(entries) for entries in state],
        }

    @torch.no_grad()
    def load(self, own: dict[str, Any]) -> None:
        """Load what own() returned as the rank's own set; the global one is what the model and the optimizer hold now."""
        self.take_over()
        for i, (slot, p) in enumerate(self._pairs()):
            flat(slot, p.data).copy_(torch.as_tensor(own["weights"][i]))
            self.optimizer.state.pop(p, None)
            state = {}
            for name, value in own["state"][i].items():
                if is_elementwise(name, value, p.shape):
                    state[name] = _like(slot, value, p.device)
                elif isinstance(value, torch.Tensor):  # a counter: some optimizers want it on the device
                    there = self.state[i].get(name, value)
                    state[name] = value.to(there.device, copy=True)
                else:
                    state[name] = value
            if state:
                self.optimizer.state[p] = state

    def check(self, own: Any) -> None:
        """Raise ConfigurationError unless load() could take it."""
        sizes = [slot.end - slot.begin for slot in self.places.slots]
        if [len(weights) for weights in own["weights"]] != sizes or len(own["state"]) != len(sizes):
            raise ConfigurationError("the rank's own weights in the state are not of this model")
        for weights, entries, p in zip(own["weights"], own["state"], self.places.params, strict=True):
            values = [v for v in entries.values() if isinstance(v, torch.Tensor) and v.dim() > 0]
            if torch.as_tensor(weights).dtype != p.dtype or any(v.shape != p.shape for v in values):
                raise ConfigurationError("the rank's own weights or optimizer entries in the state are not of this model")
        int(own["digest"])


def _like(slot: Slot, values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a parameter's values in the slot's memory order."""
    return torch.empty_strided(slot.shape, slot.stride, dtype=values.dtype, device=device).copy_(values)


def _read(rows: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[float, float]]:
    """Pairs of numbers of a device as numbers of the host, for which one wait is enough."""
    if not rows:
        return []
    read = torch.stack([each.double() for row in rows for each in row]).tolist()
    return list(zip(read[::2], read[1::2], strict=True))
