"""Schemes by name: each is a record of options, checked when made, and a few lines that put the step's parts together."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol

from mpisparse.agree import Inputs
from mpisparse.codecs import CODECS
from mpisparse.errors import ConfigurationError, check_choice, suggest
from mpisparse.selector import PARTITIONERS, ExclusiveSelector
from mpisparse.step import Clock, DenseStep, Parts, SparseStep, Stats
from mpisparse.threshold import CONTROLLERS

SEGMENT_NBYTES = 1 << 30


class Step(Protocol):
    """One step of a scheme; `run` is collective."""

    def run(self, inputs: Inputs, clock: Clock) -> Stats: ...
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


@dataclass(frozen=True)
class Options:
    """What every scheme takes.

    density: share of all elements selected in a step. codec: how finely values are sent.
    accumulate: "step" reads p.grad in step(); "backward" takes each gradient as backward makes it.
    nonfinite: "raise" an error on all ranks, or "skip" the step on all ranks (accumulate="step" only).
    segment_nbytes: the largest single message.
    """

    density: float = 0.001
    codec: str = "fp32"
    accumulate: str = "step"
    nonfinite: str = "raise"
    segment_nbytes: int = SEGMENT_NBYTES

    def __post_init__(self) -> None:
        check_density(self.density)
        check_choice("codec", self.codec, CODECS)
        check_choice("accumulate", self.accumulate, ("step", "backward"))
        check_choice("nonfinite", self.nonfinite, ("raise", "skip"))
        if self.nonfinite == "skip" and self.accumulate == "backward":
            raise ConfigurationError(
                'nonfinite="skip" needs accumulate="step": during backward a non-finite value is already added when it is '
                "seen, and cannot be taken back"
            )
        check_whole("segment_nbytes", self.segment_nbytes, 1)

    def build(self, parts: Parts) -> Step:
        """Put the step together."""
        raise NotImplementedError


def check_whole(name: str, value: object, least: int) -> None:
    """Raise unless value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name} must be a whole number >= {least}, got {value!r}")


@dataclass(frozen=True)
class Dense(Options):
    """All elements in one Allreduce."""

    density: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.density != 1.0:
            raise ConfigurationError(f'scheme "dense" sends everything: density must be 1, got {self.density!r}')
        if self.codec != "fp32":
            raise ConfigurationError(f'scheme "dense" sends float32 only: codec must be "fp32", got {self.codec!r}')

    def build(self, parts: Parts) -> Step:
        return DenseStep(parts)


@dataclass(frozen=True)
class Exdyna(Options):
    """Exclusive partitions, re-balanced, with a threshold found online.

    controller: "tail" finds the threshold of every step inside it; "paper" scales it between steps.
    partitioner: "best" re-balances at once; "paper" moves one block a step. blocks: None for the default.
    reduce: "owner" sums in rank order at the partition's owner; "allreduce" leaves it to MPI (fp32 only).
    """

    controller: str = "tail"
    partitioner: str = "best"
    blocks: int | None = None
    reduce: str = "owner"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("controller", self.controller, CONTROLLERS)
        check_choice("partitioner", self.partitioner, PARTITIONERS)
        check_choice("reduce", self.reduce, ("owner", "allreduce"))
        if self.blocks is not None:
            check_whole("blocks", self.blocks, 1)
        if self.reduce == "allreduce" and self.codec != "fp32":
            raise ConfigurationError(f'reduce="allreduce" sums float32: codec must be "fp32", got {self.codec!r}')

    def build(self, parts: Parts) -> Step:
        n, size = len(parts.residual), parts.exchange.size
        selector = ExclusiveSelector(
            n,
            size,
            controller=self.controller,
            partitioner=self.partitioner,
            blocks=self.blocks,
            reads_region=self.accumulate == "backward",
        )
        codec = CODECS[self.codec] if self.reduce == "owner" else None
        return SparseStep(parts, selector=selector, codec=codec)


SCHEMES: dict[str, type[Options]] = {"dense": Dense, "exdyna": Exdyna}


def configure(scheme: str, **options: Any) -> Options:
    """Make a scheme's options from names and values; None means the scheme's default for density and codec."""
    check_choice("scheme", scheme, SCHEMES)
    kind = SCHEMES[scheme]
    known = [f.name for f in dataclasses.fields(kind)]
    for name in options:
        if name not in known:
            raise ConfigurationError(f'unknown option {name!r} for scheme "{scheme}"; {suggest(name, known)}')
    defaults = {"density", "codec"}
    return kind(**{name: value for name, value in options.items() if value is not None or name not in defaults})
