"""Refusals as error messages: what every rank raises when a step cannot be done, with the user's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mpisparse.comm.agreement import (
    BROKEN,
    NO_BACKWARD,
    NONFINITE,
    STALE,
    DensityDiffers,
    FrozenDiffers,
    Overflow,
    Refusal,
    StepRefused,
)
from mpisparse.comm.roll_call import Apart
from mpisparse.errors import CollectiveError, ConfigurationError, GradientError, NonFiniteGradientError

if TYPE_CHECKING:
    from mpisparse.comm.exchange import Exchange

SKIP = 'lower the learning rate, clip, or pass nonfinite="skip" to skip such steps'
UNSKIPPED = "lower the learning rate or clip"  # advice where steps cannot be skipped
Names = Callable[[int], str]  # the name of the parameter that holds a flat index


def explain(
    refusal: Refusal, exchange: Exchange, name_at: Names, frozen: str, late_step: int | None = None, advice: str = "",
    what: str = "gradient",
) -> tuple[Exception, str]:  # fmt: skip
    """Return the error that every rank raises, and a text that says how the residual was damaged; collective.

    `frozen`: the names of this rank's frozen parameters. `late_step`: the refused step, if others followed it.
    `advice`: what to do about non-finite values, if it is not the usual; `what`: what kind of values they are.
    """
    me = f"r{exchange.rank} | "
    advice = advice or (SKIP if late_step is None else UNSKIPPED)
    if isinstance(refusal, Apart):
        return CollectiveError(f"{me}{refusal.args[0]}"), "the ranks were in different collective calls"
    if isinstance(refusal, DensityDiffers):
        return _densities(me, refusal.args[0]), "the density was not the same on all ranks"
    if isinstance(refusal, FrozenDiffers):
        return _frozen(me, exchange.gather_texts(frozen)), "the ranks had frozen different parameters"
    if isinstance(refusal, Overflow):
        index = refusal.args[0]
        found = f"the sum over ranks is beyond what float32 holds in {name_at(index)} (flat index {index})"
        return NonFiniteGradientError(f"{me}{found}; {UNSKIPPED}"), found
    assert isinstance(refusal, StepRefused)
    return _statuses(me, refusal, exchange, name_at, late_step, advice, what)


def _densities(me: str, ks: Sequence[int]) -> Exception:
    return ConfigurationError(
        f"{me}density must be the same on all ranks; they select {list(ks)} elements: set sync.density on all ranks alike"
    )


def _frozen(me: str, names: Sequence[str]) -> Exception:
    other = next((rank for rank, text in enumerate(names) if text != names[0]), 0)
    which = f": rank 0 {names[0] or 'none'}, rank {other} {names[other] or 'none'}" if other else ""
    return GradientError(f"{me}the ranks have frozen different parameters{which}; call requires_grad_() on all ranks alike")


def _statuses(
    me: str, refused: StepRefused, exchange: Exchange, name_at: Names, late_step: int | None, advice: str, what: str
) -> tuple[Exception, str]:
    """The most serious problem, of the first rank that has it."""
    first = {status: (rank, detail) for rank, (status, detail) in reversed(list(enumerate(refused.statuses)))}
    if NONFINITE in first:
        rank, index = first[NONFINITE]
        found = f"rank {rank} has a non-finite {what} in {name_at(index)} (flat index {index})"
        return NonFiniteGradientError(f"{me}{found}; {advice}"), found
    if BROKEN in first:
        texts = exchange.gather_texts(refused.trouble)
        rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
        if late_step is not None:
            text = f"step {late_step} failed on rank {rank}: {text}; load a saved state"
        return GradientError(f"r{rank} | {text}"), ""
    if STALE in first:
        rank, index = first[STALE]
        added = f"{me}on rank {rank} backward added to the gradient that the last step published in {name_at(index)}"
        return GradientError(f"{added}; {_remedy('call zero_grad() after each optimizer step', late_step)}"), ""
    ranks = ", ".join(str(rank) for rank, (status, _) in enumerate(refused.statuses) if status == NO_BACKWARD)
    nothing = f"{me}step() with no new gradient on rank {ranks}"
    return GradientError(f"{nothing}; {_remedy('call backward() first', late_step)}"), ""


def _remedy(usual: str, late_step: int | None) -> str:
    """What to do after a refusal; once other steps have followed, it takes a saved state, too."""
    return usual if late_step is None else f"load a state saved before step {late_step}, and {usual}"
