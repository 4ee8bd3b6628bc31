"""What a weight's update is worth: its gradient, and how the loss curves when the weight is perturbed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from mpisparse.arrays import Floats
from mpisparse.errors import ConfigurationError
from mpisparse.model.layout import Layout, zeros
from mpisparse.schemes.side_gradient import gradient_of, untouched

PIECE = 1 << 16  # elements that stay in cache while they are worked on


class Influence:
    """A rolling average of epsilon |g| + epsilon^2 h / 2, never below 0: how a step of epsilon changes the loss.

    g is what waits to be sent (the gradient itself where nothing is kept), h the Hessian's diagonal, itself averaged
    over probes and 0 before the first.
    """

    def __init__(self, n: int, *, rate: float, epsilon: float) -> None:
        self.rate = rate
        self.epsilon = epsilon
        self.scores: Floats = zeros(n, torch.float32).numpy()
        self.curvature: Floats = np.empty(0, dtype=np.float32)
        self.probes = 0

    def update(self, acc: Floats) -> None:
        """Take a step's accumulator into the average."""
        scores, waiting = torch.from_numpy(self.scores), torch.from_numpy(acc)
        bend = torch.from_numpy(self.curvature) if self.probes else None
        for a in range(0, len(acc), PIECE):
            now = waiting[a : a + PIECE].abs().mul_(self.epsilon)
            if bend is not None:
                now.add_(bend[a : a + PIECE], alpha=0.5 * self.epsilon**2).clamp_(min=0.0)
            scores[a : a + PIECE].lerp_(now, self.rate)

    def learn(self, diagonal: Floats) -> None:
        """Take a probe's estimate of the Hessian's diagonal; they are averaged, each counting at least a tenth."""
        self.probes += 1
        if self.probes == 1:
            self.curvature = diagonal
        else:
            weight = max(1.0 / self.probes, 0.1)
            torch.from_numpy(self.curvature).lerp_(torch.from_numpy(diagonal), weight)

    def state(self) -> dict[str, Any]:
        """The averages; on another number of ranks the mean of those of the ranks taken over."""
        return {"mean.influence": self.scores, "mean.curvature": self.curvature, "probes": self.probes}

    def check(self, state: dict[str, Any]) -> None:
        """Raise ConfigurationError unless load() could take the state."""
        sizes = {"mean.influence": len(self.scores), "mean.curvature": len(self.scores) if state["probes"] else 0}
        for key, size in sizes.items():
            values = np.asarray(state[key])
            if values.shape != (size,) or not np.isfinite(values).all():
                raise ConfigurationError(
                    f"the {key.removeprefix('mean.')} in the state does not fit {len(self.scores)} elements"
                )
        if int(state["probes"]) < 0:
            raise ConfigurationError(f"the state's number of probes is {state['probes']!r}")

    def load(self, state: dict[str, Any]) -> None:
        """Take what state() gave."""
        self.scores[:] = state["mean.influence"]
        self.probes = int(state["probes"])
        self.curvature = np.array(state["mean.curvature"], dtype=np.float32)


class Probe:
    """Estimates the Hessian's diagonal from the gradients at w + e z and w - e z, with random signs z.

    Losses alone would give every weight the same number. The weights' own memory is never written, buffers and random
    generators are put back: a probe leaves no trace.
    """

    def __init__(
        self, model: torch.nn.Module, layout: Layout, loss: Callable[[], Any], *, epsilon: float, seed: int
    ) -> None:
        self.model = model
        self.layout = layout
        self.loss = loss
        self.epsilon = epsilon
        self.seed = seed

    def run(self, step: int, rank: int) -> tuple[float, Floats]:
        """The loss around the weights and the diagonal in flat order; local, the same for the same step and rank."""
        generator = np.random.Generator(np.random.Philox(key=[self.seed, step << 20 | rank]))
        signs = torch.from_numpy(generator.integers(0, 2, self.layout.size, dtype=np.int8)).mul_(2).sub_(1).float()
        diagonal = zeros(self.layout.size, torch.float32)
        losses = []
        for side in (1.0, -1.0):
            with untouched(self.model), self._moved(signs, side * self.epsilon):
                loss, grads = gradient_of(self.loss, self.layout.params, "probe")
            losses.append(loss)
            for slot, grad in zip(self.layout.slots, grads, strict=True):
                if grad is not None:
                    slot.view(diagonal).add_(grad.to_dense() if grad.layout is not torch.strided else grad, alpha=side)
        diagonal.mul_(signs).div_(2 * self.epsilon)
        return sum(losses) / 2, diagonal.nan_to_num_(0.0, 0.0, 0.0).numpy()

    @contextlib.contextmanager
    def _moved(self, signs: torch.Tensor, by: float) -> Iterator[None]:
        """Have the parameters elsewhere, in memory of their own."""
        own = [p.data for p in self.layout.params]
        try:
            for slot, p in zip(self.layout.slots, self.layout.params, strict=True):
                p.data = p.data.add(slot.view(signs).to(p.dtype), alpha=by)
            yield
        finally:
            for p, data in zip(self.layout.params, own, strict=True):
                p.data = data
