"""The two sets of weights: the rank's own in the model, the shared ones in a flat vector."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mpisparse.arrays import Bools, Floats, State
from mpisparse.backends.flat import checksum
from mpisparse.comm.exchange import Exchange
from mpisparse.comm.roll_call import FIRST, meet
from mpisparse.comm.survival import together
from mpisparse.core.aggregator import Aggregator
from mpisparse.core.records import Stats
from mpisparse.errors import ConfigurationError, GradientError
from mpisparse.schemes.companion import Companion, Site
from mpisparse.schemes.drift.scored import ScoredDistance
from mpisparse.schemes.drift.start import DenseStart
from mpisparse.schemes.drift.weights import OwnWeights
from mpisparse.schemes.optimizers import holds_copies
from mpisparse.select.rotating import Pace
from mpisparse.wire.feedback import AtFixedOwners
from mpisparse.wire.on_host import OnHost


class Drifting(Companion):
    """Counts the optimizer's steps, and puts the shared weights into the model on request.

    start: averages gradients in the first steps; None: there are none such.
    """

    idle = False

    def __init__(
        self, aggregator: Aggregator, site: Site, weights: OwnWeights, *, every: int | str,
        start: DenseStart | None = None,
    ) -> None:  # fmt: skip
        self.aggregator = aggregator
        self.exchange, self.backend = aggregator.parts.exchange, aggregator.parts.backend
        self.shared = aggregator.parts.residual
        self.site = site
        self.subject: Any = weights
        self.weights = weights
        self.pace = Pace.of(every)
        self.start = start
        self.done = 0
        self.optimizer: torch.optim.Optimizer | None = None
        self._loaded: dict[str, torch.Tensor] = {}
        self.shared.copy_(weights.flat())
        self._versions = self._written()

    # The optimizer

    def adopt(self, optimizer: torch.optim.Optimizer, *, scales: bool = False) -> None:
        if holds_copies(optimizer):
            raise ConfigurationError(
                f'scheme "{self.weights.scheme}" moves weights behind the optimizer\'s back, and {type(optimizer).__name__} '
                "keeps copies of weights in its state; choose another optimizer, or another scheme"
            )
        if self.optimizer is not None:
            raise ConfigurationError(
                f'scheme "{self.weights.scheme}" exchanges after the step of one optimizer, and one is attached already; '
                "call remove() on what attach() returned first"
            )
        self.optimizer = optimizer

    def release(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = None

    def check_by_hand(self) -> None:
        """Raise on all ranks if nothing has moved before the first exchange: it goes after optimizer.step()."""
        if self.starting:
            raise ConfigurationError("dense_steps averages gradients before optimizer.step(): attach() the optimizer")
        if self.done:
            return
        still = self._written() == self._versions and torch.equal(self.weights.flat(), self.shared)
        error = GradientError(
            f'no weight has moved yet: with scheme "{self.weights.scheme}" call sync.step() after optimizer.step(), or '
            "attach() the optimizer"
        )

        def check() -> None:
            meet(self.exchange, FIRST)
            self.exchange.raise_together(error if still else None, GradientError)

        together(self.exchange, check)

    def _written(self) -> int:
        """How often anyone wrote into the weights."""
        return sum(p._version for p in self.site.places.params)

    # A step

    def begin(self) -> None:
        if self.weights.lent:
            raise RuntimeError(
                f"r{self.exchange.rank} | the shared weights are in the model: optimizer.step() was called inside "
                "global_weights(), or the last one did not end"
            )

    @property
    def starting(self) -> bool:  # type: ignore[override]  # not for all steps
        """Whether gradients are averaged in the coming step."""
        return self.start is not None and self.done < self.start.steps

    def average(self, trouble: str | None, call: Any = None) -> None:
        assert self.start is not None
        self.start.average(self.done, trouble, call)

    def counted(self, number: int) -> int:
        """Count the optimizer's steps, not the exchanges."""
        return self.done - 1

    def is_due(self) -> bool:
        """Count one step of the optimizer; return whether an exchange follows it. Collective at the end of a dense start."""
        self.done += 1
        late = self.done - (0 if self.start is None else self.start.steps)  # steps since the start
        if late <= 0:
            self.shared.copy_(self.weights.flat())
            if late == 0:
                self._end_start()
            return False
        every, before = self.pace.at(late - 1)
        return (before + 1) % every == 0

    def _end_start(self) -> None:
        """End the dense start: ranks have their own weights from now on. Raises on all ranks unless these are equal."""
        assert self.start is not None
        self.start.end()
        if len(set(self.exchange.gather_texts(str(checksum([self.shared]))))) > 1:
            raise GradientError(
                f"r{self.exchange.rank} | the ranks' weights differ after {self.start.steps} dense steps with the same "
                "gradients: their optimizers differ in settings or state; construct them alike on all ranks"
            )

    def rested(self, stats: Stats) -> Stats:
        """The statistics of a step in which gradients were averaged."""
        if self.start is None or self.done > self.start.steps:
            return stats
        sent, received = self.start.moved
        n = len(self.shared)
        return replace(
            stats, step=self.done - 1, density=1.0, set_density=1.0, selected=n, sent_density=1.0, bytes_sent=sent,
            bytes_received=received, control_bytes=0,
        )  # fmt: skip

    # Between steps

    def drain(self) -> Iterator[Bools | None]:
        """Apply deliveries in flight, then exchange all that is left, at rate 1 and in float32; then W = G on all ranks."""
        inside = RuntimeError("synchronize() inside global_weights(): leave the block first") if self.weights.lent else None
        together(self.exchange, lambda: self.exchange.raise_together(inside, RuntimeError))
        missed = GradientError(f"{self.weights.missed}; load a saved state") if self.weights.missed else None
        together(self.exchange, lambda: self.exchange.raise_together(missed, GradientError))
        self.weights.refused()
        for _ in self.aggregator.arrivals():
            self.weights.publish(None)
        left = together(self.exchange, self._sum_left)
        drift = self.backend.array_of(left)
        self.backend.divide(drift, self.exchange.size)
        *_, bad = self.backend.select(drift, 0, len(drift), float("inf"))
        if bad >= 0:
            raise GradientError(
                f"r{self.exchange.rank} | the weights of some rank are not finite in flat index {bad}: nothing was "
                "exchanged; load a saved state"
            )
        self.forget()
        self.shift(left)
        self.weights.set_flat(self.shared)
        yield from ()

    def _sum_left(self) -> torch.Tensor:
        """The sum of what all ranks still have to add to the shared weights; collective."""
        left = self.left()
        self.exchange.allreduce_(self.backend.array_of(left))
        return left

    def shift(self, by: torch.Tensor) -> None:
        """Add a vector to the shared weights that is the same on all ranks."""
        self.shared += by

    def left(self) -> torch.Tensor:
        """What this rank still has to add to the shared weights: W - G, and the error that it remembers, times the ranks."""
        drift = self.drift()
        self.reducer.give(self.backend, self.backend.array_of(drift), self.exchange.rank, self.exchange.size)
        return drift

    @property
    def reducer(self) -> AtFixedOwners:
        """The reducer that remembers an error."""
        reducer = self.aggregator.works.reducer
        reducer = reducer.inner if isinstance(reducer, OnHost) else reducer
        assert isinstance(reducer, AtFixedOwners)
        return reducer

    def forget(self) -> None:
        """Clear what remains, because all of it was exchanged."""
        self.reducer.error[:] = 0.0
        scorer = self.aggregator.works.scorer
        if isinstance(scorer, ScoredDistance):
            scorer.waiting[:] = 0.0

    def replicated(self) -> Sequence[torch.Tensor]:
        return [self.shared[slot.begin : slot.end] for slot in self.site.places.slots]

    def drift(self) -> torch.Tensor:
        """W - G, as a new vector."""
        return self.weights.flat().sub_(self.shared)

    def global_weights(self) -> AbstractContextManager[None]:
        return self._shared_in_place()

    @contextlib.contextmanager
    def _shared_in_place(self) -> Iterator[None]:
        """Put the shared weights into the model inside the block."""
        if self.weights.lent:
            yield
            return
        self.weights.lend(self._as_parameters())
        try:
            yield
        finally:
            self.weights.take_back()

    def _as_parameters(self) -> list[torch.Tensor]:
        """The shared weights in the parameters' shapes and types; float32 on the same memory."""
        slots = self.site.places.slots
        return [slot.view(self.shared[slot.begin : slot.end].to(slot.dtype), slot.begin) for slot in slots]

    # State: in a checkpoint the model holds G, and W is stored in place of the residual

    def state(self) -> State:
        """digest: of G as the model has it. The remainders, if any, are what the weights' types cannot hold."""
        state: State = {"done": self.done, "digest": checksum(self._as_parameters())}
        if self.weights.remainders:
            state["remainder"] = self.weights.remainder().cpu().numpy()
            state["shared_remainder"] = self.weights.remainder_of(self.shared).cpu().numpy()
        return state if self.start is None else {**state, **self.start.state()}

    def check(self, state: State) -> None:
        done = int(state["done"])
        if self.start is not None:
            self.start.check(state, done)
        count = len(self.weights.remainder())
        for name in ("remainder", "shared_remainder") if count else ():
            if state[name].shape != (count,) or not np.isfinite(state[name]).all():
                raise ConfigurationError(f"the {name} in the state must be {count} finite numbers")

    def load(self, state: State) -> None:
        check_held(self.exchange, self.site.places.params, state["digest"])
        self.done = int(state["done"])
        if self.start is not None:
            self.start.load(state, self.done)
        self._loaded = {name: torch.as_tensor(state[name]) for name in ("remainder", "shared_remainder") if name in state}

    def kept(self) -> torch.Tensor:
        return self.weights.rounded()

    def restore(self, kept: torch.Tensor) -> None:
        shared = self.weights.rounded(in_model=True)
        self.weights.take_back()
        if self._loaded:
            self.weights.with_remainder(shared, self._loaded["shared_remainder"])
        self.shared.copy_(shared)
        self.weights.set_flat(kept, self._loaded.get("remainder"))

    def whole(self, kept: Floats, state: State) -> Floats:
        weights = torch.from_numpy(kept.copy())
        whole: Floats = self.weights.with_remainder(weights, torch.as_tensor(state.get("remainder", []))).numpy()
        return whole

    def resize(self, states: Mapping[int, State], old: int, new: int, rank: int) -> State:
        """A new rank has no remainder yet: its weights are rounded when they are loaded."""
        merged = super().resize(states, old, new, rank)
        if self.weights.remainders:
            merged["remainder"] = np.zeros_like(merged["remainder"])
        return merged if self.start is None else {**merged, **self.start.resize(states, old, new, rank)}


def check_held(exchange: Exchange, params: Sequence[torch.nn.Parameter], digest: int) -> None:
    """Raise on all ranks unless the model holds the shared weights that a state was saved with; collective."""
    error = None
    if checksum(p.data for p in params) != digest:
        error = ConfigurationError(
            "the model does not hold the shared weights that this state was saved with; save the model inside "
            "`with sync.global_weights():`, as checkpoint.save does, and load it before the state"
        )
    exchange.raise_together(error)
