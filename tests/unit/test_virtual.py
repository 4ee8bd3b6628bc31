"""Virtual workers: they take turns, exchange what real ranks would, and never hang."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mpisparse
from mpisparse import checkpoint
from mpisparse.comm.exchange import Exchange
from mpisparse.comm.virtual import VirtualComm, run_virtual
from mpisparse.errors import ConfigurationError


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_results_come_in_rank_order(n: int) -> None:
    assert run_virtual(n, lambda comm: (comm.Get_rank(), comm.Get_size())) == [(rank, n) for rank in range(n)]


@pytest.mark.parametrize("n", [0, -1, True, 2.0])
def test_a_number_of_workers_that_cannot_be_is_refused(n: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"expected a whole number of virtual workers >= 1"):
        run_virtual(n, lambda comm: None)


def test_only_one_runs_at_a_time_in_a_fixed_order() -> None:
    turns: list[list[int]] = []
    for _ in range(2):
        seen: list[int] = []

        def work(comm: VirtualComm, seen: list[int] = seen) -> None:
            for _ in range(4):
                seen.append(comm.rank)
                comm.Barrier()

        run_virtual(3, work)
        turns.append(seen)
    assert turns[0] == turns[1] == [0, 1, 2, 2, 0, 1, 1, 2, 0, 0, 1, 2]


@pytest.mark.parametrize("segment", [1 << 30, 3])
@pytest.mark.parametrize("kind", ["plain", "polling"])
def test_exchange_works_as_on_real_ranks(kind: str, segment: int) -> None:
    def work(comm: VirtualComm) -> None:
        exchange = Exchange(comm, segment_nbytes=segment)
        assert not exchange.threaded
        if kind == "polling":
            exchange = exchange.polling()
        rank, size = exchange.rank, exchange.size
        rows = exchange.allgather(np.array([rank, 7], dtype=np.int64))
        assert rows.tolist() == [[r, 7] for r in range(size)]
        assert exchange.allreduce_(np.array([rank + 1, 2]), "sum").tolist() == [sum(range(size + 1)), 2 * size]
        assert exchange.allreduce_(np.array([rank]), "max").tolist() == [size - 1]
        assert exchange.allreduce_(np.array([1 << rank]), "or").tolist() == [(1 << size) - 1]
        source, result = np.full(5, rank, dtype=np.float32), np.empty(5, dtype=np.float32)
        exchange.allreduce(source, result)
        assert result.tolist() == [sum(range(size))] * 5
        assert source.tolist() == [rank] * 5
        counts = [2 * r for r in range(size)]
        starts = np.cumsum([0, *counts[:-1]]).tolist()
        payload = np.full(counts[rank], 10 + rank, dtype=np.uint8)
        assert exchange.allgatherv(payload, counts, starts).tolist() == [10 + r for r in range(size) for _ in range(2 * r)]
        sent = np.concatenate([np.full(counts[q], 16 * rank + q, dtype=np.uint8) for q in range(size)])
        assert exchange.alltoallv(sent, counts, starts).tolist() == [
            16 * r + rank for r in range(size) for _ in range(2 * rank)
        ]
        table = np.array([[r + 3 * q for q in range(size)] for r in range(size)])
        routed = np.concatenate([np.full(table[rank, q], 16 * rank + q, dtype=np.uint8) for q in range(size)])
        assert exchange.route(routed, table).tolist() == [16 * r + rank for r in range(size) for _ in range(table[r, rank])]
        data = np.full(4, rank, dtype=np.uint8)
        exchange.broadcast_(data, root=size - 1)
        assert data.tolist() == [size - 1] * 4
        assert exchange.gather_texts("x" * rank) == ["x" * r for r in range(size)]
        exchange.close()
        exchange.close()

    run_virtual(3, work)


def test_sums_are_made_in_rank_order() -> None:
    terms = np.array([1e8, -1e8, 1.0, 1e-3], dtype=np.float32)

    def work(comm: VirtualComm) -> float:
        return float(Exchange(comm).allreduce_(terms[comm.rank : comm.rank + 1].copy())[0])

    assert set(run_virtual(4, work)) == {float(((terms[0] + terms[1]) + terms[2]) + terms[3])}


def test_communicators_split() -> None:
    def work(comm: VirtualComm) -> tuple[int, int, list[int]]:
        part = comm.Split(comm.rank % 2, -comm.rank)
        rows = Exchange(part).allgather(np.array([comm.rank]))
        assert Exchange(comm.Split_type(0)).size == comm.size
        return part.rank, part.size, rows[:, 0].tolist()

    assert run_virtual(5, work) == [(2, 3, [4, 2, 0]), (1, 2, [3, 1]), (1, 3, [4, 2, 0]), (0, 2, [3, 1]), (0, 3, [4, 2, 0])]


def test_generators_are_each_workers_own() -> None:
    """What others draw changes nothing, and afterwards all is as before."""

    def work(comm: VirtualComm) -> list[float]:
        torch.manual_seed(comm.rank), random.seed(comm.rank)
        drawn = []
        for _ in range(3):
            comm.Barrier()
            drawn += [float(torch.rand(())), random.random()]
        return drawn

    torch.manual_seed(9), random.seed(9)
    expected = float(torch.rand(())), random.random()
    torch.manual_seed(9), random.seed(9)
    together = run_virtual(3, work)
    assert (float(torch.rand(())), random.random()) == expected
    for rank in range(3):
        torch.manual_seed(rank), random.seed(rank)
        assert together[rank] == [drawn for _ in range(3) for drawn in (float(torch.rand(())), random.random())]


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_error_ends_all_and_is_raised(bad: int) -> None:
    ended = []

    def work(comm: VirtualComm) -> None:
        try:
            comm.Barrier()
            if comm.rank == bad:
                raise KeyError("lost")
            for _ in range(3):
                comm.Barrier()
        except Exception:
            assert comm.rank == bad, "the end is nothing that workers catch"
            raise
        finally:
            ended.append(comm.rank)

    with pytest.raises(KeyError, match="lost"):
        run_virtual(3, work)
    assert sorted(ended) == [0, 1, 2]
    assert not [t for t in threading.enumerate() if t.name.startswith("mpisparse-virtual")]


def test_one_that_returns_early_is_told() -> None:
    with pytest.raises(RuntimeError, match="wait for each other for ever: rank 0 waits in Barrier; rank 1 has returned"):
        run_virtual(2, lambda comm: comm.Barrier() if comm.rank == 0 else None)


def test_different_calls_are_told() -> None:
    def work(comm: VirtualComm) -> None:
        comm.Barrier() if comm.rank == 0 else comm.Bcast(np.zeros(1))

    with pytest.raises(RuntimeError, match=r"r1 \| this worker calls Bcast where rank 0 called Barrier"):
        run_virtual(2, work)


def test_calls_of_different_communicators_are_told() -> None:
    def work(comm: VirtualComm) -> None:
        other = comm.Dup()
        (comm if comm.rank == 0 else other).Barrier()

    with pytest.raises(RuntimeError, match="wait for each other for ever: rank 0 waits in Barrier; rank 1 waits in Barrier"):
        run_virtual(2, work)


def test_a_message_of_another_size_is_told() -> None:
    with pytest.raises(ValueError, match="a message of 8 bytes where 16 are expected"):
        run_virtual(2, lambda comm: comm.Bcast(np.zeros(comm.rank + 1)))


def test_checkpoints_are_of_all_workers(tmp_path: Path) -> None:
    def begin(comm: VirtualComm) -> tuple[torch.nn.Module, mpisparse.GradientSync]:
        torch.manual_seed(3)
        model = torch.nn.Linear(20, 10)
        return model, mpisparse.GradientSync(model, comm=comm, density=0.1)

    def save(comm: VirtualComm) -> torch.Tensor:
        model, sync = begin(comm)
        model(torch.full((1, 20), 1.0 + comm.rank)).square().sum().backward()
        sync.step()
        checkpoint.save(tmp_path, step=1, model=model, sync=sync)
        sync.close()
        return sync.residual

    def load(comm: VirtualComm) -> torch.Tensor:
        model, sync = begin(comm)
        assert checkpoint.load(tmp_path, model=model, sync=sync) == 1
        sync.close()
        return sync.residual

    saved, loaded = run_virtual(3, save), run_virtual(3, load)
    assert all(torch.equal(a, b) and a.any() for a, b in zip(saved, loaded, strict=True))
    assert not torch.equal(saved[0], saved[1])
