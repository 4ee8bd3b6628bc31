"""A dense start: in the first steps gradients are averaged before the optimizer's step, so that all weights stay equal.

All elements are sent through the owners in few bits, with error feedback both ways. The last of these steps is in float32,
so that no error is left when the ranks start to train on their own weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mpisparse.arrays import Bools, Floats, State
from mpisparse.backends.flat import Slot
from mpisparse.backends.protocol import Backend
from mpisparse.comm.agreement import BROKEN, NO_BACKWARD, Notice, Refusal
from mpisparse.comm.exchange import Exchange
from mpisparse.comm.regions import even_regions
from mpisparse.core.records import Parts
from mpisparse.core.refusals import explain
from mpisparse.core.state import merge_residuals
from mpisparse.core.step import share_readiness
from mpisparse.errors import ConfigurationError, GradientError
from mpisparse.schemes.companion import Places
from mpisparse.wire.averaging import Averaging

ADVICE = "nothing was changed: lower the learning rate or clip, or pass a GradScaler to attach(), which skips such steps"
NOTHING: Floats = np.empty(0, dtype=np.float32)


class GradientMeans:
    """Replaces each rank's gradients by a mean over several ranks, before the optimizer's step.

    work: the vector of their sum, then their mean. moved: bytes sent and received between all ranks in the last step.
    """

    backend: Backend
    what: str  # the option that requires it

    def __init__(self, places: Places, exchange: Exchange) -> None:
        self.places = places
        self.exchange = exchange
        self.moved = (0, 0)
        self.damaged = ""

    @property
    def work(self) -> torch.Tensor:
        raise NotImplementedError

    def average_(self, step: int) -> None:
        """Replace work by the mean; collective."""
        raise NotImplementedError

    def not_used(self, slot: Slot) -> None:
        """Called if no rank had a gradient of a parameter, whose mean is then not published."""

    def rounded(self, slot: Slot, left: torch.Tensor) -> None:
        """Called with the part of a mean that the parameter's type cannot hold."""

    def average(self, step: int, trouble: str | None, call: Any = None) -> None:
        """Replace p.grad by the mean over ranks; collective. An error of one rank is raised on all.

        trouble: why this rank cannot go on, if so. call: as in Companion.average.
        """
        exchange = self.exchange
        if self.damaged:
            raise GradientError(f"r{exchange.rank} | {self.damaged}; load a saved state")
        exchange.reset_counters()
        try:
            used = self._agree(step, trouble, call)
            self.damaged = "a step was refused after its gradients were added"
            self.average_(step)
        except Refusal as refusal:
            raise explain(refusal, exchange, self._name_at, "", advice=ADVICE)[0] from refusal.__cause__
        self._publish(used)
        self.damaged = ""
        self.moved = exchange.nbytes_sent, exchange.nbytes_received

    def _agree(self, step: int, trouble: str | None, call: Any) -> Bools | None:
        """Read the gradients; returns which parameters have one on some rank, None: all."""
        work, grads = self.work, [p.grad for p in self.places.params]
        unused = np.array([grad is None for grad in grads])
        notice = Notice(0, unused, NO_BACKWARD if unused.all() and call is None else 0, step=step, call=call)
        if trouble := trouble or self.places.misfit(grads) or self._sparse(grads):
            notice = notice._replace(status=BROKEN, trouble=trouble)
        else:
            for slot, grad in zip(self.places.slots, grads, strict=True):
                slot.view(work).zero_() if grad is None else slot.view(work).copy_(grad)
            *_, bad = self.backend.select(self.backend.array_of(work), 0, len(work), float("inf"))
            notice = notice.nonfinite(bad)
        return share_readiness(self.exchange, notice)

    def _sparse(self, grads: list[torch.Tensor | None]) -> str:
        """A text that names a sparse gradient, which cannot be averaged; empty if there is none."""
        pairs = zip(self.places.slots, grads, strict=True)
        name = next((slot.name for slot, g in pairs if g is not None and g.layout is not torch.strided), None)
        return "" if name is None else f"{self.what} cannot average the sparse gradient of parameter {name}; leave it out"

    @torch.no_grad()
    def _publish(self, used: Bools | None) -> None:
        """Write the mean where the optimizer reads it."""
        for i, (slot, p) in enumerate(zip(self.places.slots, self.places.params, strict=True)):
            if used is not None and not used[i]:
                self.not_used(slot)
                continue
            mean = slot.view(self.work)
            if p.grad is None:
                p.grad = torch.empty_like(p)
            p.grad.copy_(mean)
            if p.dtype is not torch.float32:
                self.rounded(slot, mean - p.grad.float())

    def _name_at(self, index: int) -> str:
        return next(slot.name for slot in self.places.slots if index < slot.end)


