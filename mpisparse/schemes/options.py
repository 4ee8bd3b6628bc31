"""What every scheme takes, and what it builds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from mpisparse.arrays import Bools
from mpisparse.core.agree import Inputs
from mpisparse.core.records import Clock, Parts
from mpisparse.core.step import Stats
from mpisparse.errors import ConfigurationError, check_choice
from mpisparse.names import BLENDED
from mpisparse.select.scorers import Magnitude
from mpisparse.wire.codecs import CODECS, codec_names

SEGMENT_NBYTES = 1 << 30


class Step(Protocol):
    """One step of a scheme; `run` is collective. Gradients that come before it are the scorer's to add."""

    @property
    def scorer(self) -> Magnitude: ...
    @property
    def scale(self) -> float: ...
    @property
    def observes(self) -> bool: ...
    def observe(self, metric: float) -> None: ...
    @property
    def deferred(self) -> bool: ...
    @property
    def draining(self) -> bool: ...
    def check_by_hand(self) -> None: ...
    def adopt(self, optimizer: Any) -> None: ...
    def run(self, inputs: Inputs, clock: Clock) -> Stats: ...
    def used(self) -> Bools | None: ...
    def finish(self, stats: Stats) -> Stats: ...
    def note_loss(self, loss: float) -> None: ...
    def drain(self) -> Iterator[Bools | None]: ...
    def global_weights(self) -> AbstractContextManager[None]: ...
    def freeze(self) -> None: ...
    def memories(self) -> dict[str, Any]: ...
    def close(self) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def check(self, state: dict[str, Any]) -> None: ...
    def load(self, state: dict[str, Any]) -> None: ...


def check_density(density: object) -> float:
    """Return the density as a float in (0, 1] or say what is wrong with it."""
    if isinstance(density, bool) or not isinstance(density, int | float):
        raise ConfigurationError(f"density must be a number in (0, 1], got {density!r}")
    if not 0.0 < density <= 1.0:
        hint = f"; for {density:g} % pass {density / 100:g}" if 1.0 < density <= 100.0 else ""
        raise ConfigurationError(f"density must be in (0, 1], got {density!r}{hint}")
    return float(density)


def check_whole(name: str, value: object, least: int) -> None:
    """Raise unless value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name} must be a whole number >= {least}, got {value!r}")


def check_flag(name: str, value: object, words: Mapping[str, bool] | None = None) -> None:
    """Raise unless value is True or False; `words` are what other schemes call these."""
    if isinstance(value, bool):
        return
    hint = f"; pass {words[value]}" if words is not None and isinstance(value, str) and value in words else ""
    if isinstance(value, str) and value in ("True", "False"):
        hint = f"; write {value.lower()} on the command line and in files"
    raise ConfigurationError(f"{name} must be True or False, got {value!r}{hint}")


def check_positive(name: str, value: object) -> None:
    """Raise unless value is None or a finite number above 0."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf):
        raise ConfigurationError(f"{name} must be a number above 0, got {value!r}")


def check_share(name: str, value: object) -> None:
    """Raise unless value is a number in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value <= 1.0:
        raise ConfigurationError(f"{name} must be a number in (0, 1], got {value!r}")


KEPT = {"residual": True, "none": False}  # what scheme "predictive" calls compensate=True and False


@dataclass(frozen=True)
class Options:
    """What every scheme takes.

    density: share of all elements selected in a step. codec: how finely values are sent.
    accumulate: "step" reads p.grad in step(); "backward" takes each gradient as backward makes it.
    nonfinite: "raise" an error on all ranks, or "skip" the step on all ranks (accumulate="step" only).
    beta: with a momentum codec, the share of what is selected now in what is sent.
    segment_nbytes: the largest single message.
    """

    density: float = 0.001
    codec: str = "fp32"
    accumulate: str = "step"
    nonfinite: str = "raise"
    beta: float = 0.7
    segment_nbytes: int = SEGMENT_NBYTES
    on_device: ClassVar[bool] = False  # whether all its parts work on a CUDA device's memory

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.codec not in CODECS:
            check_choice("codec", self.codec, self.codecs())
        check_choice("accumulate", self.accumulate, ("step", "backward"))
        check_choice("nonfinite", self.nonfinite, ("raise", "skip"))
        if self.nonfinite == "skip" and self.accumulate == "backward":
            raise ConfigurationError(
                'nonfinite="skip" needs accumulate="step": during backward a non-finite value is already added when it is '
                "seen, and cannot be taken back"
            )
        check_share("beta", self.beta)
        check_whole("segment_nbytes", self.segment_nbytes, 1)

    @property
    def needs_whole_gradient(self) -> bool:
        """Tell whether a step's gradient may not come in parts."""
        return False

    def codecs(self) -> Sequence[str]:
        """The codecs that go with the other options."""
        return codec_names()

    def without_effect(self) -> dict[str, str]:
        """The options that change nothing as the others are, with the reason and what to do."""
        if CODECS[self.codec].blended:
            return {}
        blends = any(name.startswith(BLENDED) for name in self.codecs())
        wanted = 'a momentum codec, such as "momentum-int8"' if blends else "a scheme with a momentum codec"
        return {"beta": f'codec "{self.codec}" does not blend what is sent with what was sent before; choose {wanted}'}

    def build(self, parts: Parts) -> Step:
        """Put the step together."""
        raise NotImplementedError

    def values(self) -> dict[str, Any]:
        """The options as plain values, by which ranks and states are compared; of a callable, that there is one."""
        return {key: True if callable(value) else value for key, value in vars(self).items()}
