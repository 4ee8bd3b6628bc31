"""Inputs of the nets beside gradients: the optimizer's coming step, the element's row and column, the kind of parameter.

All are relative to the layer. Rows and columns are the first and second dimension of a tensor, in any memory order; the root
mean squares of the accumulated values in them are measured at each lesson. The optimizer's state is read, never copied: a
resumed run loads it too, and so sees the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from mpisparse.arrays import Floats, Halves, Ints, State
from mpisparse.backends.flat import Slot, in_order
from mpisparse.backends.kinds import BF16, round_to
from mpisparse.errors import ConfigurationError
from mpisparse.schemes.optimizers import moments

if TYPE_CHECKING:
    from mpisparse.schemes.companion import Site

FEATURES = ("gradients", "all")
VECTOR, MATRIX, CONVOLUTION, EMBEDDING = -1.0, 0.0, 1.0, 3.0  # far enough apart on the nets' logarithmic scale
TINY = 1e-30


class Features:
    """Computes these inputs.

    kinds: include the kind of parameter, which is constant for the net of one layer. site: None if there is no model.
    factors: one over the root mean square of a layer's coming step. lines: the relative root mean squares of each layer's
    rows, then of its columns; views of `measured`.
    """

    def __init__(self, slots: Sequence[Slot], site: Site | None, *, kinds: bool) -> None:
        self.slots = slots
        self.site = site
        self.kinds = _kinds(slots, site) if kinds else []
        self.count = count_of(kinds=kinds)
        lengths = [length for slot in slots for length in _lines(slot)]
        self.measured: Floats = np.ones(sum(lengths), dtype=np.float32)
        self.lines = np.split(self.measured, np.cumsum(lengths)[:-1])
        self.factors: Floats = np.zeros(len(slots), dtype=np.float32)

    def measure(self, acc: Floats) -> None:
        """Measure rows and columns of the accumulator, and the coming step of each layer."""
        for i, slot in enumerate(self.slots):
            if slot.end == slot.begin:
                continue
            if len(slot.shape) > 1:
                squares = np.square(slot.view(torch.from_numpy(acc)).numpy(), dtype=np.float64)
                mean = squares.mean()
                for d in (0, 1):
                    others = tuple(other for other in range(squares.ndim) if other != d)
                    self.lines[2 * i + d][:] = np.sqrt(squares.mean(axis=others) / mean) if mean > 0 else 1.0
            moves = self._coming(i, slice(None))
            root = 0.0 if moves is None else float(np.sqrt(np.square(moves, dtype=np.float64).mean()))
            self.factors[i] = 1 / root if TINY < root < np.inf else 0.0

    def write(self, index: Ints, accumulated: Halves, out: Halves) -> None:
        """Write the features at an ascending index, one row after the other.

        accumulated: the values there in bfloat16. Nets multiply each input by their sign, which is meant for the optimizer's
        step only, so the other rows are written with that sign.
        """
        values = np.zeros((self.count, len(index)), dtype=np.float32)
        for i, slot in enumerate(self.slots):
            a, b = np.searchsorted(index, (slot.begin, slot.end)).tolist()
            if a == b:
                continue
            at, part = index[a:b] - slot.begin, values[:, a:b]
            moves = self._coming(i, at)
            part[0] = 0.0 if moves is None else np.nan_to_num(moves * self.factors[i])
            for d, count in enumerate(_lines(slot)):
                part[1 + d] = self.lines[2 * i + d][at // max(1, slot.stride[d]) % count if count > 1 else 0]
            if self.kinds:
                part[3] = self.kinds[i]
        rows = out.reshape(values.shape)
        rows[:] = round_to(values, BF16)
        rows[1:] ^= accumulated & np.uint16(0x8000)

    def _coming(self, i: int, at: Ints | slice) -> Floats | None:
        """The attached optimizer's coming step of a parameter's elements, with the sign of a gradient; None if unknown."""
        if self.site is None:
            return None
        slot, p = self.slots[i], self.site.places.params[i]
        found = (moments(one.optimizer, p) for one in self.site.attached)
        momentum, square = next((pair for pair in found if pair[0] is not None), (None, None))
        if momentum is None:
            return None
        moves: Floats = _flat(slot, momentum)[at]
        if square is not None:
            moves = np.divide(moves, np.sqrt(_flat(slot, square)[at]) + np.float32(TINY))
        return moves

    def state(self) -> State:
        """What was measured."""
        return {"features.lines": self.measured, "features.factors": self.factors}

    def check(self, state: State) -> None:
        """Raise ConfigurationError unless load() could take the state."""
        for key, own in self.state().items():
            given = np.asarray(state[key])
            if given.shape != own.shape or not np.isfinite(given).all():
                raise ConfigurationError(f"the {key} in the state must be {len(own)} finite numbers")

    def load(self, state: State) -> None:
        """Take what state() gave."""
        for key, own in self.state().items():
            own[:] = state[key]


def count_of(*, kinds: bool) -> int:
    """The number of features: the optimizer's step, row, column, and the kind of parameter."""
    return 3 + kinds


def _lines(slot: Slot) -> tuple[int, int]:
    """The numbers of rows and columns; a vector counts as one of each."""
    return (slot.shape[0], slot.shape[1]) if len(slot.shape) > 1 else (1, 1)


def _flat(slot: Slot, tensor: torch.Tensor) -> Floats:
    """A tensor of the optimizer's state as its elements in flat order."""
    flat: Floats = in_order(slot, tensor.detach()).as_strided((slot.end - slot.begin,), (1,)).float().numpy()
    return flat


def _kinds(slots: Sequence[Slot], site: Site | None) -> list[float]:
    """The kind of each parameter as a number."""
    modules = () if site is None else site.model.modules()
    tables = {id(module.weight) for module in modules if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    by_rank = (VECTOR, VECTOR, MATRIX)
    kinds = [by_rank[len(slot.shape)] if len(slot.shape) < len(by_rank) else CONVOLUTION for slot in slots]
    params = () if site is None else site.places.params
    return [EMBEDDING if id(p) in tables else kind for kind, p in zip(kinds, params, strict=True)] if params else kinds
