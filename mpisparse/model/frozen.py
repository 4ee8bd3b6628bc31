"""Parameters frozen midway: their residual is hidden while a scheme selects, and restored between steps."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpisparse.arrays import Bools
from mpisparse.model.layout import Layout

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend

Vectors = Callable[[], dict[str, Any]]


class Frozen:
    """Which of the exchanged parameters require no gradient now; `layout.held` are their stretches."""

    def __init__(self, layout: Layout, backend: Backend) -> None:
        self.layout = layout
        self.backend = backend
        self.mask = np.zeros(len(layout.params), dtype=bool)
        self.digest = 0
        self.changed = False  # since the owner last reset this
        self._memory: dict[str, list[Any]] = {}

    def look(self) -> None:
        """Check which are frozen now."""
        now = np.fromiter((not p.requires_grad for p in self.layout.params), dtype=bool, count=len(self.layout.params))
        self.hold(now)

    def hold(self, now: Bools) -> None:
        """Hold back these parameters, and no others."""
        if np.array_equal(now, self.mask):
            return
        self.mask, self.changed = now, True
        digest = hashlib.blake2b(np.packbits(now).tobytes(), digest_size=7).digest()
        self.digest = int.from_bytes(digest) if now.any() else 0
        slots = [slot for slot, is_frozen in zip(self.layout.slots, now, strict=True) if is_frozen]
        self.layout.held.hold([(slot.begin, slot.end) for slot in slots if slot.end > slot.begin])
        self._memory.clear()

    def names(self) -> str:
        """The frozen parameters by name."""
        return ", ".join(slot.name for slot, is_frozen in zip(self.layout.slots, self.mask, strict=True) if is_frozen)

    def take_out(self, grads: list[torch.Tensor | None]) -> list[tuple[int, torch.Tensor]]:
        """Take the gradients of frozen parameters out of a list; they were computed before the freezing, and wait, too."""
        out = []
        for i in np.flatnonzero(self.mask).tolist():
            grad, grads[i] = grads[i], None
            if grad is not None:
                out.append((i, grad))
        return out

    @contextlib.contextmanager
    def out_of_sight(self, vectors: Vectors) -> Iterator[None]:
        """Set the held stretches to zero inside the block, and add their values back at its end; `vectors`: by name."""
        if not self.layout.held.stretches:
            yield
            return
        before = vectors()
        for name, vector in before.items():
            parts = [vector[a:b] for a, b in self.layout.held.stretches]
            if name not in self._memory:
                self._memory[name] = [self.backend.copy(part) for part in parts]
            for part, kept in zip(parts, self._memory[name], strict=True):
                kept[:] = part
                part[:] = 0.0
        try:
            yield
        finally:
            now = vectors()
            for name in before:
                for (a, b), kept in zip(self.layout.held.stretches, self._memory[name], strict=True):
                    self.backend.add(now[name][a:b], kept)
