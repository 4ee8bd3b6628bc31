"""Policies that decide which share of the layers is filtered weight by weight. The same on all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mpisparse.errors import ConfigurationError, GradientError


class NoLossError(ConfigurationError, GradientError):
    """A policy has no losses to learn from; raised on all ranks together."""


@dataclass(frozen=True)
class Seen:
    """The outcome of a step, as all ranks know it: mean loss and confidence (None: unknown), bytes per rank, seconds."""

    step: int
    loss: float | None
    confidence: float | None
    nbytes: int
    seconds: float


class Policy(Protocol):
    """Gives the share of fine layers for a step, and learns from results when they arrive."""

    def share(self, step: int) -> float: ...
    def learn(self, seen: Seen) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def check(self, state: dict[str, Any]) -> None: ...
    def load(self, state: dict[str, Any]) -> None: ...


class Constant:
    """Always the same share."""

    def __init__(self, value: float) -> None:
        self.value = value

    def share(self, step: int) -> float:
        return self.value

    def learn(self, seen: Seen) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def check(self, state: dict[str, Any]) -> None:
        pass

    def load(self, state: dict[str, Any]) -> None:
        pass


class Schedule(Constant):
    """From coarse to fine with progress: after `horizon` steps all layers are fine."""

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon

    def share(self, step: int) -> float:
        return min(1.0, step / self.horizon)


class Rule:
    """Finer with progress and with confidence, coarser if a step's bytes exceed the budget.

    The share is thrift x (progress + confidence) / 2. Thrift falls by a tenth with every step that exceeds the budget and
    rises by a twentieth, up to 1, with every other.
    """

    def __init__(self, horizon: int, budget: int | None) -> None:
        self.horizon = horizon
        self.budget = budget
        self.thrift = 1.0
        self.confidence = 0.0

    def share(self, step: int) -> float:
        return self.thrift * (min(1.0, step / self.horizon) + self.confidence) / 2

    def learn(self, seen: Seen) -> None:
        if seen.confidence is not None:
            self.confidence = max(0.0, min(1.0, seen.confidence))
        if self.budget is not None:
            self.thrift = self.thrift * 0.9 if seen.nbytes > self.budget else min(1.0, self.thrift * 1.05)

    def state(self) -> dict[str, Any]:
        return {"thrift": self.thrift, "confidence": self.confidence}

    def check(self, state: dict[str, Any]) -> None:
        if not all(0.0 <= float(state[key]) <= 1.0 for key in ("thrift", "confidence")):
            raise ConfigurationError("the policy's thrift and confidence in the state must be in [0, 1]")

    def load(self, state: dict[str, Any]) -> None:
        self.thrift, self.confidence = float(state["thrift"]), float(state["confidence"])


class Learned:
    """A gradient bandit: shares are drawn by their preferences, which rise with the loss decrease per byte they gave.

    A draw holds for a window of steps, longer if no loss was reported in it; no loss in `patience` steps is an error.
    Non-finite losses do not count. The reward of a window is the fall of the mean loss since the previous window, per byte
    (or second), as a multiple of its usual size.
    """

    SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
    WINDOW, RATE, MEMORY = 10, 0.3, 0.1

    def __init__(self, *, seed: int, per_second: bool, patience: int) -> None:
        self.seed = seed
        self.patience = patience
        self.per_second = per_second
        self.preferences = np.zeros(len(self.SHARES))
        self.draws = 0
        self.arm = self._draw()
        self.usual = self.baseline = 0.0
        self.before: float | None = None
        self.steps = self.losses = 0
        self.sum_loss = self.cost = 0.0

    def share(self, step: int) -> float:
        return self.SHARES[self.arm]

    def learn(self, seen: Seen) -> None:
        self.steps += 1
        self.cost += seen.seconds if self.per_second else float(seen.nbytes)
        if seen.loss is not None and math.isfinite(seen.loss):
            self.sum_loss += seen.loss
            self.losses += 1
        if self.steps >= self.WINDOW and self.losses:
            self._close()
        elif not self.losses and self.steps >= self.patience:
            raise NoLossError(
                f'granularity="learned" has heard of no loss for {self.steps} steps; call sync.note_loss(loss.item()) '
                "before each optimizer.step(), or pass a probe"
            )

    def _close(self) -> None:
        """End a window: change the preference for its share by its reward, and draw the next."""
        mean = self.sum_loss / self.losses
        if self.before is not None and self.cost > 0.0:
            gain = (self.before - mean) / self.cost
            self.usual = abs(gain) if self.usual == 0.0 else self.usual + self.MEMORY * (abs(gain) - self.usual)
            reward = max(-3.0, min(3.0, gain / self.usual)) if self.usual > 0.0 else 0.0
            step = self.RATE * (reward - self.baseline)
            chosen = np.arange(len(self.SHARES)) == self.arm
            self._prefer(step * (chosen - self.chances()))
            self.baseline += self.MEMORY * (reward - self.baseline)
            self._look(reward)
        self.before, self.sum_loss, self.losses, self.steps, self.cost = mean, 0.0, 0, 0, 0.0
        self.draws += 1
        self.arm = self._draw()

    def _prefer(self, push: Any) -> None:
        """Update the preferences from a window's reward."""
        self.preferences += push

    def _look(self, reward: float) -> None:
        """Record the observations that the next draw may depend on."""

    def chances(self) -> Any:
        """The probability of each share: a softmax of the preferences, mixed with a tenth of a uniform distribution."""
        weights = np.exp(self.preferences - self.preferences.max())
        return 0.9 * weights / weights.sum() + 0.1 / len(weights)

    def _draw(self) -> int:
        lot = np.random.Generator(np.random.Philox(key=[self.seed, self.draws])).random()
        return min(int(np.searchsorted(np.cumsum(self.chances()), lot, side="right")), len(self.SHARES) - 1)

    _NUMBERS = ("draws", "arm", "usual", "baseline", "steps", "losses", "sum_loss", "cost")

    def state(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in self._NUMBERS},
            "before": self.before,
            "preferences": self.preferences.copy(),
        }

    def check(self, state: dict[str, Any]) -> None:
        preferences = np.asarray(state["preferences"])
        if preferences.shape != self.preferences.shape or not np.isfinite(preferences).all():
            raise ConfigurationError(f"the policy in the state must have {len(self.SHARES)} preferences")
        if not 0 <= int(state["arm"]) < len(self.SHARES) or not all(math.isfinite(state[name]) for name in self._NUMBERS):
            raise ConfigurationError("the policy in the state is damaged: its numbers must be finite")

    def load(self, state: dict[str, Any]) -> None:
        for name in self._NUMBERS:
            setattr(self, name, type(getattr(self, name))(state[name]))
        self.before = None if state["before"] is None else float(state["before"])
        self.preferences = np.array(state["preferences"], dtype=np.float64)


