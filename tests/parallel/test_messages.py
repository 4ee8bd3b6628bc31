"""The messages of a step: four if the borders stay; counts that travel early must change nothing early."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from ranks import PATHS, everywhere, raised, seeded

import mpisparse
from mpisparse.errors import CollectiveError, GradientError
from mpisparse.select.selector import ExclusiveSelector

sys.path.insert(0, str(Path(__file__).parents[1] / "compare"))
from slow_link import SlowTransport

pytestmark = [pytest.mark.mpi(min_size=2)]

N, K = 120_000, 1200
DELAY = 0.0005  # seconds that each collective of a slow link takes longer


class Run:
    """A vector of parameters whose gradients are drawn anew in every step; `scale` is that of a rank's."""

    def __init__(
        self, comm: MPI.Intracomm, scale: Callable[[int], Any] = lambda step: 1.0, n: int = N, **options: Any
    ) -> None:
        self.comm, self.scale, self.n, self.number = comm, scale, n, 0
        self.model = torch.nn.ParameterList([torch.zeros(n)])
        self.sync = mpisparse.GradientSync(self.model, comm=comm, density=K / N, **options)

    def give(self) -> None:
        """Do what backward does, with this step's gradient."""
        gradient = torch.randn(self.n, generator=seeded(self.comm.rank, self.number)) * self.scale(self.number)
        self.model.zero_grad()
        (self.model[0] * gradient).sum().backward()

    def step(self) -> mpisparse.Stats:
        self.give()
        self.sync.step()
        self.number += 1
        return self.sync.stats

    def until_steady(self) -> None:
        """Do steps until the last one took four messages and the next one will."""
        for _ in range(30):
            if self.step().collectives == 4 and not self.sync._aggregator.works.selection.selector.in_step:
                return
        raise AssertionError("the borders never stay")

    def bits(self) -> bytes:
        """What a step changes: the residual, and the gradient as the optimizer reads it."""
        grad = self.model[0].grad
        return self.sync.residual.numpy().tobytes() + (b"" if grad is None else grad.numpy().tobytes())


@pytest.mark.parametrize("path", PATHS)
def test_a_step_in_the_steady_state_takes_four_messages(comm: MPI.Intracomm, path: str) -> None:
    """Borders are drawn again only where chance unbalances them; the density and the balance are those of drawn borders."""
    run = Run(comm, accumulate=path)
    every = [run.step() for _ in range(40)][5:]
    counts = [stats.collectives for stats in every]
    assert min(counts) == 4
    assert counts.count(4) >= 20, counts
    assert np.median(counts) == 4
    assert all(abs(stats.density / stats.set_density - 1) <= 0.011 for stats in every)
    assert np.mean([stats.imbalance for stats in every]) <= 0.15
    run.sync.close()


@pytest.mark.mpi(min_size=3)  # two ranks have as much in each other's places as in their own
def test_borders_that_no_longer_balance_are_drawn_in_the_step(comm: MPI.Intracomm) -> None:
    """Each rank has large gradients elsewhere in most steps; where they stay for a while by chance, so may the borders."""
    place = torch.arange(N) * comm.size // N
    turns = np.random.default_rng(3).integers(0, comm.size, 60).tolist()
    run = Run(comm, lambda step: 1.0 + 3.0 * (place == (comm.rank + turns[step]) % comm.size))
    every = [run.step() for _ in range(60)][20:]
    counts = [stats.collectives for stats in every]
    assert np.mean([stats.imbalance for stats in every]) <= 0.2, [stats.imbalance for stats in every]
    assert counts.count(6) > 0
    assert sum(count >= 6 for count in counts) >= len(counts) // 4, counts
    run.sync.close()


