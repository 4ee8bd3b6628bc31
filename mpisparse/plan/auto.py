"""The scheme that chooses among others by what they would cost here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from mpisparse.comm.hierarchy import Nodes, find_nodes
from mpisparse.core.records import Parts
from mpisparse.errors import ConfigurationError
from mpisparse.names import AUTO, FLAT, NODE
from mpisparse.plan import candidates
from mpisparse.plan.candidates import DENSE, SPARSE, WEIGHTS, Candidate
from mpisparse.plan.choosing import Choosing
from mpisparse.plan.families import unfit
from mpisparse.plan.predict import check_slowdown
from mpisparse.schemes import configure
from mpisparse.schemes.companion import Scheme, Site
from mpisparse.schemes.options import Options, check_flag, check_whole


@dataclass(frozen=True)
class Auto(Options):
    """Choose, after some steps, the richest exchange that hardly slows the steps down.

    Exchanges of weights (drift) are considered where one optimizer is attached.

    density: the least share of elements that may be sent.
    codec: the coarsest codec of whole gradients.
    every: how many steps may lie between two exchanges of weights, at most.
    weights: False leaves out exchanges of weights: then all ranks have the same weights after each step.
    hierarchy: "flat" leaves out exchanges in which the ranks of a node sum first; "auto" considers them where several nodes
        have the same number of ranks above 1.
    slowdown: how long a step may take with its exchange, as a multiple of its computation, at least 1.
    log: a file to which rank 0 writes what was chosen, and from which step on.
    deterministic: such a file of another run of the same model, to be replayed: nothing is measured.
    """

    flat_only = 'it measures whether nodes that sum first are faster, unless hierarchy is "flat"'
    suits_optimizer: ClassVar[bool] = True
    refused: ClassVar[dict[str, str]] = {}
    density: float = 0.001
    codec: str = "int2"
    every: int = candidates.RAREST
    weights: bool = True
    hierarchy: str = AUTO
    slowdown: float = 1.1
    log: str | None = None
    deterministic: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("every", self.every, 1)
        check_flag("weights", self.weights)
        check_slowdown(self.slowdown)
        for name in ("log", "deterministic"):
            path = getattr(self, name)
            if path is not None and (not isinstance(path, str) or not path or "\0" in path):
                raise ConfigurationError(f"{name} must be the path of a file, as a text, got {path!r}")
        if self.codec not in self.codecs():
            raise ConfigurationError(
                f'scheme "auto" chooses among whole gradients in {", ".join(self.codecs())}, got codec {self.codec!r}'
            )

    def _check_hierarchy(self) -> None:
        if self.hierarchy == NODE:
            super()._check_hierarchy()

    @property
    def fixed_hierarchy(self) -> str:
        return FLAT

    @property
    def with_backward(self) -> str:
        return 'scheme="auto"'  # it times the steps of a whole model

    def codecs(self) -> Sequence[str]:
        return list(candidates.CODECS)

    def without_effect(self) -> dict[str, str]:
        idle = super().without_effect()
        return (
            idle if self.deterministic is None else {**idle, "slowdown": "deterministic replays choices; choose one of both"}
        )

    def suiting(self, *, plain: bool, weights: bool) -> Iterator[Candidate]:
        """Yield the candidates within the bounds, richest first.

        plain: for an optimizer that sparse gradients suit. weights: with those that exchange weights.
        """
        kinds = (DENSE, SPARSE, WEIGHTS) if weights else (DENSE, SPARSE)
        return candidates.suiting(
            adaptive=not plain, kinds=kinds, coarsest=self.codec, least=self.density, rarest=self.every
        )

    def of(self, candidate: Candidate) -> Options:
        """The options of a candidate's scheme."""
        names = ("accumulate", "nonfinite", "segment_nbytes", "buffers")
        return configure(candidate.scheme, **candidate.options, **{name: getattr(self, name) for name in names})

    def nodes(self, parts: Parts) -> Nodes | None:
        """The nodes whose ranks may sum first; None: that is left out, or cannot be here. Collective."""
        if self.accumulate == "backward" or parts.backend.name == "cuda" or not parts.exchange.is_open:
            return None
        return find_nodes(parts.exchange, self.hierarchy, len(parts.residual), memory=False)

    def build(self, parts: Parts, site: Site | None = None) -> Scheme:
        assert site is not None  # see with_backward
        choosing = Choosing(parts, site, self, unfit(self, site, weights=self.weights))
        return Scheme(choosing, choosing.companion)
