"""The value of a weight's update, from its gradient and the curvature of the loss in that weight."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpisparse.arrays import State
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

# Elements processed at a time: so many stay in a cache, or fill a device without much memory.
PIECE, PIECE_OF_DEVICE = 1 << 16, 1 << 24


class Influence:
    """A moving average of the value of a weight's update, never below 0.

    The value is epsilon |g| + epsilon^2 h / 2, the change of the loss by a step of epsilon. Or, for a coming update u, it is
    -(g u + h u^2 / 2), the decrease of the loss. g is the accumulated gradient (the gradient itself if nothing is kept), h
    the Hessian's diagonal, averaged over probes and 0 before the first.

    Vectors are tensors on the model's device. Torch rounds each sum and product by itself, so that every device has the
    same bits; that leaves out lerp_() and alpha=, which some fuse.
    """

    def __init__(self, n: int, *, rate: float, epsilon: float, device: torch.device | None = None) -> None:
        self.rate = rate
        self.epsilon = epsilon
        self.scores = zeros(n, torch.float32, device)
        self.curvature = zeros(0, torch.float32, device)
        self.probes = 0
        self.piece = PIECE if self.scores.device.type == "cpu" else PIECE_OF_DEVICE

    def update(self, acc: torch.Tensor, moves: torch.Tensor | None = None) -> None:
        """Add a step's accumulator to the average, with each weight's coming update if influence is by update."""
        for a in range(0, len(acc), self.piece):
            part = slice(a, a + self.piece)
            bend = self.curvature[part] if self.probes else None
            now = self._by_epsilon(acc[part], bend) if moves is None else _by_update(acc[part], moves[part], bend)
            _follow(self.scores[part], now, self.rate)

    def _by_epsilon(self, slope: torch.Tensor, bend: torch.Tensor | None) -> torch.Tensor:
        now = slope.abs().mul_(self.epsilon)
        return now if bend is None else now.add_(bend * (0.5 * self.epsilon**2)).clamp_(min=0.0)

    def learn(self, diagonal: torch.Tensor) -> None:
        """Average a probe's estimate of the Hessian's diagonal into h, with a weight of at least a tenth."""
        self.probes += 1
        if self.probes == 1:
            self.curvature = diagonal
        else:
            _follow(self.curvature, diagonal, max(1.0 / self.probes, 0.1))

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
        scores, bend = (torch.from_numpy(np.array(state[f"mean.{name}"], np.float32)) for name in ("influence", "curvature"))
        self.scores.copy_(scores)
        self.probes = int(state["probes"])
        self.curvature = bend.to(self.scores.device)


def _by_update(slope: torch.Tensor, u: torch.Tensor, bend: torch.Tensor | None) -> torch.Tensor:
    if bend is not None:
        slope = (bend * u).mul_(0.5).add_(slope)
    return slope.mul(u).neg_().clamp_(min=0.0).nan_to_num_(0.0, 0.0, 0.0)


def _follow(average: torch.Tensor, now: torch.Tensor, weight: float) -> None:
    """Move an average towards new values, which are overwritten; a weight of 1 gives exactly these."""
    if weight < 0.5:
        average.add_(now.sub_(average).mul_(weight))
    else:
        average.sub_(now).mul_(1.0 - weight).add_(now)


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
        self.preview: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.before = influence.scores.clone() if after else None
        self.keys = VectorKeys(backend, backend.array_of(influence.scores if self.before is None else self.before))
        self.influence = influence
        self.rank = rank
        self.step = step
        self.probe = probe
        self.probe_every = probe_every
        self.probe_loss = self.probed = math.nan
        self._diagonal: torch.Tensor | None = None

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
            self.before.copy_(self.influence.scores)
        if found.bad < 0:
            preview = self.preview if self.by_update else None
            self.influence.update(self.residual, None if preview is None else preview(self.residual))
        return self.keys.select(lo, hi, floor)._replace(bad=found.bad)

    def memories(self) -> dict[str, Any]:
        known = self._arrays({"influence": self.influence.scores, "curvature": self.influence.curvature})
        return known if self.influence.probes else {"influence": known["influence"]}

    def _arrays(self, values: dict[str, Any]) -> dict[str, Any]:
        """Tensors as the backend's arrays."""
        return {k: self.backend.array_of(v) if isinstance(v, torch.Tensor) else v for k, v in values.items()}

    def state(self) -> State:
        return {**self._arrays(self.influence.state()), "probe_loss": self.probe_loss}

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

    def run(self, step: int, rank: int) -> tuple[float, torch.Tensor]:
        """The loss around the weights and the diagonal in flat order; local, the same for the same step and rank."""
        generator = np.random.Generator(np.random.Philox(key=[self.seed, step << 20 | rank]))
        drawn = torch.from_numpy(generator.integers(0, 2, self.places.size, dtype=np.int8))
        signs = drawn.mul_(2).sub_(1).to(self.places.device).float()
        diagonal = zeros(self.places.size, torch.float32, self.places.device)
        losses = []
        for side in (1.0, -1.0):
            with untouched(self.model), self._moved(signs, side * self.epsilon):
                loss, grads = gradient_of(self.loss, list(self.places.params), "probe")
            losses.append(loss)
            for slot, grad in zip(self.places.slots, grads, strict=True):
                if grad is not None:
                    slot.view(diagonal).add_(grad.to_dense() if grad.layout is not torch.strided else grad, alpha=side)
        diagonal.mul_(signs).div_(2 * self.epsilon)
        return sum(losses) / 2, diagonal.nan_to_num_(0.0, 0.0, 0.0)

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