class DenseStart(GradientMeans):
    """Replaces each rank's gradients by the mean over all ranks in the first `steps` steps of the optimizer.

    averaging: holds the codec's errors for the next step; None when the start is over.
    """

    what = "dense_steps"

    def __init__(self, places: Places, parts: Parts, steps: int, codec: str) -> None:
        super().__init__(places, parts.exchange)
        self.steps = steps
        self.codec = codec
        self.backend = parts.backend
        self.device = parts.residual.device
        self.averaging: Averaging | None = self._averaging()

    def _averaging(self) -> Averaging:
        """A new one, without errors."""
        return Averaging(self.places.size, self.exchange, self.backend, self.device)

    @property
    def waits(self) -> Averaging:
        """The averaging, while the start lasts."""
        assert self.averaging is not None
        return self.averaging

    @property
    def work(self) -> torch.Tensor:
        return self.waits.work

    def average_(self, step: int) -> None:
        self.waits.average_(self.codec if step + 1 < self.steps else "fp32")

    def not_used(self, slot: Slot) -> None:
        self.waits.give_back_(slot.begin, slot.end, None)

    def rounded(self, slot: Slot, left: torch.Tensor) -> None:
        """Keep it for the next step, on all ranks."""
        slot.view(self.waits.residual).add_(left)

    def end(self) -> None:
        """Free the memory, because ranks train on their own weights from now on."""
        self.averaging = None

    # State

    def state(self) -> State:
        """The codec's errors on what this rank sent, and on what it returned as an owner; empty when the start is over."""
        if self.averaging is None:
            return {"start_residual": NOTHING, "start_error": NOTHING}
        residual, error = (waits.cpu().numpy() for waits in (self.averaging.residual, self.averaging.error))
        return {"start_residual": residual, "start_error": error}

    def check(self, state: State, done: int) -> None:
        """Raise ConfigurationError unless load() could take a state saved after `done` steps."""
        region = even_regions(self.places.size, self.exchange.size)[self.exchange.rank]
        counts = (self.places.size, region.hi - region.lo) if done < self.steps else (0, 0)
        for name, count in zip(("start_residual", "start_error"), counts, strict=True):
            if state[name].shape != (count,) or not np.isfinite(state[name]).all():
                raise ConfigurationError(f"the {name} in the state must be {count} finite numbers")

    def load(self, state: State, done: int) -> None:
        """Load what state() returned after `done` steps."""
        self.damaged = ""
        if done >= self.steps:
            self.end()
            return
        self.averaging = self.averaging or self._averaging()
        self.averaging.residual.copy_(torch.as_tensor(state["start_residual"]))
        self.averaging.error.copy_(torch.as_tensor(state["start_error"]))

    def resize(self, states: Mapping[int, State], old: int, new: int, rank: int) -> State:
        """The errors of a rank among `new` ranks; owners' errors join the residuals before these are merged."""
        if not any(len(state["start_residual"]) for state in states.values()):
            return {"start_residual": NOTHING, "start_error": NOTHING}
        residuals: dict[int, Any] = {}
        for source, state in states.items():
            own, region = np.array(state["start_residual"]), even_regions(self.places.size, old)[source]
            own[region.lo : region.hi] += np.asarray(state["start_error"]) * np.float32(old)
            residuals[source] = own
        region = even_regions(self.places.size, new)[rank]
        error = np.zeros(region.hi - region.lo, dtype=np.float32)
        return {"start_residual": merge_residuals(residuals, old, new, rank), "start_error": error}
