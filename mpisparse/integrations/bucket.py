"""One bucket of gradients and its aggregator: which parameters it has, and what waits of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

Vectors = dict[str, torch.Tensor]  # of one parameter: the residual, and what else its elements are selected by


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
        self.frozen = Frozen(self.layout, backend)
        self.may_be_unused = may_be_unused
        self._keeps = not options.publishes_mean
        self._before: dict[str, Any] = {}  # the vectors before the last step, if it cannot be undone by what it published

    def average(self, grads: Sequence[torch.Tensor], density: float) -> None:
        """Replace gradients by their mean over ranks; collective. A refused one changes nothing."""
        aggregator, clock = self.aggregator, Clock()
        aggregator.check_sound()
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

    # What follows a parameter into another bucket, and into a saved state

    def at_rest(self) -> dict[str, Vectors]:
        """What waits of each parameter, with all that a codec or a stage still has to send; local, changes nothing."""
        aggregator, rank, size = self.aggregator, self.aggregator.parts.exchange.rank, self.aggregator.parts.exchange.size
        residual = aggregator.residual.cpu().numpy().copy()
        _, residual = aggregator.resize({rank: aggregator.state()}, {rank: residual}, size, size, rank)
        backend = aggregator.works.backend
        vectors = {name: torch.as_tensor(backend.to_host(each)) for name, each in aggregator.memories().items()}
        vectors["residual"] = torch.from_numpy(residual)
        return {s.name: {key: each[s.begin : s.end].clone() for key, each in vectors.items()} for s in self.layout.slots}

    def restore(self, kept: Mapping[str, Vectors]) -> None:
        """Take over what at_rest() gave of these parameters; others have nothing that waits."""
        vectors = self.vectors()
        for slot in self.layout.slots:
            for key, each in kept.get(slot.name, {}).items():
                tensor = torch.as_tensor(each, device=self.layout.device)
                vectors[key][slot.begin : slot.end] = self.aggregator.works.backend.array_of(tensor)
        if kept:
            self._note_waiting()

    def dissolve(self) -> dict[str, Vectors]:
        """Return what waits, and end; local."""
        kept = self.at_rest()
        self.close()
        return kept

    def close(self) -> None:
        """End what runs in the background; the exchange is not the bucket's own."""
        self.aggregator.works.scorer.close()
