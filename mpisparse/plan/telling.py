"""What scheme auto tells of its choices: in statistics, and in a line of rank 0."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from mpisparse.comm.exchange import Exchange
from mpisparse.core.stages import Stage
from mpisparse.plan.candidates import ALL, NODES, WEIGHTS, Candidate
from mpisparse.plan.predict import Measured, predict


@dataclass(frozen=True)
class Chosen(Stage):
    """Tells what was chosen, and has k follow its density. scale: that density over the set one."""

    scale: float
    told: Mapping[str, float] = field(default_factory=dict)

    @property
    def k_scale(self) -> float:
        return self.scale

    def details(self) -> dict[str, float]:
        return dict(self.told)


def told(now: Candidate, measured: Measured | None, discontinuities: int) -> dict[str, float]:
    """What statistics say of the choice."""
    choice = {
        "choice": float(ALL.index(now.flat)), "nodes_first": float(now.way == NODES),
        "discontinuities": float(discontinuities),
    }  # fmt: skip
    if measured is None or not measured.covers(now):
        return choice
    return {**choice, "computing_seconds": measured.computing, "predicted_seconds": predict(now, measured).step}


def say(exchange: Exchange, now: Candidate, done: int, why: str) -> None:
    """Rank 0 prints what is in use from now on, and why."""
    if exchange.rank == 0 and not exchange.virtual:
        print(f"r0 | auto: {now.name} from step {done} on: {why}", file=sys.stderr, flush=True)


def discontinuity(before: Candidate, candidate: Candidate) -> str:
    """What a change between gradients and weights, or of who has weights of its own, does, in words; empty for others."""
    if before.kind == candidate.kind and (candidate.kind != WEIGHTS or before.way == candidate.way):
        return ""
    if before.kind != WEIGHTS:
        return "; a discontinuity: all that waits was sent first; evaluate and save inside `with sync.global_weights():`"
    return "; a discontinuity: weights and the optimizers' states become their means"
