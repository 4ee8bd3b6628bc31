"""Parts of data sets and loaders for each rank, as DistributedSampler shares them out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from mpisparse.comm import ranks
from mpisparse.errors import ConfigurationError
from mpisparse.sharding import shard


class Comm(NamedTuple):
    """A communicator that only knows who is in it."""

    rank: int
    size: int

    def Get_rank(self) -> int:  # noqa: N802
        return self.rank

    def Get_size(self) -> int:  # noqa: N802
        return self.size


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return index


class Stream(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))

    def __len__(self) -> int:
        return self.count

    def set_epoch(self, epoch: int) -> str:
        return f"epoch {epoch}"


def parts(make: Any, size: int, **options: Any) -> list[list[int]]:
    return [[int(x) for x in shard(make(), comm=Comm(rank, size), **options)] for rank in range(size)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [4, 7, 9, 12])
def test_the_parts_are_those_of_the_sampler(count: int, size: int, drop_last: bool) -> None:
    expected = [
        list(DistributedSampler(Numbers(count), size, rank, shuffle=False, drop_last=drop_last)) for rank in range(size)
    ]
    assert parts(lambda: Numbers(count), size, drop_last=drop_last) == expected
    assert parts(lambda: Stream(count), size, drop_last=drop_last) == expected
    assert parts(lambda: DataLoader(Numbers(count), batch_size=None), size, drop_last=drop_last) == expected
    lengths = [len(shard(Stream(count), comm=Comm(rank, size), drop_last=drop_last)) for rank in range(size)]  # type: ignore[arg-type]
    assert lengths == [len(part) for part in expected]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_fewer_examples_than_ranks(count: int) -> None:
    assert parts(lambda: Stream(count), 4) == ([[]] * 4 if not count else [[rank % count] for rank in range(4)])
    assert parts(lambda: Stream(count), 4, drop_last=True) == [[]] * 4
    with pytest.raises(ConfigurationError, match=f"has {count} examples for 4 ranks"):
        shard(Numbers(count), comm=Comm(0, 4), drop_last=True)
    if count:
        assert parts(lambda: Numbers(count), 4) == [[rank % count] for rank in range(4)]
    else:
        with pytest.raises(ConfigurationError, match="has 0 examples"):
            shard(Numbers(0), comm=Comm(0, 4))


def test_a_loader_keeps_its_settings_and_its_shuffling() -> None:
    generator = torch.Generator().manual_seed(3)
    made = DataLoader(
        Numbers(10), batch_size=2, shuffle=True, drop_last=True, collate_fn=list, generator=generator, timeout=0,
        num_workers=2, persistent_workers=True, prefetch_factor=3,
    )  # fmt: skip
    ours = shard(made, comm=Comm(1, 2), seed=5)
    assert ours.dataset is made.dataset
    assert (ours.batch_size, ours.drop_last, ours.num_workers, ours.prefetch_factor) == (2, True, 2, 3)
    assert ours.collate_fn is list
    assert ours.generator is generator
    assert ours.persistent_workers
    assert isinstance(ours.sampler, DistributedSampler)
    assert (ours.sampler.num_replicas, ours.sampler.rank, ours.sampler.shuffle, ours.sampler.seed) == (2, 1, True, 5)
    both = [list(shard(DataLoader(Numbers(10), shuffle=True), comm=Comm(rank, 2)).sampler) for rank in range(2)]
    assert sorted(both[0] + both[1]) == list(range(10))
    first = list(ours.sampler)
    ours.sampler.set_epoch(1)
    assert list(ours.sampler) != first
    assert not shard(DataLoader(Numbers(10)), comm=Comm(0, 2)).sampler.shuffle  # type: ignore[attr-defined]


def test_a_loader_of_a_stream() -> None:
    batches = [shard(DataLoader(Stream(8), batch_size=2), comm=Comm(rank, 2)) for rank in range(2)]
    assert [[batch.tolist() for batch in loader] for loader in batches] == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    assert batches[0].dataset.set_epoch(3) == "epoch 3"  # type: ignore[attr-defined]


def test_a_loader_that_is_sharded_already() -> None:
    data = Numbers(10)
    loader = DataLoader(data, sampler=DistributedSampler(data, 2, 1))
    assert shard(loader, comm=Comm(1, 2)) is loader
    with pytest.raises(ConfigurationError, match=r"rank 1 of 2, and this is rank 0 of 2; .*rank=mpisparse.rank\(\)"):
        shard(loader, comm=Comm(0, 2))


class Mine(BatchSampler):
    pass


class OwnLoader(DataLoader[int]):
    pass


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda data: DataLoader(data, batch_sampler=Mine(SequentialSampler(data), 2, False)), "a batch sampler of its own"),
        (lambda data: DataLoader(data, sampler=WeightedRandomSampler([1.0] * 10, 10)), "WeightedRandomSampler"),
        (lambda data: DataLoader(data, sampler=RandomSampler(data, replacement=True)), "RandomSampler"),
        (OwnLoader, "cannot rebuild a OwnLoader"),
        (lambda data: 3, "expects a torch Dataset or DataLoader, got int"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(make: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        shard(make(Numbers(10)), comm=Comm(0, 2))


def test_the_local_rank_is_the_innermost_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "PRTE_LAUNCHED", "MPI_LOCALNRANKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ranks, "standing", lambda: ranks.Standing(5, 8))
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_LOCALID", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "8")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1")
    assert ranks.local_rank() == 1
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE")
    assert ranks.local_rank() == 0
    monkeypatch.setattr(ranks, "standing", lambda: ranks.Standing(0, 1))
    assert ranks.local_rank() == 0


def test_a_launcher_that_started_more_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    ranks._in_mpi.cache_clear()
    with pytest.raises(ConfigurationError, match="sees 1 of them"):
        ranks.rank()
    with pytest.raises(ConfigurationError, match="sees 1 of them"):
        shard(Numbers(10))
    monkeypatch.delenv("WORLD_SIZE")
    assert (ranks.rank(), ranks.size()) == (0, 1)


def test_without_mpi_and_before_a_process_group_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks._in_mpi.cache_clear()
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "mpisparse.comm.mpi", raising=False)
    monkeypatch.delattr("mpisparse.comm.mpi", raising=False)
    for call in (ranks.rank, ranks.size, ranks.local_rank, lambda: shard(Numbers(9))):
        with pytest.raises(ConfigurationError, match="MPI cannot be used here"):
            call()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match=r"torch.distributed.init_process_group\(\) first"):
        ranks.rank()
