"""Collectives: segments of any size, byte counts, any communicator, and the code path of many ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from ranks import PATHS, bits, lawful_steps, published, seeded, train_lawfully
from torch import nn

import mpisparse
from mpisparse.bench.given import GivenModel
from mpisparse.comm import mpi, pieces
from mpisparse.comm.exchange import Exchange
from mpisparse.comm.mpi import Communicator
from mpisparse.select import search

pytestmark = pytest.mark.mpi

both_paths = pytest.mark.parametrize("path", PATHS)
Bytes = NDArray[np.uint8]

SEGMENTS = [1, 2, 3, 7, 8, 13, 32, 33, 64, 100]
SHARES = [0, 1, 37, 0, 8, 100]  # bytes of each rank, beginning anywhere, so that some have none


def pattern(seed: int, count: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def shares(size: int, first: int) -> list[int]:
    return [SHARES[(rank + first) % len(SHARES)] for rank in range(size)]


def places(counts: list[int], order: list[int]) -> list[int]:
    """Return the byte offsets of payloads stored one after the other in a given order of ranks."""
    result = [0] * len(counts)
    at = 0
    for rank in order:
        result[rank] = at
        at += counts[rank]
    return result


def orders(size: int) -> list[list[int]]:
    ascending = list(range(size))
    return [ascending, ascending[1:] + ascending[:1]]


def test_allgatherv(comm: MPI.Intracomm) -> None:
    wrong = []
    exchange = Exchange(comm)
    for first in (0, 2, 3):
        counts = shares(comm.size, first)
        payloads = [pattern(rank, count) for rank, count in enumerate(counts)]
        for order in orders(comm.size):
            expected = np.concatenate([payloads[rank] for rank in order])
            for segment in [1 << 30, *SEGMENTS]:
                exchange.segment_nbytes = segment
                gathered = exchange.allgatherv(payloads[comm.rank], counts, places(counts, order))
                if not np.array_equal(gathered, expected):
                    wrong.append((first, order, segment))
    exchange.close()
    assert not wrong


def test_alltoallv(comm: MPI.Intracomm) -> None:
    wrong = []
    exchange = Exchange(comm)
    for first in (0, 2, 3):
        counts = shares(comm.size, first)
        rows = [[pattern(100 * rank + q, count) for q, count in enumerate(counts)] for rank in range(comm.size)]
        expected = np.concatenate([rows[rank][comm.rank] for rank in range(comm.size)])
        for order in orders(comm.size):
            payload = np.concatenate([rows[comm.rank][q] for q in order])
            for segment in [1 << 30, *SEGMENTS]:
                exchange.segment_nbytes = segment
                received = exchange.alltoallv(payload, counts, places(counts, order))
                if not np.array_equal(received, expected):
                    wrong.append((first, order, segment))
    exchange.close()
    assert not wrong


@pytest.mark.parametrize("count", [0, 1, 25, 130])
def test_reductions(comm: MPI.Intracomm, count: int) -> None:
    """float32 sums use whole numbers, because MPI may add in another order for another length."""
    wrong = []
    exchange = Exchange(comm)
    rows = [pattern(rank, count) for rank in range(comm.size)]
    floats = np.sum([row.astype(np.float32) for row in rows], axis=0, dtype=np.float32)
    for segment in [1 << 30, *SEGMENTS]:
        exchange.segment_nbytes = segment
        mine = rows[comm.rank]
        result = np.full(count, np.nan, np.float32)
        exchange.allreduce(mine.astype(np.float32), result)
        outcomes = {
            "into another": np.array_equal(result, floats),
            "in place": np.array_equal(exchange.allreduce_(mine.astype(np.float32)), floats),
            "int64": np.array_equal(exchange.allreduce_(mine.astype(np.int64)), floats),
            "max": np.array_equal(exchange.allreduce_(mine.copy(), "max"), np.max(rows, axis=0)),
            "or": np.array_equal(exchange.allreduce_(mine.copy(), "or"), np.bitwise_or.reduce(rows)),
        }
        wrong += [(segment, what) for what, right in outcomes.items() if not right]
    exchange.close()
    assert not wrong


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_between_hosts_messages_are_short(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """What arrives is what MPI's own calls bring, in whatever pieces, and however late a rank comes."""
    monkeypatch.setattr(pieces, "PIECE", piece)
    plain, blocking = Exchange(comm), Exchange(comm)
    polling = plain.polling()
    assert (plain.comm.one_host, plain.comm.over_tcp) == (polling.comm.one_host, polling.comm.over_tcp)
    for each in (blocking, polling):
        assert isinstance(each.comm, Communicator)
        each.comm.over_tcp = True
    begun: list[int] = []
    begin = pieces.begin
    monkeypatch.setattr(pieces, "begin", lambda *args: (begun.append(1), begin(*args))[1])
    same, long = [], 0
    for turn in range(12):
        time.sleep(0.002 * ((comm.rank + turn) % 3))
        counts = shares(comm.size, turn % len(SHARES))
        starts = places(counts, orders(comm.size)[turn % 2])
        mine, rows = pattern(comm.rank, counts[comm.rank]), pattern(100 + comm.rank, sum(counts))
        table = np.array([shares(comm.size, turn + rank) for rank in range(comm.size)])
        routed = pattern(200 + comm.rank, int(table[comm.rank].sum()))
        numbers = pattern(300 + comm.rank, 9 * turn).astype(np.float32)
        arrived = [
            [
                each.allgatherv(mine, counts, starts), each.alltoallv(rows, counts, starts), each.route(routed, table),
                each.allreduce_(numbers.copy()), each.allreduce_(numbers.copy(), "max"),
            ]
            for each in (plain, blocking, polling)
        ]  # fmt: skip
        same += [all(map(np.array_equal, arrived[0], others)) for others in arrived[1:]]
        long += 2 + int(table.max() > 0)  # in flight, whatever their length
        long += 2 * (max(counts) > piece) + int(table.max() > piece) + 2 * (numbers.nbytes > piece)
    for each in (polling, blocking, plain):
        each.close()
    assert all(same)
    assert len(begun) == long


