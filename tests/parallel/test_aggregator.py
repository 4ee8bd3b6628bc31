"""The aggregator alone on plain vectors: at staleness 0, as GradientSync uses it, and in flight."""

from __future__ import annotations

import copy
import re
import runpy
import threading
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from drifting import Training
from mpi4py import MPI
from ranks import alike, bits, carried, everywhere, raised, seeded, total
from speculating import Run
from torch import nn

import mpisparse
from mpisparse.backends.flat import pieces_of
from mpisparse.comm.agreement import Notice
from mpisparse.core.aggregator import Aggregator
from mpisparse.core.records import Outgoing
from mpisparse.core.state import sources

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
        assert aggregator.last is not None
        same.append(bits([mean, aggregator.residual]) == bits([model.p.grad, sync.residual]))
        same.append(aggregator.last.selected == sync.stats.selected and aggregator.k == sync.k)
        same.append(aggregator.last.bytes_sent <= sync.stats.bytes_sent)
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
    """At staleness 0 at once, with nothing damaged; in flight, with the step that settles it."""
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
    before = aggregator.residual.clone()
    bad = vector(comm.rank, 1)
    if comm.rank == 0:
        bad[17] = float("nan")

    def refused() -> None:
        aggregator.step(bad)
        aggregator.step(vector(comm.rank, 2))

    text = raised(comm, mpisparse.NonFiniteGradientError, refused)
    assert "in the vector (flat index 17)" in text
    assert "skip" not in text
    if staleness or comm.size == 1:
        assert "damaged" in raised(comm, mpisparse.GradientError, lambda: aggregator.step(vector(comm.rank, 3)))
    else:  # it was seen before anything was added
        assert everywhere(comm, torch.equal(aggregator.residual, before))
        assert everywhere(comm, aggregator.step(vector(comm.rank, 3)).isfinite().all())
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
        (N, {"staleness": 1, "compensate": False}, "needs compensate=True"),
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
    """A copy of everything that the next step depends on."""
    return copy.deepcopy(aggregator.state()), aggregator.residual.clone()


def load(aggregator: Aggregator, state: dict[str, Any], residual: torch.Tensor) -> None:
    aggregator.check(state)
    aggregator.load(state)
    aggregator.residual.copy_(residual)


# In flight


class Account:
    """What was given, what was published, and what is in flight, on this rank."""

    def __init__(self, comm: MPI.Intracomm, aggregator: Aggregator) -> None:
        self.comm, self.aggregator = comm, aggregator
        self.given = torch.zeros(2, N, dtype=torch.float64)  # the sum, and the sum of magnitudes
        self.means = torch.zeros(N, dtype=torch.float64)
        self.on_its_way = torch.zeros(N, dtype=torch.float64)
        self.sent: list[tuple[Any, Any]] = []  # per step: the index whose values departed, and the agreement before
        assert aggregator.works.flight is not None
        send = aggregator.works.flight.send
        aggregator.works.flight.send = lambda out: (self._note(out), send(out))[1]  # type: ignore[method-assign]

    def _note(self, outgoing: Outgoing) -> None:
        assert outgoing.ahead is not None
        index, values = outgoing.ahead.sent.index, outgoing.ahead.sent.values
        self.on_its_way = torch.zeros(N, dtype=torch.float64)
        self.on_its_way[torch.from_numpy(index)] = torch.from_numpy(values.astype(np.float64))
        for stage in outgoing.stages:  # what is blended with these values leaves with them
            self.on_its_way += carried(dict(stage.state()), N, "")
        self.sent.append((index.copy(), outgoing.view.found.index.copy()))

    def step(self, given: torch.Tensor) -> torch.Tensor:
        self.given += torch.stack([given, given.abs()])
        mean = self.aggregator.step(given)
        self.means += mean
        return mean

    def check(self) -> None:
        """Nothing is lost, and all ranks have published the same. Collective."""
        expected, magnitude = total(self.comm, self.given)
        waiting = self.aggregator.residual.double() + self.on_its_way
        for stage in self.aggregator.works.stages:
            waiting += carried(dict(stage.state()), N, "")
        close_together(expected, self.comm.size * self.means + total(self.comm, waiting), magnitude)


