"""Some of a model's gradients and their aggregator: which parameters they are of, and what waits of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch

from mpisparse.arrays import Bools
from mpisparse.backends.device import load_backend
from mpisparse.backends.flat import zeros
from mpisparse.comm.agreement import BROKEN, FINE, Notice
from mpisparse.comm.exchange import Exchange
from mpisparse.core.records import Parts
from mpisparse.core.step import Clock
from mpisparse.errors import ConfigurationError
from mpisparse.model.frozen import Frozen
from mpisparse.model.layout import Layout, collect_gradients
from mpisparse.model.published import Published
from mpisparse.schemes.options import Options
from mpisparse.schemes.state import check_kinds, step_state


class Bucket:
    """Averages some gradients over ranks, as one vector. `tensors`: of their shapes, strides and types, by parameter.

    may_be_unused: a parameter may have no gradient on any rank. DDP then leaves its gradient as it was, so that nothing of
    it may be published: what waits of it is out of sight in such a step.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], options: Options, exchange: Exchange, *, may_be_unused: bool = False
    ) -> None:
        self.layout = Layout(torch.nn.Module(), list(tensors.items()))
        backend = load_backend(device=self.layout.device)
        if backend.name == "cuda" and not options.on_device:
            raise ConfigurationError(f"this scheme runs on the host only, the model is on {self.layout.device}")
        residual = zeros(self.layout.size, torch.float32, self.layout.device)
        self.published = Published(self.layout, backend)
        parts = Parts(residual, self.layout.slots, self.layout.held, self.published, exchange, backend)
        self.aggregator = options.build(parts).aggregator
        self.aggregator.density_of = options.density_of
        self.frozen = Frozen(self.layout, backend)
        self.may_be_unused = may_be_unused
        self._keeps = not options.publishes_mean
        self._before: dict[str, Any] = {}  # the vectors before the last step, if it cannot be undone by what it published

    def average(self, grads: Sequence[torch.Tensor], density: float) -> None:
        """Replace gradients by their mean over ranks; collective. A refused one changes nothing."""
        aggregator, clock = self.aggregator, Clock()
        aggregator.check_sound()
        for slot, grad in zip(self.layout.slots, grads, strict=True):
            if not slot.takes(grad):
                raise ConfigurationError(
                    f"the gradient of {slot.name} is {grad.dtype} {list(grad.shape)}, expected {slot.dtype} "
                    f"{list(slot.shape)}"
                )
        aggregator.density = density
        aggregator.works.backend.use_threads(torch.get_num_threads())
        trouble = aggregator.ready(clock.lap)
        pieces = collect_gradients(self.layout, grads)
        unused = np.array([self.may_be_unused and not bool(grad.any()) for grad in grads])
        notice = Notice(aggregator.k, unused, BROKEN if trouble else FINE, trouble=trouble)
        notice = notice.nonfinite(pieces.first_nonfinite(aggregator.works.backend))
        with aggregator.in_words(self.layout.name_at, added=False):
            used = aggregator.agree(notice, clock)
        self._hold(np.zeros(len(grads), dtype=bool) if used is None else ~used)
        if self._keeps:
            self._before = {key: vector.copy() for key, vector in self.vectors().items()}
        if self.layout.held.remaining:
            with aggregator.in_words(self.layout.name_at, added=True), self.frozen.out_of_sight(self.vectors):
                aggregator.run(pieces, notice._replace(k=aggregator.k), clock)
        else:
            self.published.clear()
        for grad, view in zip(grads, self.published.views, strict=True):
            grad.copy_(view)

    def _hold(self, unused: Bools) -> None:
        self.frozen.hold(unused)
        if self.frozen.changed:
            self.aggregator.hold()
            self.frozen.changed = False

    def take_back(self) -> None:
        """The step is not done after all: the mean that was published waits again, on every rank.

        Where no mean is published (demo), the step's own gradient is lost, as with any optimizer that skips a step.
        """
        if self._keeps:
            for key, vector in self.vectors().items():
                vector[:] = self._before[key]
        else:
            self.aggregator.residual.add_(self.published.published())
        self._note_waiting()

    def vectors(self) -> dict[str, Any]:
        """All vectors whose elements belong to parameters, as the backend's arrays."""
        return {"residual": self.aggregator.parts.acc, **self.aggregator.memories()}

    def _note_waiting(self) -> None:
        """The residual was written to: a scorer that expects it to be empty takes note."""
        scorer = self.aggregator.works.scorer
        scorer.load(scorer.state())

    # What it tells, and its state

    @property
    def names(self) -> list[str]:
        """The parameters whose gradients these are."""
        return [slot.name for slot in self.layout.slots]

    def waiting(self) -> dict[str, torch.Tensor]:
        """What waits of each parameter, with all that a codec or a stage still has to send; local, changes nothing."""
        aggregator, rank, size = self.aggregator, self.aggregator.parts.exchange.rank, self.aggregator.parts.exchange.size
        residual = aggregator.residual.cpu().numpy().copy()
        _, residual = aggregator.resize({rank: aggregator.state()}, {rank: residual}, size, size, rank)
        return {s.name: torch.from_numpy(residual[s.begin : s.end].copy()) for s in self.layout.slots}

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on, as tensors and scalars; local."""
        parts = {f"step.{key}": self._saved(value) for key, value in self.aggregator.state().items()}
        return {"names": self.names, "residual": self.aggregator.residual.cpu().clone(), **parts}

    def _saved(self, value: Any) -> Any:
        if isinstance(value, str | int | float | list | dict | None):
            return deepcopy(value)
        return torch.from_numpy(np.array(self.aggregator.works.backend.to_host(value)))

    def load(self, states: Mapping[int, Mapping[str, Any]], old: int) -> None:
        """Take this rank's state, or what it takes over from the ranks that saved, `old` of them; local.

        `states`: those of the ranks in sources(). Raises ConfigurationError if one does not fit; load another bucket then.
        """
        aggregator, rank, size = self.aggregator, self.aggregator.parts.exchange.rank, self.aggregator.parts.exchange.size
        here = step_state(self.state())
        parts = {source: aggregator.upgraded(step_state(dict(state))) for source, state in states.items()}
        for source, part in parts.items():
            self._check_residual(states[source]["residual"])
            if set(part) != set(here):
                raise ConfigurationError(f"the state of {self.names[0]}... has {sorted(part)}, expected {sorted(here)}")
            check_kinds(part, here)
        if old == size:
            (part,), (residual,) = parts.values(), (state["residual"] for state in states.values())
        else:
            residuals = {source: state["residual"].numpy().copy() for source, state in states.items()}
            part, merged = aggregator.resize(parts, residuals, old, size, rank)
            residual = torch.from_numpy(merged)
        aggregator.check(part)
        aggregator.load(part)
        aggregator.residual.copy_(residual)

    def _check_residual(self, residual: object) -> None:
        shape = (self.layout.size,)
        if not isinstance(residual, torch.Tensor) or residual.shape != shape or residual.dtype is not torch.float32:
            raise ConfigurationError(
                f"the residual of {self.names[0]} in the state must be a float32 tensor of shape {shape}"
            )
        if not bool(torch.isfinite(residual).all()):
            raise ConfigurationError(f"the residual of {self.names[0]}... in the state is not finite everywhere")

    def close(self) -> None:
        """End what runs in the background; the exchange is not the bucket's own."""
        self.aggregator.works.scorer.close()