class Informed(Learned):
    """A gradient bandit whose preferences are linear in its observations when it draws.

    It observes a constant, the progress of training (steps over `horizon`, at most 1), the confidence, the bytes of a step
    over the largest average of a window, and the trend of the loss: the last reward.
    """

    SIGHTS = 5

    def __init__(self, *, seed: int, per_second: bool, patience: int, horizon: int) -> None:
        self.horizon = horizon
        self.weights = np.zeros((len(self.SHARES), self.SIGHTS))
        self.view = np.eye(1, self.SIGHTS)[0]
        self.done, self.confidence, self.nbytes, self.most = 0, 0.0, 0.0, 0.0
        super().__init__(seed=seed, per_second=per_second, patience=patience)

    _OWN = ("done", "confidence", "nbytes", "most")

    def learn(self, seen: Seen) -> None:
        if seen.confidence is not None and math.isfinite(seen.confidence):
            self.confidence = max(0.0, min(1.0, seen.confidence))
        self.done = seen.step + 1
        self.nbytes += seen.nbytes
        super().learn(seen)

    def _prefer(self, push: Any) -> None:
        self.weights += push[:, None] * self.view

    def _look(self, reward: float) -> None:
        spent = self.nbytes / self.steps
        self.most = max(self.most, spent)
        dear = spent / self.most if self.most > 0.0 else 0.0
        self.view = np.array([1.0, min(1.0, self.done / self.horizon), self.confidence, dear, reward / 3.0])
        self.preferences = (self.weights * self.view).sum(axis=1)

    def _close(self) -> None:
        super()._close()
        self.nbytes = 0.0

    def state(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in self._OWN}
        return {**super().state(), **own, "weights": self.weights.reshape(-1).copy(), "view": self.view.copy()}

    def check(self, state: dict[str, Any]) -> None:
        super().check(state)
        for name, now in (("weights", self.weights), ("view", self.view)):
            given = np.asarray(state[name])
            if given.shape != (now.size,) or not np.isfinite(given).all():
                raise ConfigurationError(f"the policy's {name} in the state must be {now.size} finite numbers")
        if not all(math.isfinite(state[name]) for name in self._OWN):
            raise ConfigurationError("the policy in the state is damaged: its numbers must be finite")

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        for name in self._OWN:
            setattr(self, name, type(getattr(self, name))(state[name]))
        self.weights = np.array(state["weights"], dtype=np.float64).reshape(self.weights.shape)
        self.view = np.array(state["view"], dtype=np.float64)
