"""The claims of docs/explanation/theory.md, each with the figures that the page quotes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mpisparse
from mpisparse.comm.virtual import VirtualComm, run_virtual

N = 4096
Vectors = Callable[[int, int], Tensor]  # of a rank and a step


def exchanged(size: int, vectors: Vectors, steps: int, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Exchange vectors by exdyna: what was published in each step, and the residuals after it, a row for each rank."""

    def work(comm: VirtualComm) -> list[tuple[Tensor, Tensor]]:
        aggregator = mpisparse.aggregator(N, comm=comm, **options)
        done = [(aggregator.step(vectors(comm.rank, t)).clone(), aggregator.residual.clone()) for t in range(steps)]
        aggregator.close()
        return done

    rows = run_virtual(size, work)
    return [published for published, _ in rows[0]], [torch.stack([row[t][1] for row in rows]) for t in range(steps)]


def noise(rank: int, step: int) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(1000 * step + rank))


# Error feedback


@pytest.mark.parametrize("size", [1, 3])
def test_weights_less_what_waits_follow_dense_sgd(size: int) -> None:
    """The shadow of the weights, x - lr mean(residual), makes dense SGD's steps on the same gradients."""
    lr, steps = 0.1, 40
    published, residuals = exchanged(size, noise, steps, density=0.01)
    weights, dense = torch.zeros(N, dtype=torch.float64), torch.zeros(N, dtype=torch.float64)
    for t in range(steps):
        weights -= lr * published[t]
        dense -= lr * torch.stack([noise(rank, t) for rank in range(size)]).double().mean(0)
        shadow = weights - lr * residuals[t].double().mean(0)
        assert torch.allclose(shadow, dense, rtol=0, atol=1e-5)
    assert float((weights - dense).norm()) > 0.1 * float(dense.norm()), "the weights themselves are another matter"


@pytest.mark.parametrize("partitioner", ["best", "paper"])
def test_one_step_may_send_nothing_of_the_mean(partitioner: str) -> None:
    """The counter-example: what two ranks select cancels, so the mean shrinks by no share at all, step after step."""

    def cancelling(rank: int, step: int) -> Tensor:
        vector = torch.full((N,), 1e-3 if step == 0 else 0.0)
        vector[::64] = 1.0 if rank else -1.0
        return vector

    published, residuals = exchanged(2, cancelling, 50, density=1 / 64, partitioner=partitioner)
    assert all(float(mean.norm()) == 0 for mean in published)
    waits = residuals[0].mean(0)
    assert float(waits.norm()) > 0.06
    assert all(torch.equal(each.mean(0), waits) for each in residuals)


