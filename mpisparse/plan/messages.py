"""The messages of an exchange by each candidate. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mpisparse.comm.roll_call import HEAD
from mpisparse.plan.candidates import DENSE, SPARSE, WEIGHTS, Candidate
from mpisparse.plan.costs import Log, Message
from mpisparse.wire.codecs import CODECS

ROLL_CALL = 8 * HEAD  # bytes of the first message of a step
STATUS = 16  # bytes in which a rank tells that its values are finite
COUNTS = {SPARSE: 1024, WEIGHTS: 256}  # bytes of counts that tell threshold and borders, on average
GROUP = 512  # neighbours that drift selects together


@dataclass(frozen=True)
class Selected:
    """What selecting takes at some number of ranks. The default: all ranks select alike, and few bytes tell the threshold.

    counts: the messages before those of indices. share: of the k elements that were asked for, those that are sent.
    imbalance: by how much the busiest rank selects more than the mean, as a share of it. seconds: of deciding.
    """

    counts: tuple[Message, ...] = ()
    share: float = 1.0
    imbalance: float = 0.0
    seconds: float = 0.0


EVEN = Selected()
Selections = Mapping[tuple[str, int], Selected]  # by the candidate's name, and the number of ranks


def messages(candidate: Candidate, elements: int, ranks: int, selected: Selected = EVEN) -> Log:
    """The collective calls of one exchange in the steady state."""
    if selected.counts:
        log = Log(ranks, list(selected.counts))
        _add_selected(log, candidate, elements, selected)
        return log
    log = Log(ranks)
    log.add("allgather", ROLL_CALL)
    if candidate.kind == DENSE and candidate.codec == "fp32":
        log.add("allgather", STATUS)
        log.add("allreduce", 4 * elements)
        return log
    log.add("allgather", COUNTS.get(candidate.kind, STATUS))
    _add_selected(log, candidate, elements, selected)
    return log


def _add_selected(log: Log, candidate: Candidate, elements: int, selected: Selected) -> None:
    """Note indices, and values to their owners and back."""
    density = candidate.density * selected.share
    if candidate.kind != DENSE:
        each = density * elements / (GROUP if candidate.kind == WEIGHTS else 1) / log.size * index_bits(density) / 8
        busiest = min(each * (1 + selected.imbalance), each * log.size)
        others = (each * log.size - busiest) / max(1, log.size - 1)
        log.add("allgather", 8)
        log.add("allgatherv", [math.ceil(busiest), *[math.ceil(others)] * (log.size - 1)])
    part = CODECS[candidate.codec].nbytes(math.ceil(density * elements / log.size))
    log.add("alltoallv", part)
    log.add("allgather", part)


def index_bits(density: float) -> float:
    """Bits of one index at random positions, in the code of docs/explanation/design.md: near its entropy."""
    return -math.log2(density) - (1 - density) / density * math.log2(1 - density) if density < 1 else 0.0


def received_per_element(candidate: Candidate, elements: int, ranks: int, selected: Selected = EVEN) -> float:
    """Bytes that a rank receives for each element in a step, on average."""
    return float(messages(candidate, elements, ranks, selected).received().max()) / elements / candidate.every