@pytest.mark.parametrize(
    "options",
    [
        {"density": 0.05},
        {"density": 0.05, "codec": "int8"},
        {"density": 0.05, "codec": "bf16", "partitioner": "static"},
        {"density": 0.05, "controller": "paper", "partitioner": "paper", "blocks": 64},
        {"density": 0.05, "controller": "fixed", "reduce": "allreduce"},
        {"density": 0.05, "codec": "momentum-int8"},
        {"scheme": "momentum", "density": 0.05, "codec": "momentum-fp32"},
        {"density": 0.0003},
        {"density": 1.0},
    ],
)
def test_in_flight_nothing_is_lost_and_ranks_are_equal(comm: MPI.Intracomm, options: dict[str, Any]) -> None:
    aggregator = mpisparse.aggregator(N, staleness=1, **options)
    account = Account(comm, aggregator)
    for step in range(70):  # past a sweep
        mean = account.step(vector(comm.rank, step))
        assert alike(comm, [mean])
        assert aggregator.number == step + 1
        if step % 10 == 3 or step < 3:
            account.check()
    for _ in aggregator.arrivals():
        account.means += aggregator.parts.sink.published()
    account.on_its_way.zero_()
    account.check()
    mean = account.step(vector(comm.rank, 70))  # it goes on after nothing was in flight
    assert everywhere(comm, not mean.any())
    account.check()
    aggregator.close()


def test_indices_travel_one_step_ahead_of_their_values(comm: MPI.Intracomm) -> None:
    """What step t finds is agreed on in its delivery, sent with the values of t + 1, and published at t + 2."""
    aggregator = mpisparse.aggregator(N, density=0.01, staleness=1)
    account = Account(comm, aggregator)
    means = [account.step(vector(comm.rank, step)).clone() for step in range(6)]
    sent = [index for index, _ in account.sent]
    assert everywhere(comm, len(sent[0]) == 0 and all(len(index) for index in sent[1:])), list(map(len, sent))
    assert everywhere(comm, not means[0].any() and not means[1].any())
    assert alike(comm, [torch.from_numpy(index) for index in sent])
    for step in range(2, 6):
        assert everywhere(comm, np.isin(means[step].nonzero()[:, 0].numpy(), sent[step - 1]).all())
        found = np.unique(np.concatenate(comm.allgather(account.sent[step - 2][1])))
        assert everywhere(comm, np.isin(sent[step - 1], found).all()), "sent what no rank had found a step before"
    only = vector(comm.rank, 0) + vector(comm.rank, 1)  # the first values are those of two steps
    expected = total(comm, only)[torch.from_numpy(sent[1])] / comm.size
    assert everywhere(comm, torch.allclose(means[2][torch.from_numpy(sent[1])].double(), expected, atol=1e-5))
    aggregator.close()


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_a_ladder_that_misses_loses_nothing_and_the_density_recovers(comm: MPI.Intracomm, factor: float) -> None:
    """The vectors become far smaller, or far larger, from one step to the next."""
    aggregator = mpisparse.aggregator(N, density=0.05, staleness=1)
    account, k = Account(comm, aggregator), N // 20
    for step in range(30):
        if step == 10:  # clear the residual, so that no large values keep the ladder busy
            aggregator.residual.zero_()
            account.given.zero_()
            account.means.zero_()
            for _ in aggregator.arrivals():
                aggregator.residual.zero_()
            account.on_its_way.zero_()
        account.step(vector(comm.rank, step) * (1.0 if step < 10 else factor))
        if step >= 10:
            account.check()
    counts = [len(index) for index, _ in account.sent]
    missed = [step for step in range(1, 30) if abs(counts[step] - k) > 0.1 * k]
    if factor < 1:
        assert counts[11] < 0.5 * k, counts
    assert len(missed) <= 3, counts
    assert all(later - step > 1 for step, later in pairwise(missed)), f"missed twice in a row: {counts}"
    aggregator.close()