@pytest.mark.parametrize("adapters", [[], ["mlx5_0"]], ids=["none", "one"])
def test_a_fabric_takes_long_messages(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, adapters: list[str]
) -> None:
    """If the last rank's host has one; on one host nothing goes over TCP."""
    for name in adapters if comm.rank == comm.size - 1 else []:
        (tmp_path / name).touch()
    monkeypatch.setattr(mpi, "FABRICS", (str(tmp_path), str(tmp_path / "missing")))
    for ranks_here in (1, comm.size):
        monkeypatch.setattr(mpi, "_on_this_host", lambda comm, ranks_here=ranks_here: (0, ranks_here))
        exchange = Exchange(comm)
        assert exchange.comm.over_tcp == (ranks_here < comm.size and not adapters)
        exchange.close()


@pytest.mark.parametrize("add", [1e38, np.inf, np.nan])
def test_a_sum_between_hosts_may_overflow(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, add: float) -> None:
    monkeypatch.setattr(pieces, "PIECE", 8)
    exchange = Exchange(comm)
    polling = exchange.polling()
    monkeypatch.setattr(polling.comm, "over_tcp", True)
    values = np.arange(11, dtype=np.float32)
    values[comm.rank] += np.float32(add)
    expected = np.sum(exchange.allgather(values), axis=0, dtype=np.float32)
    total = polling.allreduce_(values)
    polling.close()
    exchange.close()
    assert np.array_equal(total, expected, equal_nan=True)


