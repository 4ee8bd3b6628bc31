"""What is measured in a step: the phases that its time is split into, and the details that a scheme reports.

Each is declared here once. Metrics and reports take any other name too and describe it by its name alone, so a scheme from
outside the package may use names of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """A part of a step's time; `colour` is a CSS colour in reports. `exchange`: part of GradientSync's own work."""

    name: str
    meaning: str
    colour: str
    exchange: bool = True


@dataclass(frozen=True)
class Detail:
    """A number that a scheme reports in stats.details; `kind`, its unit: number, bytes, seconds or percent."""

    name: str
    label: str
    meaning: str
    kind: str = "number"


PHASES = (  # in the order of a step; those outside the exchange last
    Phase("wait", "for ranks that come later, or for a result in flight", "#9c8a72"),
    Phase("predictor", "handing samples to the learning thread and taking its weights", "#4f9ab8"),
    Phase("validate", "the gradient of the validation loss", "#a8687f"),
    Phase("accumulate", "adding the gradient to the residual", "#3f86cf"),
    Phase("inside", "sums and results inside a node, and waiting for its ranks", "#7d8f9e"),
    Phase("agree", "on threshold and partition borders", "#e3ad2f"),
    Phase("probe", "the loss at perturbed weights", "#5aa9a2"),
    Phase("unite", "exchanging indices", "#dd7320"),
    Phase("reduce", "exchanging and summing values", "#c9404f"),
    Phase("feedback", "returning to the residual what was not sent", "#8f62cc"),
    Phase("publish", "writing the mean to the gradients", "#2f9f80"),
    Phase("adapt", "the selector and the scorer to the result", "#82b440"),
    Phase("correct", "taking back speculative updates", "#b5535c"),
    Phase("speculate", "updating weights before results arrive", "#6c7fd8"),
    Phase("optimizer", "the optimizer's own step", "#c77fb0", exchange=False),
    Phase("data", "loading batches", "var(--data)", exchange=False),
    Phase("compute", "forward and backward", "var(--compute)", exchange=False),
)
DETAILS = (
    Detail("ranking", "Ranking", "pairs in the right order by learned importance, weighted", "percent"),
    Detail("ranking_by_magnitude", "Ranking by magnitude", "pairs in the right order by magnitude, weighted", "percent"),
    Detail("k_scale", "Scale of k", "elements selected, relative to the set density"),
    Detail("predictor_seconds", "Learning thread", "time of the learning thread so far", "seconds"),
    Detail("mirror_bytes", "Copies", "received of what another rank had not sent, as a copy", "bytes"),
    Detail("history_bytes", "History", "memory of recorded samples", "bytes"),
    Detail("choice", "Choice", "place of the exchange in use in the table of docs/howto/choosing.md, from 0"),
    Detail("nodes_first", "Nodes first", "1 where the ranks of a node sum before the exchange in use, else 0"),
    Detail("discontinuities", "Discontinuities", "changes between exchanges of gradients and of weights so far"),
    Detail("computing_seconds", "Computation", "of the slowest rank, when the exchange was chosen", "seconds"),
    Detail("predicted_seconds", "Predicted step", "with the exchange in use", "seconds"),
)
PREDICTED = "predicted_"  # a step with an exchange that is named after it
_PHASES = {phase.name: phase for phase in PHASES}
_DETAILS = {detail.name: detail for detail in DETAILS}


def phase(name: str) -> Phase:
    """Return a declared phase, or describe another one by its name."""
    return _PHASES.get(name) or Phase(name, "", f"hsl({zlib.crc32(name.encode()) % 360} 45% 52%)")


def detail(name: str) -> Detail:
    """Return a declared detail, or describe another one by its name."""
    words = name.replace("_", " ").strip()
    kind = "seconds" if name.startswith(PREDICTED) else "number"
    return _DETAILS.get(name) or Detail(name, words[:1].upper() + words[1:], f"{name} of the scheme", kind)


def in_order(names: Iterable[str]) -> list[str]:
    """Sort phases as a report stacks them: those of the exchange, other ones by name, then the rest."""
    places = {phase.name: place for place, phase in enumerate(PHASES)}
    others = sum(phase.exchange for phase in PHASES) - 0.5
    return sorted(set(names), key=lambda name: (places.get(name, others), name))


def details_in_order(names: Iterable[str]) -> list[str]:
    """Sort details: declared ones as they are declared, then others by name."""
    places = {detail.name: place for place, detail in enumerate(DETAILS)}
    return sorted(set(names), key=lambda name: (places.get(name, len(DETAILS)), name))
