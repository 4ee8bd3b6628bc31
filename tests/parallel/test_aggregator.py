"""The aggregator alone on plain vectors: at once as GradientSync does it, and in flight."""

from __future__ import annotations

import copy
import re
import runpy
from typing import Any

import pytest
import torch
from mpi4py import MPI
from ranks import alike, bits, everywhere, raised, seeded, total
from torch import nn

import mpisparse
from mpisparse.core.aggregator import Aggregator

pytestmark = pytest.mark.mpi

N = 3_000


def vector(rank: int, step: int, n: int = N) -> torch.Tensor:
    """A vector with a heavy tail, as gradients have."""
    return torch.randn(n, generator=seeded(rank, step)) ** 3


def close_together(before: torch.Tensor, after: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Compare sums that differ by roundings only."""
    off = (before - after).abs() - 1e-6 * magnitude
    assert off.max() <= 0, f"element {int(off.argmax())}: {before[off.argmax()]} was given, {after[off.argmax()]} is there"


# At once


def test_the_aggregator_alone_averages_a_plain_vector(comm: MPI.Intracomm) -> None:
    """The example, with the conservation law."""
    aggregator = mpisparse.aggregator(N, density=0.1)
    given, means = torch.zeros(2, N, dtype=torch.float64), torch.zeros(N, dtype=torch.float64)
    for step in range(10):
        given += torch.stack([vector(comm.rank, step), vector(comm.rank, step).abs()])
        mean = aggregator.step(vector(comm.rank, step))
        assert alike(comm, [mean])
        means += mean
    expected, magnitude = total(comm, given)
    close_together(expected, comm.size * means + total(comm, aggregator.residual), magnitude)
    aggregator.close()


def test_the_example_prints_the_same_mean_on_all_ranks(comm: MPI.Intracomm, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_module("mpisparse.examples.vector", run_name="__main__")
    told = comm.allgather(re.findall(r"r(\d+) \| the norm of all means is ([\d.]+)", capsys.readouterr().out))
    assert [rank for ((rank, _),) in told] == [str(rank) for rank in range(comm.size)]
    assert len({norm for ((_, norm),) in told}) == 1
    assert float(told[0][0][1]) > 10


class Weights(nn.Module):
    """One parameter whose gradient is any vector."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(N))


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("exdyna", {"density": 0.05}),
        ("exdyna", {"density": 0.05, "codec": "int8"}),
        ("exdyna", {"density": 0.05, "compensate": False}),
        ("momentum", {"density": 0.05}),
        ("topk", {"density": 0.02}),
        ("dgc", {"density": 0.02, "warm_up": 3}),
        ("dense", {}),
    ],
)
def test_at_once_the_bits_are_those_of_gradient_sync(comm: MPI.Intracomm, scheme: str, options: dict[str, Any]) -> None:
    aggregator = mpisparse.aggregator(N, scheme=scheme, **options)
    model = Weights()
    sync = mpisparse.GradientSync(model, scheme=scheme, **options)
    same = []
    for step in range(20):
        model.p.grad = vector(comm.rank, step)
        sync.step()
        mean = aggregator.step(vector(comm.rank, step))
        assert aggregator.stats is not None
        same.append(bits([mean, aggregator.residual]) == bits([model.p.grad, sync.residual]))
        same.append(aggregator.stats.selected == sync.stats.selected and aggregator.k == sync.k)
        same.append(aggregator.stats.bytes_sent <= sync.stats.bytes_sent)
    assert everywhere(comm, all(same)), same
    aggregator.close()
    sync.close()


def test_k_is_what_the_density_says_unless_it_is_given(comm: MPI.Intracomm) -> None:
    aggregator = mpisparse.aggregator(N, density=0.01, scheme="topk")
    first = int(aggregator.step(vector(0, 0)).count_nonzero())
    aggregator.density = 0.02
    second = int(aggregator.step(vector(0, 1)).count_nonzero())
    third = int(aggregator.step(vector(0, 2), 7).count_nonzero())
    assert everywhere(comm, (first, second, third) == (30, 60, 7)), (first, second, third)
    aggregator.close()


def test_a_mean_that_the_caller_wrote_to_is_cleared(comm: MPI.Intracomm) -> None:
    aggregator, twin = mpisparse.aggregator(N, density=0.01), mpisparse.aggregator(N, density=0.01)
    aggregator.step(vector(comm.rank, 0)).fill_(7.0)
    twin.step(vector(comm.rank, 0))
    same = bits([aggregator.step(vector(comm.rank, 1))]) == bits([twin.step(vector(comm.rank, 1))])
    assert everywhere(comm, same)
    aggregator.close()
    twin.close()


def test_a_vector_with_gaps_in_memory_is_read_as_it_is(comm: MPI.Intracomm) -> None:
    aggregator = mpisparse.aggregator(N, scheme="dense")
    wide = torch.stack([vector(0, 0), torch.full((N,), 9.0)], dim=1)
    mean = aggregator.step(wide[:, 0])
    assert everywhere(comm, torch.allclose(mean, vector(0, 0)))
    aggregator.close()


