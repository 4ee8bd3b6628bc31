"""Two sets of weights, each with its optimizer state: the rank's own, which the model computes with, and the global one."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mpisparse.arrays import State
from mpisparse.backends.flat import Slot, checksum
from mpisparse.errors import ConfigurationError
from mpisparse.schemes.companion import Places
from mpisparse.schemes.speculative.local import flat, is_elementwise

PIECE = 1 << 18  # elements compared at a time, so that they stay in cache


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
        self.weights = [torch.empty_strided(s.shape, s.stride, dtype=s.dtype).copy_(p) for s, p in self._pairs()]
        self.state = []
        for slot, p in self._pairs():
            own = self.optimizer.state.get(p, {})
            for name, value in own.items():
                if is_elementwise(name, value, p.shape) and not slot.matches(value):
                    own[name] = torch.empty_strided(slot.shape, slot.stride, dtype=value.dtype).copy_(value)
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
        """Return to the global weight and its state wherever the rank's own is farther from it than the tolerance."""
        if tolerance.value == 0.0:
            before = max(self._distance(i)[0] for i in range(len(self.weights)))
            self.synchronize()
            return Drift(before, 0.0, self.places.size)
        correct = self._correct_layer if tolerance.by_layer else self._correct_weights
        drifts = [correct(i, tolerance) for i, weight in enumerate(self.weights) if weight.numel()]
        return Drift(max(d.before for d in drifts), max(d.after for d in drifts), sum(d.corrected for d in drifts))

    @torch.no_grad()
    def synchronize(self, which: Iterable[int] | None = None) -> None:
        """Make the rank's own set the global one, of all parameters or of some."""
        for i in range(len(self.weights)) if which is None else which:
            self._return(i)

    def _distance(self, i: int) -> tuple[float, float]:
        """The largest distance in a parameter, and its largest global weight."""
        slot, p = self.places.slots[i], self.places.params[i]
        own, shared = flat(slot, p.data), flat(slot, self.weights[i])
        far = size = 0.0
        for a in range(0, len(own), PIECE):
            far = max(far, _largest((own[a : a + PIECE] - shared[a : a + PIECE]).abs_()))
            size = max(size, float(shared[a : a + PIECE].abs().max()))
        return far, size

    def _correct_layer(self, i: int, tolerance: Tolerance) -> Drift:
        before, size = self._distance(i)
        within = before <= (tolerance.value * size if tolerance.relative else tolerance.value) and math.isfinite(before)
        if within or math.isinf(tolerance.value):
            return Drift(before, before, 0)
        self._return(i)
        return Drift(before, 0.0, self.weights[i].numel())

    def _correct_weights(self, i: int, tolerance: Tolerance) -> Drift:
        slot, p = self.places.slots[i], self.places.params[i]
        own, shared = flat(slot, p.data), flat(slot, self.weights[i])
        before = after = 0.0
        wrong = []
        for a in range(0, len(own), PIECE):
            there = shared[a : a + PIECE]
            distance = (own[a : a + PIECE] - there).abs_()
            most = _largest(distance)
            before = max(before, most)
            if math.isinf(tolerance.value) or (not tolerance.relative and most <= tolerance.value):
                after = max(after, most)
                continue
            fine = distance <= (there.abs() * tolerance.value if tolerance.relative else tolerance.value)
            if math.isinf(most):
                fine &= distance.isfinite()
            off = fine.logical_not_()
            after = max(after, float(distance.masked_fill_(off, 0.0).max()))
            wrong.append(off.nonzero().flatten().add_(a))
        if not wrong:
            return Drift(before, after, 0)
        at = torch.cat(wrong)
        own[at] = shared[at]
        self._return_state(i, at)
        return Drift(before, after, len(at))

    def _return_state(self, i: int, at: torch.Tensor) -> None:
        """Give elements the global state; an entry that the global set does not have yet is zero."""
        slot, p = self.places.slots[i], self.places.params[i]
        own = self.optimizer.state[p] if self.state[i] else self.optimizer.state.get(p, {})
        for name in {**own, **self.state[i]}:
            here, there = own.get(name), self.state[i].get(name)
            if here is None and isinstance(there, torch.Tensor) and is_elementwise(name, there, p.shape):
                here = own[name] = torch.empty_strided(slot.shape, slot.stride, dtype=there.dtype).zero_()
            if is_elementwise(name, here, p.shape):
                flat(slot, here)[at] = flat(slot, there)[at] if there is not None else 0.0
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
                kept = value.clone() if isinstance(value, torch.Tensor) else value
                if is_elementwise(name, value, p.shape):
                    kept = torch.empty_strided(slot.shape, slot.stride, dtype=value.dtype).copy_(value)
                state[name] = kept
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


def _largest(distance: torch.Tensor) -> float:
    """The largest distance; NaN counts as infinite."""
    most = float(distance.max())
    return math.inf if math.isnan(most) else most