@pytest.mark.parametrize(
    "options", [{}, {"codec": "int8"}, {"codec": "momentum-int8"}, {"partitioner": "static"}, {"controller": "paper"}]
)
@pytest.mark.parametrize("at", [0, 1, 2, 7])
@pytest.mark.singles
def test_a_state_resumes_with_the_same_bits(comm: MPI.Intracomm, options: dict[str, Any], at: int) -> None:
    aggregator = mpisparse.aggregator(N, density=0.02, staleness=1, **options)
    for step in range(at):
        aggregator.step(vector(comm.rank, step))
    state, residual = saved(aggregator)
    resumed = mpisparse.aggregator(N, density=0.02, staleness=1, **options)
    resumed.step(vector(comm.rank, 99))  # what it did before does not matter
    load(resumed, state, residual)
    same = []
    for step in range(at, at + 6):
        means = [each.step(vector(comm.rank, step)).clone() for each in (aggregator, resumed)]
        same.append(bits(means[:1]) == bits(means[1:]))
        same.append(bits([aggregator.residual]) == bits([resumed.residual]))
    assert everywhere(comm, all(same)), same
    assert aggregator.number == resumed.number
    aggregator.close()
    resumed.close()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda state: state["waiting"].update(union=state["waiting"]["union"] + N), "not of this model"),
        (lambda state: state["waiting"].update(union=state["waiting"]["union"][::-1]), "not of this model"),
        (lambda state: state["waiting"].pop("bounds"), "malformed: 'bounds'"),
        (lambda state: state["flight"][0]["agreed"].update(union=state["waiting"]["union"] + N), "not of this model"),
        (lambda state: state["flight"][0].update(index=state["flight"][0]["index"] - N), "not of this model"),
        (lambda state: state["flight"][0]["note"].__setitem__(0, np.zeros(1, np.float32)), "the note about"),
        (lambda state: state["flight"][0].update(note=[state["flight"][0]["note"][0] * np.nan]), "the note about"),
    ],
)
def test_a_damaged_state_is_refused(comm: MPI.Intracomm, harm: Callable[[Any], Any], said: str) -> None:
    aggregator = mpisparse.aggregator(N, density=0.02, codec="momentum-fp32", staleness=1)
    for step in range(3):
        aggregator.step(vector(comm.rank, step))
    for _ in aggregator.arrivals():
        pass
    waiting = saved(aggregator)[0]["waiting"]
    for step in range(3, 5):
        aggregator.step(vector(comm.rank, step))
    state, _ = saved(aggregator)
    state["waiting"] = waiting
    aggregator.check(state)
    harm(state)
    assert said in raised(comm, mpisparse.ConfigurationError, lambda: aggregator.check(state))
    aggregator.close()