@pytest.mark.parametrize(
    ("make", "k", "said"),
    [
        (lambda: torch.zeros(N - 1), None, f"of {N} elements on the CPU, got one of shape [{N - 1}]"),
        (lambda: torch.zeros(1, N), None, f"got one of shape [1, {N}]"),
        (lambda: torch.zeros(N, dtype=torch.float64), None, "(float64, strided) on cpu"),
        (lambda: torch.zeros(N).to_sparse(), None, "(float32, sparse_coo)"),
        (lambda: torch.zeros(N, device="meta"), None, "on meta; convert it first"),
        (lambda: [0.0] * N, None, "got list"),
        (lambda: torch.zeros(N), 0, f"k must be a whole number from 1 to {N}, got 0"),
        (lambda: torch.zeros(N), N + 1, f"k must be a whole number from 1 to {N}, got {N + 1}"),
    ],
)
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_vector_that_does_not_fit_on_one_rank_is_refused_on_all(
    comm: MPI.Intracomm, make: Any, k: int | None, said: str, staleness: int
) -> None:
    """At once, and nothing is damaged; in flight, with the step that settles it."""
    aggregator = mpisparse.aggregator(N, density=0.1, staleness=staleness)
    odd = comm.rank == comm.size - 1
    aggregator.step(vector(comm.rank, 0))
    if staleness:
        aggregator.step(make() if odd else vector(comm.rank, 1), k if odd else None)
        text = raised(comm, mpisparse.GradientError, lambda: aggregator.step(vector(comm.rank, 2)))
        assert f"step 1 failed on rank {comm.size - 1}" in text
        damaged = raised(comm, mpisparse.GradientError, lambda: aggregator.step(vector(comm.rank, 3)))
        assert "damaged since an earlier error" in damaged
    else:
        text = raised(
            comm,
            mpisparse.GradientError,
            lambda: aggregator.step(make() if odd else vector(comm.rank, 1), k if odd else None),
        )
        assert alike(comm, [aggregator.step(vector(comm.rank, 2))])
    assert said in text
    aggregator.close()


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_vector_that_is_not_finite_is_refused_until_a_state_is_loaded(comm: MPI.Intracomm, staleness: int) -> None:
    aggregator = mpisparse.aggregator(N, density=0.1, staleness=staleness)
    aggregator.step(vector(comm.rank, 0))
    state, residual = saved(aggregator)
    bad = vector(comm.rank, 1)
    if comm.rank == 0:
        bad[17] = float("nan")

    def refused() -> None:
        aggregator.step(bad)
        aggregator.step(vector(comm.rank, 2))

    text = raised(comm, mpisparse.NonFiniteGradientError, refused)
    assert "in the vector (flat index 17)" in text
    assert "skip" not in text
    assert "damaged" in raised(comm, mpisparse.GradientError, lambda: aggregator.step(vector(comm.rank, 3)))
    load(aggregator, state, residual)
    assert everywhere(comm, aggregator.step(vector(comm.rank, 4)).isfinite().all())
    aggregator.close()


@pytest.mark.parametrize(
    ("n", "options", "said"),
    [
        (0, {}, "n must be a whole number >= 1, got 0"),
        (2.5, {}, "n must be a whole number >= 1, got 2.5"),
        (N, {"density": 2.0}, "density must be in (0, 1], got 2.0"),
        (N, {"scheme": "speculative", "staleness": 0}, "cannot average a plain vector"),
        (N, {"scheme": "predictive", "validation": lambda: None}, "validation is for a model's loss"),
        (N, {"accumulate": "backward"}, "accumulate='backward' is for a model's backward"),
        (N, {"nonfinite": "skip"}, "nonfinite='skip'"),
        (N, {"staleness": -1}, "staleness must be a whole number >= 0, got -1"),
        (N, {"staleness": 2}, "staleness must be 0 or 1, got 2"),
        (N, {"staleness": 1, "codec": "momentum-int8"}, "codec 'momentum-int8' cannot blend"),
        (N, {"staleness": 1, "compensate": False}, "needs compensate=True"),
        (N, {"staleness": 1, "scorer": "average"}, "scorer=\"magnitude\", got scorer='average'"),
        (N, {"staleness": 1, "scheme": "momentum", "codec": "fp32"}, 'scheme "exdyna" with scorer="magnitude"'),
        (N, {"staleness": 1, "scheme": "topk"}, 'a staleness above 0 needs scheme "exdyna"'),
    ],
)
def test_what_goes_without_a_model_is_checked(comm: MPI.Intracomm, n: Any, options: dict[str, Any], said: str) -> None:
    assert said in raised(comm, mpisparse.ConfigurationError, lambda: mpisparse.aggregator(n, **options))


def test_what_is_wrong_or_different_on_one_rank_is_refused_on_all(comm: MPI.Intracomm) -> None:
    odd = comm.rank == comm.size - 1
    wrong = raised(comm, mpisparse.ConfigurationError, lambda: mpisparse.aggregator(-1 if odd else N))
    assert "n must be" in wrong
    if comm.size == 1:
        return
    for options in ({"density": 0.1 if odd else 0.2}, {"staleness": int(odd)}):
        text = raised(comm, mpisparse.ConfigurationError, lambda options=options: mpisparse.aggregator(N, **options))
        assert "the ranks differ" in text
    aggregator = mpisparse.aggregator(N, density=0.1)
    text = raised(comm, mpisparse.ConfigurationError, lambda: aggregator.step(vector(0, 0), 3 if odd else 4))
    assert "must be the same on all ranks" in text
    aggregator.close()


# State


def saved(aggregator: Aggregator) -> tuple[dict[str, Any], torch.Tensor]:
    """A copy of all that the next step depends on."""
    return copy.deepcopy(aggregator.state()), aggregator.residual.clone()


def load(aggregator: Aggregator, state: dict[str, Any], residual: torch.Tensor) -> None:
    aggregator.check(state)
    aggregator.load(state)
    aggregator.residual.copy_(residual)
