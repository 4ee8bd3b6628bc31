"""Exchanges to choose from, richest first: the table of docs/howto/choosing.md. No torch, no MPI."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

DENSE, SPARSE, WEIGHTS = "dense", "sparse", "weights"
FLAT, NODES, OVERLAPPED = WAYS = ("flat", "nodes first", "overlapped")
MORE: dict[str, dict[str, Any]] = {FLAT: {}, NODES: {"hierarchy": "node"}, OVERLAPPED: {"overlap": True}}  # options
CODECS = ("fp32", "fp16", "bf16", "int8", "int4", "int2", "sign")  # finest first
FIRST = "int4"  # the codec before anything is measured: an eighth of the bytes, and a loss like that of float32


@dataclass(frozen=True)
class Candidate:
    """An exchange: a scheme with its codec, density, and steps of the optimizer from one exchange to the next.

    kind: "dense" sends whole gradients, "sparse" the largest elements of gradients, "weights" the drift of weights.
    way: "flat" between all ranks, "nodes first" between nodes whose ranks have summed, or "overlapped" with backward.
    """

    kind: str
    scheme: str
    codec: str
    density: float = 1.0
    every: int = 1
    way: str = FLAT

    @property
    def name(self) -> str:
        """What tables and logs call it."""
        share = "" if self.kind == DENSE else f" {100 * self.density:g} %"
        pace = "" if self.every == 1 else f" every {self.every}"
        way = "" if self.way == FLAT else f", {self.way}"
        return f"{self.scheme}{share} {self.codec}{pace}{way}"

    def by(self, way: str) -> Candidate:
        """The same exchange in another way."""
        return replace(self, way=way)

    @property
    def flat(self) -> Candidate:
        """The same exchange between all ranks."""
        return self.by(FLAT)

    @property
    def each_step(self) -> Candidate:
        """The same exchange between all ranks, in every step."""
        return replace(self.flat, every=1)

    @property
    def options(self) -> dict[str, Any]:
        """The scheme's options."""
        options: dict[str, Any] = {"codec": self.codec}
        if self.kind != DENSE:
            options["density"] = self.density
        if self.kind == WEIGHTS:
            options["by"] = "groups"
        if self.every > 1:
            options["every"] = self.every
        return options | MORE[self.way]


ALL = (
    *(Candidate(DENSE, "dense", codec) for codec in ("fp32", "bf16", "int8", "int4")),
    Candidate(WEIGHTS, "drift", "int2", 0.17),
    Candidate(DENSE, "dense", "int2"),
    Candidate(SPARSE, "exdyna", "int8", 0.1),
    Candidate(WEIGHTS, "drift", "sign", 0.13),
    Candidate(SPARSE, "exdyna", "int8", 0.01),
    Candidate(SPARSE, "exdyna", "int8", 0.001),
    # Drift every 4 steps captured less than each step in fewer bits, with groups (docs/howto/choosing.md) and with single
    # elements (docs/results/predicting.md); every 16 steps was not measured. So they come after all in each step.
    Candidate(WEIGHTS, "drift", "int2", 0.17, 4),
    Candidate(WEIGHTS, "drift", "sign", 0.13, 4),
    Candidate(WEIGHTS, "drift", "sign", 0.13, 16),
)
CHOICES = (*ALL, *(candidate.by(NODES) for candidate in ALL))  # what auto can do
BY_NAME = {candidate.name: candidate for candidate in CHOICES}
RAREST = 4  # steps from one exchange to the next at most, unless more are asked for
EMPTYING = BY_NAME["dense fp32"]  # sends all that waits


def named(details: Mapping[str, float]) -> str:
    """The name of what statistics say is in use; empty if they are not of scheme auto."""
    choice = details.get("choice")
    return "" if choice is None else ALL[int(choice)].by(NODES if details.get("nodes_first") else FLAT).name


def suiting(
    *, adaptive: bool, kinds: Sequence[str] = (DENSE, SPARSE, WEIGHTS), coarsest: str = CODECS[-1], least: float = 0.0,
    rarest: int = RAREST,
) -> Iterator[Candidate]:  # fmt: skip
    """Yield what suits an optimizer, richest first.

    adaptive: it divides by what it has seen of an element's gradient, which sparse gradients mislead. coarsest: no dense
    codec of fewer bits. least: no lower density. rarest: no more steps from one exchange to the next.
    """
    for candidate in ALL:
        fine = candidate.kind != DENSE or CODECS.index(candidate.codec) <= CODECS.index(coarsest)
        misled = adaptive and candidate.kind == SPARSE
        if candidate.kind in kinds and fine and not misled and candidate.density >= least and candidate.every <= rarest:
            yield candidate


def first(known: Sequence[Candidate]) -> Candidate:
    """What to begin with, before anything is measured."""
    dense = [each for each in known if each.kind == DENSE]
    return next((each for each in dense if each.codec == FIRST), dense[-1])
