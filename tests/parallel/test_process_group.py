"""A process group of torch.distributed as transport, next to MPI: every collective, and what an exchange refuses."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mpisparse
from mpisparse import checkpoint
from mpisparse.comm.exchange import Exchange, PollingExchange, local_rank
from mpisparse.schemes import find_scheme
from tests.parallel.ranks import everywhere, loss_of, seeded, small

pytestmark = pytest.mark.mpi


def calls(exchange: Exchange) -> list[Any]:
    """Make every call of an exchange, with sizes that differ between ranks; return what arrived, and what was counted."""
    rank, size = exchange.rank, exchange.size
    counts = [(7 * r) % 5 for r in range(size)]
    starts = [3 + sum(counts[:r]) for r in range(size)]  # not from the start of the buffer
    plain = [start - 3 for start in starts]
    payload = np.arange(counts[rank], dtype=np.uint8) + 10 * rank
    whole = np.arange(sum(counts) + 3, dtype=np.uint8) + 50 * rank
    table = np.array([[(r + 2 * q) % 4 for q in range(size)] for r in range(size)])
    data = np.full(5, rank, dtype=np.uint8)
    exchange.broadcast_(data, root=size - 1)
    summed = [exchange.allreduce_(np.arange(6, dtype=kind) + rank) for kind in (np.int64, np.uint16, np.uint32, np.float32)]
    apart = np.zeros(4, dtype=np.float32)
    exchange.allreduce(np.full(4, rank + 1, dtype=np.float32), apart)
    return [
        exchange.allgather(np.array([rank, -5], dtype=np.int64)),
        exchange.allgatherv(payload, counts, plain),
        exchange.alltoallv(whole, counts, starts),
        exchange.alltoallv(whole, [0] * size, [0] * size),
        exchange.route(np.arange(table[rank].sum(), dtype=np.uint8), table),
        data, *summed, apart,
        exchange.allreduce_(np.array([rank, -rank]), "max"),
        exchange.allreduce_(np.array([1 << rank], dtype=np.uint8), "or"),
        exchange.gather_texts("a" * rank), exchange.mean(1.5 * rank),
        exchange.nbytes_sent, exchange.nbytes_received, exchange.nbytes_control,
    ]  # fmt: skip


@pytest.mark.parametrize("segment", [1 << 30, 4])
def test_every_collective(comm: MPI.Intracomm, group: dist.ProcessGroup, segment: int) -> None:
    found = []
    for over in (comm, group):
        exchange = Exchange(over, segment_nbytes=segment)
        other = exchange.polling()
        assert isinstance(other, PollingExchange)
        assert exchange.threaded == (over is group or MPI.Query_thread() == MPI.THREAD_MULTIPLE)
        found += [calls(exchange), calls(other)]
        other.close()
        exchange.close()
        exchange.close()
    for other_calls in found[1:]:
        for expected, got in zip(found[0], other_calls, strict=True):
            np.testing.assert_array_equal(expected, got)
    assert local_rank(comm) == local_rank(group)


@pytest.mark.parametrize("scheme", ["exdyna", "dense", "momentum"])
def test_the_same_bits_with_every_codec(comm: MPI.Intracomm, group: dist.ProcessGroup, scheme: str) -> None:
    codecs = list(find_scheme(scheme)().codecs())
    if scheme == "dense" and comm.size > 2:
        codecs.remove("fp32")  # the order of its sums is left to the transport
    assert len(codecs) > 5
    for codec in codecs:
        options: dict[str, Any] = {"scheme": scheme, "codec": codec, **({} if scheme == "dense" else {"density": 0.02})}
        pair = [mpisparse.aggregator(1003, comm=over, **options) for over in (comm, group)]
        same = True
        for step in range(4):
            vector = torch.randn(1003, generator=seeded(comm.rank, step))
            first, second = (one.step(vector) for one in pair)
            same &= torch.equal(first, second) and torch.equal(pair[0].residual, pair[1].residual)
            same &= bool(first.any())
        assert everywhere(comm, same), codec
        for one in pair:
            one.close()


def test_deliveries_in_flight(comm: MPI.Intracomm, group: dist.ProcessGroup) -> None:
    pair = [mpisparse.aggregator(2000, comm=over, density=0.05, staleness=1) for over in (comm, group)]
    same = True
    for step in range(6):
        vector = torch.randn(2000, generator=seeded(comm.rank, step))
        same &= torch.equal(*(one.step(vector) for one in pair))
    assert everywhere(comm, same)
    for one in pair:
        one.close()


def test_training_checkpoint_and_optimizer(comm: MPI.Intracomm, group: dist.ProcessGroup, directory: Any) -> None:
    """What a training loop calls besides step(): refusals on all ranks, checkpoints, OneBitAdamW."""
    model = small()
    sync = mpisparse.GradientSync(model, density=0.1, comm=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpisparse.attach(optimizer, sync)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, seeded(comm.rank, step)).backward()
        optimizer.step()
    checkpoint.save(directory / "run", step=3, model=model, optimizer=optimizer, sync=sync)
    kept = sync.residual.clone()
    sync.residual.zero_()
    assert checkpoint.load(directory / "run", model=model, optimizer=optimizer, sync=sync) == 3
    assert everywhere(comm, torch.equal(kept, sync.residual))
    optimizer.zero_grad()
    if comm.rank == 0:
        loss_of(model, seeded(comm.rank, 9)).backward()
    if comm.size > 1:
        with pytest.raises(mpisparse.GradientError, match="no new gradient on rank 1"):
            optimizer.step()
    sync.close()
    adam = mpisparse.optim.OneBitAdamW(model.parameters(), comm=group, warmup=2)
    for step in range(4):
        adam.zero_grad()
        loss_of(model, seeded(comm.rank, step)).backward()
        adam.step()
    total = torch.stack([p.detach().double().sum() for p in model.parameters()]).sum().item()
    assert len(set(comm.allgather(total))) == 1


@pytest.mark.mpi(min_size=2)
def test_part_of_the_ranks(comm: MPI.Intracomm, group: dist.ProcessGroup) -> None:
    """Groups of some ranks connect by themselves; others are refused."""
    members = list(range(comm.size - 1))
    part = dist.new_group(members)
    if comm.rank in members:
        one = mpisparse.aggregator(50, comm=part, scheme="dense")
        mean = one.step(torch.full((50,), float(comm.rank)))
        assert mean[0] == sum(members) / len(members)
        one.close()
    else:
        with pytest.raises(mpisparse.ConfigurationError, match="not a member of the process group"):
            mpisparse.aggregator(50, comm=part)
    whole = mpisparse.aggregator(50, comm=group, scheme="dense")  # the ranks now know different numbers of groups
    assert whole.step(torch.ones(50))[0] == 1
    whole.close()


def test_wrong_communicators(comm: MPI.Intracomm) -> None:
    with pytest.raises(mpisparse.ConfigurationError, match="process group, got str"):
        mpisparse.aggregator(50, comm="world")
    mesh = type("DeviceMesh", (), {"get_group": None})()
    with pytest.raises(mpisparse.ConfigurationError, match=r"mesh\.get_group\(name\)"):
        mpisparse.GradientSync(nn.Linear(2, 2), comm=mesh)


def test_torch_distributed_beside_mpi(comm: MPI.Intracomm, group: dist.ProcessGroup) -> None:
    """The same ranks in the same order, so that samplers and barriers go with the exchange over MPI."""
    assert (dist.get_rank(), dist.get_world_size()) == (comm.rank, comm.size)
    assert int(os.environ["RANK"]) == comm.rank
    assert int(os.environ["WORLD_SIZE"]) == comm.size
    assert int(os.environ["LOCAL_RANK"]) == local_rank()
    assert os.environ["MASTER_ADDR"]
    assert int(os.environ["MASTER_PORT"]) > 0
    with pytest.raises(mpisparse.ConfigurationError, match="initialised already"):
        mpisparse.init_torch_distributed()
    data = TensorDataset(torch.arange(4 * comm.size))
    seen = [int(x) for (x,) in DataLoader(data, sampler=DistributedSampler(data))]
    assert sorted(x for one in comm.allgather(seen) for x in one) == list(range(4 * comm.size))
    sync = mpisparse.GradientSync(nn.Linear(3, 1), density=0.5)  # over MPI, as WORLD_SIZE and MPI agree
    assert sync.size == comm.size
    if comm.rank == 0:
        time.sleep(0.2)
    dist.barrier()
    sync.close()