def test_one_step_may_send_next_to_nothing_and_the_next_must() -> None:
    """The paper's partitions: each rank has only what lies in the other's, until the partitions change hands."""

    def crossed(rank: int, step: int) -> Tensor:
        vector = torch.zeros(N)
        if step == 0:
            half = slice(N // 2, N) if rank == 0 else slice(0, N // 2)
            vector[half] = noise(rank, 0)[half]
        return vector

    paper, _ = exchanged(2, crossed, 2, density=0.01, controller="paper", partitioner="paper")
    first, second = (int((mean != 0).sum()) for mean in paper)
    k = int(0.01 * N)
    assert first == 2, "each rank selects nothing, so it sends one index"
    assert second > k
    ours, _ = exchanged(2, crossed, 2, density=0.01)
    assert all(abs(int((mean != 0).sum()) - k) <= 0.05 * k + 1 for mean in ours), "borders follow what each rank has"


def steps_to_leave(size: int, seed: int, rounds: int, **options: Any) -> int:
    """In which step an element leaves that is by far the largest of all, and that one rank alone has."""
    place, lucky, start = 6979 * (seed + 1) % N, seed % size, 3

    def alone(rank: int, step: int) -> Tensor:
        vector = noise(rank, step + 100 * seed)
        if step == start and rank == lucky:
            vector[place] += 1e4
        return vector

    published, _ = exchanged(size, alone, start + rounds * size, density=0.01, **options)
    left = [step for step, mean in enumerate(published[start:]) if float(mean[place]) > 1e3]
    return left[0] if left else rounds * size


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_largest_of_all_leaves_within_a_round_of_kept_borders(size: int) -> None:
    """What makes the constant of a round of `size` steps positive: borders move by a block, partitions change hands."""
    assert max(steps_to_leave(size, seed, 1, partitioner="paper") for seed in range(4)) < size


@pytest.mark.parametrize("size", [2, 3])
def test_borders_drawn_anew_make_most_but_not_all_leave_within_a_round(size: int) -> None:
    """The same with the borders of each step's own work: a round is likely, but no step is certain."""
    waits = [steps_to_leave(size, seed, 4) for seed in range(20)]
    assert sum(wait < size for wait in waits) >= 0.7 * len(waits)


def test_what_waits_stays_bounded() -> None:
    """With bounded gradients the residual grows for about 1 / density steps, then no more."""
    density, size = 0.02, 2
    _, residuals = exchanged(size, lambda rank, step: torch.sign(noise(rank, step)) + 0.5, 400, density=density)
    norms = torch.stack([each.mean(0).norm() for each in residuals])
    assert float(norms[300:].max()) < 1.3 * float(norms[100:200].max())
    assert float(norms.max()) < 1.5 * math.sqrt(N) * size / density


# Adam


def way(gradients: Tensor, **options: Any) -> Tensor:
    """How far Adam's weight goes for these gradients, a row for each step."""
    weight = torch.nn.Parameter(torch.zeros(gradients.shape[1]))
    optimizer = torch.optim.Adam([weight], lr=1.0, **options)
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("period", [4, 25, 100])
def test_adam_goes_a_root_of_the_density_as_far(period: int) -> None:
    """A gradient of 1 in every step, and the same sum in one lump in every `period` steps."""
    steps = 4000
    lumps = torch.zeros(steps, 1)
    lumps[period - 1 :: period] = float(period)
    betas = (0.9, 0.999)
    ratio = float(way(lumps, betas=betas) / way(torch.ones(steps, 1), betas=betas))
    assert ratio == pytest.approx(math.sqrt(1 / period), rel=0.15)


def test_sgd_goes_as_far() -> None:
    """The same lumps, and momentum: the sum is all that counts."""
    steps, period = 400, 25
    lumps = torch.zeros(steps, 1)
    lumps[period - 1 :: period] = float(period)
    ends = []
    for gradients in (lumps, torch.ones(steps, 1)):
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
        for gradient in torch.cat([gradients, torch.zeros(60, 1)]):  # until momentum is spent
            weight.grad = gradient
            optimizer.step()
        ends.append(float(weight.detach()))
    assert ends[0] == pytest.approx(ends[1], rel=1e-4)


# Drift


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_the_mean_of_adams_falls_short_by_a_root_of_the_workers(workers: int) -> None:
    """Where noise rules, Adam on the mean gradient goes root(workers) times as far as the mean of the workers' Adams."""
    steps, width = 400, 256
    signal = 0.05 * torch.sign(torch.randn(width, generator=torch.Generator().manual_seed(1)))
    drawn = torch.randn(workers, steps, width, generator=torch.Generator().manual_seed(2))

    def ratio(scale: float) -> float:
        gradients = signal + scale * drawn
        apart = torch.stack([way(mine, betas=(0.9, 0.99)) for mine in gradients]).mean(0)
        return float(way(gradients.mean(0), betas=(0.9, 0.99)) @ torch.sign(signal) / (apart @ torch.sign(signal)))

    assert ratio(1.0) == pytest.approx(math.sqrt(workers), rel=0.15)
    assert ratio(0.001) == pytest.approx(1, rel=0.01), "where there is no noise, the mean of Adams is Adam"


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_the_mean_of_drifting_weights_makes_the_mean_of_all_steps(codec: str) -> None:
    """At rate 1, mean(W) + e moves by the workers' own updates alone: the exchange neither adds nor loses."""
    size, steps, lr = 3, 30, 0.05

    def work(comm: VirtualComm) -> list[Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 8, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        sync = mpisparse.GradientSync(model, comm=comm, scheme="drift", density=0.05, codec=codec, rate=1.0)
        mpisparse.attach(optimizer, sync)
        start = model.weight.detach().clone()
        data = torch.randn(steps, 16, 64, generator=torch.Generator().manual_seed(comm.rank))
        moved = torch.zeros_like(start, dtype=torch.float64)
        for batch in data:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            assert model.weight.grad is not None
            moved -= lr * model.weight.grad.double()
            optimizer.step()
        own = model.weight.detach().clone()
        sync.synchronize()  # sends the rest, e too: all have G now
        return [start.double(), moved, own.double(), model.weight.detach().double()]

    rows = [torch.stack(each) for each in zip(*run_virtual(size, work), strict=True)]
    start, moved, own, end = rows
    assert (own[0] - own[1]).abs().max() > 1e-3, "workers do differ"
    assert torch.equal(end[0], end[1]), "and end equal"
    expected = start[0] + moved.mean(0)
    assert float((end[0] - expected).abs().max()) < 1e-5