def test_an_allreduce_on_one_host_goes_in_rounds(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers in several calls; in flight, where each call would end with a sleep, in one."""
    mine = np.arange(1000, dtype=np.float32) + comm.rank
    expected = comm.size * np.arange(1000, dtype=np.float32) + sum(range(comm.size))
    exchange = Exchange(comm)
    polling = exchange.polling()
    seen = []
    for each, most in ((exchange, exchange.round_nbytes), (polling, polling.round_nbytes)):
        calls: list[str] = []
        call = each._call
        monkeypatch.setattr(
            each, "_call", lambda name, *a, _call=call, _calls=calls, **o: (_calls.append(name), _call(name, *a, **o))
        )
        each.round_nbytes = 1200 if most < each.segment_nbytes else most
        seen.append((np.array_equal(each.allreduce_(mine.copy()), expected), len(calls)))
    hosts = comm.Split_type(MPI.COMM_TYPE_SHARED)
    shared = hosts.Get_size() == comm.size
    hosts.Free()
    polling.close()
    exchange.close()
    assert seen == [(True, 4 if shared else 1), (True, 1)]


@pytest.mark.parametrize("count", [0, 1, 25, 130])
def test_broadcast(comm: MPI.Intracomm, count: int) -> None:
    wrong = []
    exchange = Exchange(comm)
    for root in (0, comm.size - 1):
        for segment in [1 << 30, *SEGMENTS]:
            exchange.segment_nbytes = segment
            data = pattern(comm.rank, count)
            exchange.broadcast_(data, root=root)
            if not np.array_equal(data, pattern(root, count)):
                wrong.append((root, segment))
    exchange.close()
    assert not wrong


def test_texts_and_means(comm: MPI.Intracomm) -> None:
    exchange = Exchange(comm, segment_nbytes=3)
    texts = exchange.gather_texts("ü" * comm.rank)
    mean = exchange.mean(0.1 * comm.rank)
    exchange.close()
    assert texts == ["ü" * rank for rank in range(comm.size)]
    assert mean == sum(0.1 * rank for rank in range(comm.size)) / comm.size


def small() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))


def loss_of(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    return model(torch.randn(8, 20, generator=generator)).square().mean()


def train(rank: int, **options: Any) -> tuple[bytes, list[tuple[int, int]]]:
    """Train five steps; returns the final state and the byte counts."""
    model = small()
    sync = mpisparse.GradientSync(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    counted = []
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, seeded(rank, step)).backward()
        sync.step()
        optimizer.step()
        counted.append((sync.stats.bytes_sent, sync.stats.bytes_received))
    sync.close()
    return bits([*model.parameters(), sync.residual]), counted


@both_paths
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_run_in_small_segments_is_bitwise_the_run_in_one(comm: MPI.Intracomm, path: str, codec: str) -> None:
    options = {"density": 0.1, "accumulate": path, "codec": codec}
    whole = train(comm.rank, **options)
    assert train(comm.rank, segment_nbytes=64, **options) == whole


# Bytes


def test_the_bytes_of_one_step(comm: MPI.Intracomm) -> None:
    """All 785 elements are sent, so the bytes are known; what a rank sends to itself does not count."""
    model = small()
    n, others = 785, comm.size - 1
    sync = mpisparse.GradientSync(model, density=1.0, accumulate="backward")
    loss_of(model, seeded(comm.rank, 0)).backward()
    sync.step()
    borders = sync.stats.borders
    lengths = np.diff(borders).tolist()
    mine = lengths[comm.rank]  # in the first step partition r is rank r's
    header = others * (9 * 8 + 256 + 2 * 8)  # the roll call with status, k, room for counts and so on; then status, detail
    rows = [1 + -(-length // 8) for length in lengths]  # one bit says that there is no gap before an element
    indices = sum(rows) - rows[comm.rank]
    values = others * 4 * mine  # the others' values of my partition
    means = 4 * (n - mine)  # the others' partitions, summed
    assert sum(lengths) == n
    assert sync.stats.bytes_received == header + indices + values + means
    assert (sync.stats.control_bytes, sync.stats.index_bytes) == (header, indices)
    assert sync.stats.index_form == ("padded" if others else "")
    sent = header + others * rows[comm.rank] + 4 * (n - mine) + others * 4 * mine
    assert sync.stats.bytes_sent == sent
    sync.close()


def test_the_bytes_of_a_dense_step(comm: MPI.Intracomm) -> None:
    """An all-reduce moves at least 2 (P - 1) / P of the vector; a status is gathered before and after accumulation."""
    model = small()
    sync = mpisparse.GradientSync(model, scheme="dense")
    loss_of(model, seeded(comm.rank, 0)).backward()
    sync.step()
    expected = 2 * 4 * 785 * (comm.size - 1) // comm.size + (comm.size - 1) * (9 + 2) * 8
    assert sync.stats.bytes_received == expected
    assert sync.stats.bytes_sent == expected
    sync.close()


def test_what_is_sent_is_received(comm: MPI.Intracomm) -> None:
    _, counted = train(comm.rank, density=0.1, codec="int8")
    for sent, received in counted:
        assert comm.allreduce(sent) == comm.allreduce(received)
        assert (comm.allreduce(sent) > 0) == (comm.size > 1)


# Other communicators


@both_paths
def test_a_part_of_the_ranks(comm: MPI.Intracomm, path: str) -> None:
    """Even and odd ranks train separately, each group as if there were no others."""
    part = comm.Split(comm.rank % 2, comm.rank)
    model = small()
    sync = mpisparse.GradientSync(model, density=0.1, accumulate=path, comm=part)
    assert (sync.rank, sync.size) == (part.rank, part.size)

    def own(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
        return loss_of(model, generator) * (1 + comm.rank % 2)

    train_lawfully(part, model, sync, torch.optim.SGD(model.parameters(), lr=0.1), own)
    all_trained = comm.allgather(bits(model.parameters()))
    part.Free()
    assert len(set(all_trained)) == min(2, comm.size)


@both_paths
def test_each_rank_alone(comm: MPI.Intracomm, path: str) -> None:
    model = small()
    sync = mpisparse.GradientSync(model, density=0.1, accumulate=path, comm=MPI.COMM_SELF)
    assert sync.size == 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in lawful_steps(
        MPI.COMM_SELF, model, sync, optimizer, lambda m, _: loss_of(m, seeded(comm.rank, step_of(sync)))
    ):
        assert sync.stats.step == step
        assert sync.stats.bytes_received == 0
    assert len(set(comm.allgather(bits(model.parameters())))) == comm.size


def step_of(sync: mpisparse.GradientSync) -> int:
    return int(sync.state_dict()["step.step"])


def test_the_users_communicator_is_left_to_the_user(comm: MPI.Intracomm) -> None:
    """The user's messages on the same communicator never mix with those of a step, and close() frees only ours."""
    own = comm.Dup()
    model = small()
    sync = mpisparse.GradientSync(model, density=0.1, comm=own)
    request = own.irecv(source=(comm.rank - 1) % comm.size, tag=0)
    loss_of(model, seeded(comm.rank, 0)).backward()
    sync.step()
    own.send("after the step", dest=(comm.rank + 1) % comm.size, tag=0)
    assert request.wait() == "after the step"
    sync.close()
    assert own.allreduce(1) == comm.size
    own.Free()


# The way of more than 16 ranks, taken by few


@both_paths
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_the_way_of_many_ranks_keeps_the_laws(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, path: str, codec: str
) -> None:
    monkeypatch.setattr(search, "GATHERED_RANKS", 0)
    model = small()
    sync = mpisparse.GradientSync(model, density=0.1, accumulate=path, codec=codec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in lawful_steps(comm, model, sync, optimizer, loss_of, 8):
        stats = sync.stats
        assert stats.selected == sum(stats.workloads)
        assert int(published(model).count_nonzero()) <= stats.selected
        assert stats.borders[0] == 0
        assert stats.borders[-1] == 785
        assert list(stats.borders) == sorted(stats.borders)
        if step >= 2:
            assert abs(stats.selected - sync.k) <= max(2, 0.05 * sync.k), (step, stats.selected)


def test_the_way_of_many_ranks_chooses_the_same(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """If borders do not depend on it, gathering or summing the ladders selects the same elements."""
    usual, _ = train(comm.rank, density=0.1, accumulate="backward")
    monkeypatch.setattr(search, "GATHERED_RANKS", 0)
    summed, _ = train(comm.rank, density=0.1, accumulate="backward")
    assert usual == summed


def test_many_ranks_are_balanced_by_their_sums(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """All large values lie in a tenth of the vector, another one in each step: only borders drawn in the step can follow."""
    monkeypatch.setattr(search, "GATHERED_RANKS", 0)
    n, worst = 20_000, []
    source = Wandering(n, comm.size)
    model = GivenModel.of(source, comm.rank)
    sync = mpisparse.GradientSync(model, density=0.01, compensate=False)
    for _ in range(8):
        model.zero_grad()
        model.backward()
        sync.step()
        worst.append(sync.stats.imbalance)
    sync.close()
    assert np.mean(worst[2:]) < 0.35, worst  # 60 to 200 elements a rank, so that lots make it a little uneven


class Wandering:
    """Gradients of noise, a thousand times larger in a tenth of the vector that changes with every step."""

    steps = 10

    def __init__(self, n: int, ranks: int) -> None:
        self.sizes = [n]
        self.ranks = ranks

    def gradient(self, rank: int, step: int) -> NDArray[np.float32]:
        noise = np.random.default_rng([rank, step]).standard_normal(self.sizes[0]).astype(np.float32)
        tenth = self.sizes[0] // 10
        place = 7 * step % 10 * tenth
        noise[place : place + tenth] *= 1000
        return noise


def test_many_ranks_refuse_together_too(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "GATHERED_RANKS", 0)
    model = small()
    sync = mpisparse.GradientSync(model, density=0.1)
    loss = loss_of(model, seeded(comm.rank, 0))
    (loss * float("nan") if comm.rank == comm.size - 1 else loss).backward()
    with pytest.raises(
        mpisparse.NonFiniteGradientError, match=f"rank {comm.size - 1} has a non-finite gradient in 0.weight"
    ):
        sync.step()
    sync.close()