@pytest.mark.parametrize("codec", ["fp32", "int8", "momentum-int8"])
@pytest.mark.parametrize("fewer_first", [False, True])
def test_a_state_goes_on_among_more_or_fewer_ranks(comm: MPI.Intracomm, codec: str, fewer_first: bool) -> None:
    """The sum given, over the ranks that gave it, equals what is published plus the sum that waits over the ranks."""
    few, all_ranks = comm.Split(0 if comm.rank < max(1, comm.size - 1) else MPI.UNDEFINED), comm.Dup()
    first, second = (few, all_ranks) if fewer_first else (all_ranks, few)
    old, new = (max(1, comm.size - 1), comm.size) if fewer_first else (comm.size, max(1, comm.size - 1))
    given, means = torch.zeros(2, N, dtype=torch.float64), torch.zeros(N, dtype=torch.float64)
    state: Any = None
    if first != MPI.COMM_NULL:
        aggregator = mpisparse.aggregator(N, density=0.02, codec=codec, staleness=1, comm=first)
        for step in range(5):
            given += torch.stack([vector(comm.rank, step), vector(comm.rank, step).abs()]) / old
            means += aggregator.step(vector(comm.rank, step))
        state = saved(aggregator)
        aggregator.close()
    states = [each for each in comm.allgather(state) if each is not None]
    means = torch.from_numpy(comm.bcast(means.numpy()))
    waiting = torch.zeros(N, dtype=torch.float64)
    if second != MPI.COMM_NULL:
        aggregator = mpisparse.aggregator(N, density=0.02, codec=codec, staleness=1, comm=second)
        taken = sources(old, new, comm.rank)
        residuals = {rank: states[rank][1].numpy().copy() for rank in taken}
        merged, residual = aggregator.resize({rank: states[rank][0] for rank in taken}, residuals, old, new, comm.rank)
        load(aggregator, merged, torch.from_numpy(residual))
        for step in range(5, 12):
            given += torch.stack([vector(comm.rank, step), vector(comm.rank, step).abs()]) / new
            mean = aggregator.step(vector(comm.rank, step))
            assert alike(second, [mean])
            means += mean
        for _ in aggregator.arrivals():
            means += aggregator.parts.sink.published()
        assert aggregator.number == 12
        waiting += (aggregator.residual + carried(aggregator.state(), N, "")) / new
        aggregator.close()
    means = torch.from_numpy(comm.bcast(means.numpy()))
    expected, magnitude = total(comm, given)
    close_together(expected, means + total(comm, waiting), 3 * magnitude)
    for each in (few, all_ranks):
        if each != MPI.COMM_NULL:
            each.Free()


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("kind", ["one element", "two elements", "zeros", "ties", "disjoint", "one rank only", "denormal"])
@pytest.mark.singles
def test_odd_vectors_lose_nothing(comm: MPI.Intracomm, kind: str, staleness: int) -> None:
    n = {"one element": 1, "two elements": 2}.get(kind, 600)
    aggregator = mpisparse.aggregator(n, density=0.02, staleness=staleness)
    given, means = torch.zeros(2, n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for step in range(40):
        each = vector(comm.rank, step, n)
        if kind == "zeros":
            each.zero_()
        elif kind == "ties":
            each = torch.ones(n)
        elif kind == "disjoint":
            each[torch.arange(n) % comm.size != comm.rank] = 0.0
        elif kind == "one rank only":
            each *= comm.rank == comm.size - 1
        elif kind == "denormal":
            each *= 1e-41
        given += torch.stack([each, each.abs()])
        mean = aggregator.step(each)
        assert alike(comm, [mean])
        means += mean
    for _ in aggregator.arrivals():
        means += aggregator.parts.sink.published()
    expected, magnitude = total(comm, given)
    close_together(expected, comm.size * means + total(comm, aggregator.residual), magnitude + 1e-37)
    assert everywhere(comm, means.any() or kind == "zeros"), "nothing was ever sent"
    aggregator.close()


# What a delivery reads


class Gate:
    """Holds a delivery on the last rank before its call number `call`, and so on all ranks, until it is opened.

    One rank alone may have nothing to call: its delivery is held before it begins.
    """

    def __init__(self, comm: MPI.Intracomm, aggregator: Aggregator, call: int) -> None:
        exchange, flight = aggregator._polling, aggregator.works.flight
        assert exchange is not None
        assert flight is not None
        assert exchange.threaded, "without threads nothing is in flight"
        self.reached, self.opened, self.calls = threading.Event(), threading.Event(), 0
        passes = exchange._call

        def held(*args: Any, **options: Any) -> None:
            if self.calls == call:
                self.reached.set()
                assert self.opened.wait(600)
            self.calls += 1
            passes(*args, **options)

        carry = flight.carry

        def held_alone(outgoing: Outgoing) -> Any:
            self.reached.set()
            assert self.opened.wait(600)
            return carry(outgoing)

        if comm.size == 1:
            flight.carry = held_alone
        elif comm.rank == comm.size - 1:
            exchange._call = held  # type: ignore[method-assign]
        else:
            self.reached.set()
        self.release = lambda: (vars(exchange).pop("_call", None), setattr(flight, "carry", carry))

    def open_after_all(self, comm: MPI.Intracomm, aggregator: Aggregator) -> None:
        """Open it when all ranks are here, and wait for the delivery; collective."""
        flight = aggregator.works.flight
        assert flight is not None
        waits = everywhere(comm, not flight.waiting[-1].done())
        self.opened.set()
        flight.results()
        self.release()
        assert waits, "the delivery was over before anything was overwritten"


class Overwritten:
    """Inside the block, puts garbage into tensors, and in place of all parts of an aggregator that a step may change."""

    def __init__(self, aggregator: Aggregator, tensors: Iterable[torch.Tensor]) -> None:
        self.works = aggregator.works
        memories = [torch.from_numpy(memory) for memory in aggregator.memories().values()]
        self.tensors = [each.detach() for each in [aggregator.residual, *memories, *tensors]]

    def __enter__(self) -> None:
        self.kept = [each.clone() for each in self.tensors]
        self.parts = {name: part for name, part in vars(self.works).items() if name not in ("flight", "exchange", "backend")}
        self.inside = {id(part): dict(vars(part)) for part in (self.works.scorer, self.works.selection)}
        for each in self.tensors:
            each.fill_(float("nan"))
        for part in (self.works.scorer, self.works.selection):
            for name in vars(part):
                setattr(part, name, None)
        for name in self.parts:
            setattr(self.works, name, None)

    def __exit__(self, *_: object) -> None:
        for name, part in self.parts.items():
            setattr(self.works, name, part)
        for part in (self.works.scorer, self.works.selection):
            vars(part).update(self.inside[id(part)])
        for each, kept in zip(self.tensors, self.kept, strict=True):
            each.copy_(kept)


def delivery(aggregator: Aggregator) -> bytes:
    """Wait for what is in flight; all of it as bytes."""
    assert aggregator.works.flight is not None
    return as_bytes(aggregator.state()["flight"])


def as_bytes(value: Any) -> bytes:
    """Nested records as bytes; NaN payloads and signs of zero count."""
    if isinstance(value, dict):
        return as_bytes(list(value.items()))
    if isinstance(value, list | tuple):
        return b"(" + b",".join(map(as_bytes, value)) + b")"
    if isinstance(value, torch.Tensor):
        value = value.detach().numpy()
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}".encode() + value.tobytes()
    assert value is None or isinstance(value, bool | int | float | str | bytes | np.generic), f"as bytes: {type(value)}"
    return repr(value).encode()


