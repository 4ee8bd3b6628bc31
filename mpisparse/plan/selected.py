"""What selecting takes at any number of ranks, by the simulator; its gradients are made up."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable
from dataclasses import replace

from mpisparse.plan.candidates import SPARSE, Candidate
from mpisparse.plan.messages import Selected, Selections
from mpisparse.plan.simulator import Simulated, simulator
from mpisparse.plan.synthetic import Synthetic

FIRST, STEPS = 6, 5  # steps that find a threshold, and borders that stay; and steps that are looked at
SETS = 8  # ranks with gradients of their own, in three steps
LONGEST, MOST = 1 << 20, 1 << 26  # elements of a rank, and of all together; a longer vector is cut
DENSE = 0.1  # a cut vector has as many selected elements as the whole one, but for this share of its own


def selections(known: Iterable[Candidate], elements: int, sizes: Iterable[int]) -> Selections:
    """What selecting takes in each exchange of sparse gradients, among so many ranks. Local."""
    sparse = [candidate for candidate in known if candidate.kind == SPARSE]
    several = sorted({ranks for ranks in sizes if ranks > 1})
    return {(each.name, ranks): selected(each, elements, ranks) for ranks in several for each in sparse}


def selected(candidate: Candidate, elements: int, ranks: int) -> Selected:
    """What selecting takes at so many ranks. Counts and balance depend on how many elements a rank selects."""
    cut = max(1, min(elements, LONGEST, MOST // ranks))
    density = min(max(candidate.density, DENSE), candidate.density * elements / cut)
    steps, alone = (_steps(replace(candidate, density=density), cut, size) for size in (ranks, 1))
    usual = sorted(steps, key=lambda step: sum(int(message.received().max()) for message in step.counts))[STEPS // 2]
    seconds, least = (statistics.median(step.work for step in each) for each in (steps, alone))
    return Selected(
        counts=tuple(usual.counts),
        share=statistics.median(len(step.union) / step.k for step in steps),
        imbalance=statistics.median(step.imbalance for step in steps),
        seconds=max(0.0, seconds - least),
    )


def _steps(candidate: Candidate, elements: int, ranks: int) -> list[Simulated]:
    """Some steps in the steady state."""
    virtual = simulator(candidate.scheme, _source(elements), ranks, candidate.density, codec=candidate.codec)
    return [virtual.step() for _ in range(FIRST + STEPS)][FIRST:]


@functools.lru_cache(maxsize=1)
def _source(elements: int) -> Synthetic:
    return Synthetic(elements, SETS)
