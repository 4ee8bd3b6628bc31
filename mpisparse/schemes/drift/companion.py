"""The two sets of weights around the exchanges: the rank's own in the model, the shared ones in a flat vector."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from mpisparse.arrays import Bools, Floats, State
from mpisparse.core.aggregator import Aggregator
from mpisparse.core.state import sources
from mpisparse.errors import ConfigurationError, GradientError
from mpisparse.schemes.companion import Companion, Site
from mpisparse.schemes.drift.weights import OwnWeights
from mpisparse.wire.feedback import AtFixedOwners

HOLDS_COPIES = ("schedulefree", "lookahead")  # optimizers whose state holds copies of weights, or parts of their names


class Drifting(Companion):
    """Counts the optimizer's steps, and has the shared weights in the model for a while."""

    idle = False

    def __init__(self, aggregator: Aggregator, site: Site, weights: OwnWeights, *, every: int, buffers: str) -> None:
        self.aggregator = aggregator
        self.exchange = aggregator.parts.exchange
        self.shared = aggregator.parts.residual
        self.site = site
        self.subject: Any = weights
        self.weights = weights
        self.every = every
        self.buffers = buffers
        self.done = 0
        self.optimizer: torch.optim.Optimizer | None = None
        self.swapped = False
        self.shared.copy_(weights.flat())
        self._versions = self._written()

    # The optimizer

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        names = " ".join(kind.__name__.lower() for kind in type(optimizer).__mro__)
        if any(known in names for known in HOLDS_COPIES):
            raise ConfigurationError(
                f'scheme "drift" moves weights behind the optimizer\'s back, and {type(optimizer).__name__} keeps copies of '
                "weights in its state; choose another optimizer, or another scheme"
            )
        if self.optimizer not in (None, optimizer):
            raise ConfigurationError('scheme "drift" exchanges after the step of one optimizer; another is attached already')
        self.optimizer = optimizer

    def check_by_hand(self) -> None:
        """Raise on all ranks if nothing has moved before the first exchange: it goes after optimizer.step()."""
        if self.done:
            return
        still = self._written() == self._versions and torch.equal(self.weights.flat(), self.shared)
        error = GradientError(
            'no weight has moved yet: with scheme "drift" call sync.step() after optimizer.step(), or attach() the optimizer'
        )
        self.exchange.raise_together(error if still else None, GradientError)

    def _written(self) -> int:
        """How often anyone wrote into the weights."""
        return sum(p._version for p in self.site.places.params)

    # A step

    def begin(self) -> None:
        if self.swapped:
            raise RuntimeError(
                f"r{self.exchange.rank} | the shared weights are in the model: optimizer.step() was called inside "
                "global_weights(), or the last one did not end"
            )

    def is_due(self) -> bool:
        """Count one step of the optimizer; tell whether an exchange follows it."""
        self.done += 1
        return self.done % self.every == 0

    # Beside the steps

    def drain(self) -> Iterator[Bools | None]:
        """Exchange all that is left, at rate 1 and in float32: all ranks then have the shared weights."""
        inside = RuntimeError("synchronize() inside global_weights(): leave the block first") if self.swapped else None
        self.exchange.raise_together(inside, RuntimeError)
        reducer = self.aggregator.works.reducer
        assert isinstance(reducer, AtFixedOwners)
        drift = self.drift().numpy()
        drift[reducer.owned(self.exchange.rank, self.exchange.size)] += reducer.error * np.float32(self.exchange.size)
        self.exchange.allreduce_(drift)
        drift /= np.float32(self.exchange.size)
        bad = np.flatnonzero(~np.isfinite(drift))[:1]
        if len(bad):
            raise GradientError(
                f"r{self.exchange.rank} | the weights of some rank are not finite in flat index {int(bad[0])}: nothing was "
                "exchanged; load a saved state"
            )
        reducer.error[:] = 0.0
        self.shared += torch.from_numpy(drift)
        self.weights.set_flat(self.shared)
        yield from ()

    def drift(self) -> torch.Tensor:
        """W - G, as a new vector."""
        return self.weights.flat().sub_(self.shared)

    def global_weights(self) -> AbstractContextManager[None]:
        return self._shared_in_place()

    @contextlib.contextmanager
    def _shared_in_place(self) -> Iterator[None]:
        """Have the shared weights in the model for a while; with buffers of other ranks this is collective."""
        if self.swapped:
            yield
            return
        own = [p.data for p in self.site.places.params]
        kept = self._take_buffers()
        for slot, p in zip(self.site.places.slots, self.site.places.params, strict=True):
            shared = slot.view(self.shared)
            p.data = shared if p.dtype is torch.float32 else shared.to(p.dtype)
        self.swapped = True
        try:
            yield
        finally:
            if self.swapped:  # no state was loaded meanwhile
                self.swapped = False
                for p, weight in zip(self.site.places.params, own, strict=True):
                    p.data = weight
                for buffer, values in kept:
                    buffer.copy_(values)

    @torch.no_grad()
    def _take_buffers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Set the model's buffers as `buffers` says; returns the rank's own, to be given back."""
        if self.buffers == "own" or self.exchange.size == 1:
            return []
        kept = [(buffer, buffer.clone()) for buffer in self.site.model.buffers()]
        for buffer, own in kept:
            if self.buffers == "average" and buffer.is_floating_point():
                total = own.double().reshape(-1).numpy().copy()
                self.exchange.allreduce_(total)
                buffer.copy_(torch.from_numpy(total / self.exchange.size).reshape(buffer.shape))
            else:
                dense = own.reshape(-1).clone()
                self.exchange.broadcast_(dense.view(torch.uint8).numpy())
                buffer.copy_(dense.reshape(buffer.shape))
        return kept

    # State: the model holds G in a checkpoint, the residual's place holds W

    def state(self) -> State:
        return {"done": self.done}

    def check(self, state: State) -> None:
        int(state["done"])

    def load(self, state: State) -> None:
        self.done = int(state["done"])
        self.swapped = False

    def kept(self) -> torch.Tensor:
        return self.weights.flat()

    def restore(self, kept: torch.Tensor) -> None:
        self.shared.copy_(self.weights.flat())
        self.weights.set_flat(kept)

    def moved(self, kept: Mapping[int, Floats], new: int, rank: int) -> Floats:
        """A new rank begins as its source, shifted so that the mean over ranks stays."""
        old = len(kept)
        shift = np.mean([weights.astype(np.float64) for weights in kept.values()], axis=0)
        shift -= np.mean([kept[sources(old, new, j)[0]].astype(np.float64) for j in range(new)], axis=0)
        moved: Floats = (kept[sources(old, new, rank)[0]] + shift).astype(np.float32)
        return moved

    def resize(self, states: Sequence[State]) -> State:
        return {"done": states[0]["done"]}