@pytest.mark.parametrize("call", [0, 1, 3])
def test_a_delivery_in_flight_reads_only_its_snapshot(comm: MPI.Intracomm, call: int) -> None:
    aggregator, twin = (mpisparse.aggregator(N, density=0.02, staleness=1) for _ in range(2))
    for step in range(6):
        undisturbed = twin.step(vector(comm.rank, step))
        given = vector(comm.rank, step)
        delivery(aggregator)
        gate = Gate(comm, aggregator, call)
        mean = aggregator.step(given)
        assert everywhere(comm, gate.reached.wait(600))
        same = bits([mean]) == bits([undisturbed])
        with Overwritten(aggregator, [given, mean]):
            gate.open_after_all(comm, aggregator)
        assert everywhere(comm, same)
        assert everywhere(comm, delivery(aggregator) == delivery(twin)), step
        assert everywhere(comm, bits([aggregator.residual]) == bits([twin.residual]))
    aggregator.close()
    twin.close()


@pytest.mark.parametrize("call", [0, 1, 2])  # with density 1 there are no more
@pytest.mark.parametrize("density", [0.05, 1.0])
@pytest.mark.singles
def test_a_delivery_of_drift_reads_only_its_snapshot(comm: MPI.Intracomm, density: float, call: int) -> None:
    """Neither the weights, own and shared, nor the gradients."""
    run, twin = (Training(comm, density=density, staleness=1) for _ in range(2))
    aggregator = run.sync._aggregator
    for step in range(6):
        twin.step()
        delivery(aggregator)
        gate = Gate(comm, aggregator, call)
        run.step()
        assert everywhere(comm, gate.reached.wait(600))
        own = [p.data for p in run.model.parameters()]
        grads = [p.grad for p in run.model.parameters() if p.grad is not None]
        with Overwritten(aggregator, [*own, *grads]):
            gate.open_after_all(comm, aggregator)
        assert everywhere(comm, delivery(aggregator) == delivery(twin.sync._aggregator)), step
        assert everywhere(comm, run.bits() == twin.bits())
    run.sync.close()
    twin.sync.close()