@pytest.mark.ranks(2)
def test_a_step_of_a_million_elements_waits_for_a_slow_link_four_times_instead_of_seven(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Density 0.001, compared with a step that sends everything separately. `bin/compare --delay` measures the gain."""
    runs = [Run(comm, n=1_000_000) for _ in range(2)]
    links = [SlowTransport(run.sync._exchange.comm, DELAY) for run in runs]
    for run, link in zip(runs, links, strict=True):
        run.sync.density = 0.001
        run.sync._exchange.comm = link  # type: ignore[assignment]
    runs[1].sync._aggregator.works.scorer.peeks = False
    judged = ExclusiveSelector.judged
    waits: list[list[int]] = [[], []]
    messages: list[list[int]] = [[], []]
    for step, which in itertools.product(range(24), range(2)):
        never = judged if which == 0 else lambda self, loads: self
        monkeypatch.setattr(ExclusiveSelector, "judged", never)
        before = links[which].waits
        runs[which].step()
        if step >= 6:
            waits[which].append(links[which].waits - before)
            messages[which].append(runs[which].sync.stats.collectives)
    for run, link in zip(runs, links, strict=True):
        run.sync._exchange.comm = link.transport
        run.sync.close()
    assert waits == messages
    assert np.median(messages[0]) == 4
    assert np.median(messages[1]) == 7


@pytest.mark.parametrize("path", PATHS)
def test_what_is_told_with_the_roll_call_is_not_done_before_all_agree(comm: MPI.Intracomm, path: str) -> None:
    """A rank is in another call when the counts travel: nothing changes, and the same step can be done afterwards."""
    run, twin = Run(comm, accumulate=path), Run(comm, accumulate=path)
    run.until_steady()
    for _ in range(run.number):
        twin.step()
    run.give()
    before = run.bits()
    text = raised(comm, CollectiveError, (lambda: run.sync.average(1.0)) if comm.rank == 0 else run.sync.step)
    assert f"in step {run.number}" in text
    assert everywhere(comm, run.bits() == before)
    run.sync.step()
    assert run.sync.stats.collectives == twin.step().collectives == 4
    assert everywhere(comm, run.bits() == twin.bits())
    run.sync.close()
    twin.sync.close()


@pytest.mark.parametrize("density", [0.003, 0.02])
def test_a_density_that_differs_changes_nothing(comm: MPI.Intracomm, density: float) -> None:
    run = Run(comm)
    run.until_steady()
    run.give()
    before, usual = run.bits(), run.sync.density
    run.sync.density = density if comm.rank == 0 else usual
    raised(comm, Exception, run.sync.step)
    assert everywhere(comm, run.bits() == before)
    run.sync.density = usual
    run.sync.step()
    run.sync.close()


@pytest.mark.parametrize("place", [0.1, 0.9])
def test_a_nonfinite_gradient_is_refused_wherever_it_is(comm: MPI.Intracomm, place: float) -> None:
    """In the rank's own region it is seen before anything is added; elsewhere, all learn of it with the indices."""
    run = Run(comm)
    run.until_steady()
    run.give()
    if comm.rank == comm.size - 1:
        grad = run.model[0].grad
        assert grad is not None
        grad[int(place * N)] = float("inf")
    text = raised(comm, GradientError, run.sync.step)
    assert f"rank {comm.size - 1}" in text
    assert "parameter" in text or "0" in text
    run.sync.close()


def test_what_was_refused_before_anything_was_added_damages_nothing(comm: MPI.Intracomm) -> None:
    """A NaN is found in the region of the rank that has it: all raise, and go on with the next step."""
    run = Run(comm)
    run.until_steady()
    run.give()
    grad = run.model[0].grad
    assert grad is not None
    grad.fill_(float("nan"))
    before = run.bits()
    raised(comm, GradientError, run.sync.step)
    assert everywhere(comm, run.bits() == before)
    assert run.step().collectives >= 4
    run.sync.close()


def test_a_steady_state_is_resumed_as_it_was(comm: MPI.Intracomm) -> None:
    """Whether borders stay is part of the state."""
    run, resumed = Run(comm), Run(comm)
    run.until_steady()
    resumed.sync.load_state_dict(run.sync.state_dict())
    resumed.number = run.number
    for _ in range(4):
        stats, again = run.step(), resumed.step()
        assert (stats.borders, stats.workloads) == (again.borders, again.workloads)
        assert everywhere(comm, run.bits() == resumed.bits())
    run.sync.close()
    resumed.sync.close()
