"""Bases of what wraps a part: calls are forwarded to the inner one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mpisparse.arrays import Bytes, Floats, Ints, State
from mpisparse.backends.flat import Pieces, Slot
from mpisparse.select.candidates import Candidates
from mpisparse.select.scorers import Scorer

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.select.scorers import Exempt, Lap


class Stateful(Protocol):
    """What depends on earlier steps; see Scorer and Selection."""

    def state(self) -> State: ...
    def check(self, state: State) -> None: ...
    def load(self, state: State) -> None: ...
    def resize(self, states: Sequence[State]) -> State: ...


class StateInside:
    """Wraps a part, `inner`, whose state is its own state."""

    inner: Stateful

    def state(self) -> State:
        return self.inner.state()

    def check(self, state: State) -> None:
        self.inner.check(state)

    def load(self, state: State) -> None:
        self.inner.load(state)

    def resize(self, states: Sequence[State]) -> State:
        return self.inner.resize(states)


class Around(StateInside, Scorer):
    """Forwards every call to the inner scorer."""

    inner: Scorer

    def __init__(self, inner: Scorer) -> None:
        self.inner = inner
        self.prior = inner.prior
        self.by_magnitude = inner.by_magnitude
        self.tags = inner.tags
        self.acc = inner.acc
        self.keys = inner.keys
        self.unsent = inner.unsent
        self.take = inner.take

    def ready(self, exempt: Exempt, lap: Lap) -> str:
        trouble = self.inner.ready(exempt, lap)
        self.cause = self.inner.cause
        return trouble

    def accumulate(self, pieces: Pieces | None, lo: int, hi: int, floor: float) -> Candidates:
        return self.inner.accumulate(pieces, lo, hi, floor)

    def add(self, i: int, slot: Slot, grad: torch.Tensor) -> int:
        return self.inner.add(i, slot, grad)

    def depart(self, backend: Backend, index: Ints) -> Floats:
        return self.inner.depart(backend, index)

    def give_back(self, backend: Backend, index: Ints, values: Floats) -> None:
        self.inner.give_back(backend, index, values)

    def figures(self) -> tuple[float, ...]:
        return self.inner.figures()

    def received(self, index: Ints, tags: Bytes) -> None:
        self.inner.received(index, tags)

    def sent(self, index: Ints) -> None:
        self.inner.sent(index)

    def details(self) -> dict[str, float]:
        return self.inner.details()

    def memories(self) -> dict[str, Any]:
        return self.inner.memories()

    def close(self) -> None:
        self.inner.close()