@pytest.mark.parametrize("call", [0, 1, 3])
@pytest.mark.parametrize("granularity", ["fine", "coarse"])
@pytest.mark.singles
def test_a_delivery_of_speculative_reads_only_its_snapshot(comm: MPI.Intracomm, granularity: str, call: int) -> None:
    run, twin = (Run(comm, granularity=granularity, codec="int8") for _ in range(2))
    aggregator = run.sync._aggregator
    for step in range(6):
        twin.step(step)
        delivery(aggregator)
        gate = Gate(comm, aggregator, call)
        run.step(step)
        assert everywhere(comm, gate.reached.wait(600))
        published = [each.buffer for each in run.sync._gradients.published.runs]
        with Overwritten(aggregator, [*published, *run.tensors()]):
            gate.open_after_all(comm, aggregator)
        assert everywhere(comm, delivery(aggregator) == delivery(twin.sync._aggregator)), step
        assert everywhere(comm, run.bits() == twin.bits())
    run.close()
    twin.close()


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "assigns": lambda _, acc: acc.__setitem__(0, 1.0),
    "adds": lambda _, acc: acc.__iadd__(np.float32(1.0)),
    "puts": lambda backend, acc: backend.put(acc, np.array([0]), np.ones(1, dtype=np.float32)),
    "takes": lambda backend, acc: backend.take(acc, np.array([0]), np.empty(1, dtype=np.float32)),
    "fills": lambda backend, acc: backend.fill(acc, 1.0),
}


class WritingPlan:
    """A plan that writes where it may only read."""

    def __init__(self, write: Callable[[Any, Any], Any], reach: Callable[[Any], Any]) -> None:
        self.write, self.reach = write, reach

    def agree(self, exchange: Any, backend: Any, notice: Notice, view: Any) -> Any:
        self.write(backend, self.reach(view))


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("scheme", ["exdyna", "momentum", "topk", "dgc", "dense"])
def test_at_once_deliver_cannot_write_to_the_accumulator(comm: MPI.Intracomm, scheme: str, write: str) -> None:
    aggregator = mpisparse.aggregator(N, scheme=scheme, codec="int8" if scheme == "dense" else None)
    notice = Notice(5, np.zeros(1, dtype=bool))
    outgoing = aggregator.prepare(pieces_of(vector(comm.rank, 0)), notice)
    before = bits([aggregator.residual])
    for reach in (lambda v: v.acc, lambda v: v.keys.vector, lambda v: v.by_magnitude().keys.vector):
        plan: Any = WritingPlan(WRITES[write], reach)
        with pytest.raises((ValueError, TypeError), match=r"read-only|incompatible function arguments"):
            aggregator.deliver(outgoing._replace(plan=plan))
    delivered = aggregator.deliver(outgoing)
    assert everywhere(comm, bits([aggregator.residual]) == before), "deliver changed the accumulator"
    aggregator.apply(delivered)
    assert alike(comm, [aggregator.parts.sink.published()])
    assert everywhere(comm, bits([aggregator.residual]) != before)
    aggregator.close()
