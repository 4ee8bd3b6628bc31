"""The messages of a step of each candidate, if all ranks select alike. Pure functions."""

from __future__ import annotations

import math

from mpisparse.comm.roll_call import HEAD
from mpisparse.plan.candidates import DENSE, SPARSE, WEIGHTS, Candidate
from mpisparse.plan.costs import Log
from mpisparse.wire.codecs import CODECS

ROLL_CALL = 8 * HEAD  # bytes of the first message of a step
STATUS = 16  # bytes in which a rank tells that its values are finite
COUNTS = {SPARSE: 1024, WEIGHTS: 256}  # bytes of counts that tell threshold and borders, on average
GROUP = 512  # neighbours that drift selects together


def messages(candidate: Candidate, elements: int, ranks: int) -> Log:
    """The collective calls of one exchange in the steady state."""
    log = Log(ranks)
    log.add("allgather", ROLL_CALL)
    if candidate.kind == DENSE and candidate.codec == "fp32":
        log.add("allgather", STATUS)
        log.add("allreduce", 4 * elements)
        return log
    log.add("allgather", COUNTS.get(candidate.kind, STATUS))
    if candidate.kind != DENSE:
        chosen = candidate.density * elements / (GROUP if candidate.kind == WEIGHTS else 1)
        log.add("allgather", 8)
        log.add("allgather", math.ceil(chosen / ranks * index_bits(candidate.density) / 8))
    part = CODECS[candidate.codec].nbytes(math.ceil(candidate.density * elements / ranks))
    log.add("alltoallv", part)
    log.add("allgather", part)
    return log


def index_bits(density: float) -> float:
    """Bits of one index at random positions, in the code of docs/explanation/design.md: near its entropy."""
    return -math.log2(density) - (1 - density) / density * math.log2(1 - density) if density < 1 else 0.0


def received_per_element(candidate: Candidate, elements: int, ranks: int) -> float:
    """Bytes that a rank receives for each element in a step, on average."""
    return float(messages(candidate, elements, ranks).received().max()) / elements / candidate.every
