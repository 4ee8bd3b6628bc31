"""The value of a weight's update, from its gradient and the curvature of the loss in that weight."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpisparse.arrays import Floats, State
from mpisparse.backends.flat import Pieces, zeros
from mpisparse.errors import ConfigurationError
from mpisparse.schemes.companion import Places
from mpisparse.schemes.side_gradient import gradient_of, untouched
from mpisparse.select.candidates import Candidates
from mpisparse.select.scorers import Magnitude, mean_of
from mpisparse.select.view import VectorKeys

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.select.scorers import Exempt, Lap

PIECE = 1 << 16  # elements processed at a time, so that they stay in cache


class Influence:
    """A moving average of the value of a weight's update, never below 0.

    The value is epsilon |g| + epsilon^2 h / 2, the change of the loss by a step of epsilon. Or, for a coming update u, it is
    -(g u + h u^2 / 2), the decrease of the loss. g is the accumulated gradient (the gradient itself if nothing is kept), h
    the Hessian's diagonal, averaged over probes and 0 before the first.
    """

    def __init__(self, n: int, *, rate: float, epsilon: float) -> None:
        self.rate = rate
        self.epsilon = epsilon
        self.scores: Floats = zeros(n, torch.float32).numpy()
        self.curvature: Floats = np.empty(0, dtype=np.float32)
        self.probes = 0

    def update(self, acc: Floats, moves: Floats | None = None) -> None:
        """Add a step's accumulator to the average, with each weight's coming update if influence is by update."""
        if moves is not None:
            self._update_by(acc, moves)
            return
        scores, waiting = torch.from_numpy(self.scores), torch.from_numpy(acc)
        bend = torch.from_numpy(self.curvature) if self.probes else None
        for a in range(0, len(acc), PIECE):
            now = waiting[a : a + PIECE].abs().mul_(self.epsilon)
            if bend is not None:
                now.add_(bend[a : a + PIECE], alpha=0.5 * self.epsilon**2).clamp_(min=0.0)
            scores[a : a + PIECE].lerp_(now, self.rate)

    def _update_by(self, acc: Floats, moves: Floats) -> None:
        scores, waiting, coming = (torch.from_numpy(each) for each in (self.scores, acc, moves))
        bend = torch.from_numpy(self.curvature) if self.probes else None
        for a in range(0, len(acc), PIECE):
            u = coming[a : a + PIECE]
            slope = waiting[a : a + PIECE]
            if bend is not None:
                slope = slope.add(bend[a : a + PIECE] * u, alpha=0.5)
            scores[a : a + PIECE].lerp_(slope.mul(u).neg_().clamp_(min=0.0).nan_to_num_(0.0, 0.0, 0.0), self.rate)

    def learn(self, diagonal: Floats) -> None:
        """Average a probe's estimate of the Hessian's diagonal into h, with a weight of at least a tenth."""
        self.probes += 1
        if self.probes == 1:
            self.curvature = diagonal
        else:
            weight = max(1.0 / self.probes, 0.1)
            torch.from_numpy(self.curvature).lerp_(torch.from_numpy(diagonal), weight)

    def state(self) -> dict[str, Any]:
        """The averages; on another number of ranks, the mean over the ranks taken over."""
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
        """Load a state that state() returned."""
        self.scores[:] = state["mean.influence"]
        self.probes = int(state["probes"])
        self.curvature = np.array(state["mean.curvature"], dtype=np.float32)


class InfluenceScorer(Magnitude):
    """The accumulator with each element's influence as its key.

    step: returns the number of the coming step. by_update: influence is that of the coming update, which `preview` returns
    once there is an optimizer. after: a step selects by the influence as it was after the previous step. probe_loss: the
    loss of the last probe; probed: that of this step's probe, NaN if there is none.
    """

    prior = 0.0
    by_magnitude = False

    def __init__(
        self, residual: torch.Tensor, backend: Backend, influence: Influence, *, rank: int, step: Callable[[], int],
        probe: Probe | None, probe_every: int, by_update: bool = False, after: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(residual, backend)
        self.by_update = by_update
        self.preview: Callable[[Floats], Floats] | None = None
        self.before: Floats | None = influence.scores.copy() if after else None
        self.keys = VectorKeys(backend, influence.scores if self.before is None else self.before)
        self.influence = influence
        self.rank = rank
        self.step = step
        self.probe = probe
        self.probe_every = probe_every
        self.probe_loss = self.probed = math.nan
        self._diagonal: Floats | None = None

    def ready(self, exempt: Exempt, lap: Lap) -> str:
        """Probe the loss around the weights if due; an error in the user's function is returned as this rank's problem."""
        if self.by_update and self.preview is None:
            return 'influence="update" asks the optimizer how far it would move each weight: attach() it'
        self.probed, step = math.nan, self.step()
        if self.probe is None or step % self.probe_every:
            return ""
        try:
            with exempt("probing"):
                self.probed, self._diagonal = self.probe.run(step, self.rank)
        except Exception as error:
            self.cause = error
            return f"probe(): {type(error).__name__}: {error}"
        finally:
            lap("probe")
        self.probe_loss = self.probed
        return ""

    def accumulate(self, pieces: Pieces | None, lo: int, hi: int, floor: float) -> Candidates:
        found = super().accumulate(pieces, 0, 0, 0.0)
        if self._diagonal is not None:
            self.influence.learn(self._diagonal)
            self._diagonal = None
        if self.before is not None:
            self.before[:] = self.influence.scores
        if found.bad < 0:
            self.influence.update(self.acc, self.preview(self.acc) if self.by_update and self.preview is not None else None)
        return self.keys.select(lo, hi, floor)._replace(bad=found.bad)

    def memories(self) -> dict[str, Any]:
        bend = {"curvature": self.influence.curvature} if self.influence.probes else {}
        return {"influence": self.influence.scores, **bend}

    def state(self) -> State:
        return {**self.influence.state(), "probe_loss": self.probe_loss}

    def check(self, state: State) -> None:
        float(state["probe_loss"])
        self.influence.check(state)

    def load(self, state: State) -> None:
        self.influence.load(state)
        self.probe_loss = float(state["probe_loss"])
        self._diagonal = None

    def resize(self, states: Sequence[State]) -> State:
        """The means of the averages taken over; everything else from the first rank."""
        means = {key: mean_of(states, key) for key in ("mean.influence", "mean.curvature")}
        return {**{key: states[0][key] for key in self.state()}, **means}


class Probe:
    """Estimates the Hessian's diagonal from the gradients at w + e z and w - e z, with random signs z.

    Losses alone would give every weight the same number. A probe leaves no trace: the weights' own memory is never written,
    and buffers and random generators are restored.
    """

    def __init__(
        self, model: torch.nn.Module, places: Places, loss: Callable[[], Any], *, epsilon: float, seed: int
    ) -> None:
        self.model = model
        self.places = places
        self.loss = loss
        self.epsilon = epsilon
        self.seed = seed

    def run(self, step: int, rank: int) -> tuple[float, Floats]:
        """The loss around the weights and the diagonal in flat order; local, the same for the same step and rank."""
        generator = np.random.Generator(np.random.Philox(key=[self.seed, step << 20 | rank]))
        signs = torch.from_numpy(generator.integers(0, 2, self.places.size, dtype=np.int8)).mul_(2).sub_(1).float()
        diagonal = zeros(self.places.size, torch.float32)
        losses = []
        for side in (1.0, -1.0):
            with untouched(self.model), self._moved(signs, side * self.epsilon):
                loss, grads = gradient_of(self.loss, list(self.places.params), "probe")
            losses.append(loss)
            for slot, grad in zip(self.places.slots, grads, strict=True):
                if grad is not None:
                    slot.view(diagonal).add_(grad.to_dense() if grad.layout is not torch.strided else grad, alpha=side)
        diagonal.mul_(signs).div_(2 * self.epsilon)
        return sum(losses) / 2, diagonal.nan_to_num_(0.0, 0.0, 0.0).numpy()

    @contextlib.contextmanager
    def _moved(self, signs: torch.Tensor, by: float) -> Iterator[None]:
        """Move the parameters inside the block, in separate memory."""
        own = [p.data for p in self.places.params]
        try:
            for slot, p in zip(self.places.slots, self.places.params, strict=True):
                p.data = p.data.add(slot.view(signs).to(p.dtype), alpha=by)
            yield
        finally:
            for p, data in zip(self.places.params, own, strict=True):
                p.data = data
