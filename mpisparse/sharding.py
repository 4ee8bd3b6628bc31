"""shard: each rank's own part of a data set or of a loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar, overload

import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
)

from mpisparse.comm.ranks import Standing, standing
from mpisparse.errors import ConfigurationError

T = TypeVar("T")
KEPT = (  # what a new loader takes over
    "batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn",
    "multiprocessing_context", "generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip
INSTEAD = "build the loader of a part: DataLoader(mpisparse.shard(dataset), ...)"


@overload
def shard(data: DataLoader[T], *, drop_last: bool = ..., seed: int = ..., comm: Any = ...) -> DataLoader[T]: ...
@overload
def shard(data: Dataset[T], *, drop_last: bool = ..., seed: int = ..., comm: Any = ...) -> Dataset[T]: ...


def shard(data: Any, *, drop_last: bool = False, seed: int = 0, comm: Any = None) -> Any:
    """Return this rank's part of a data set, or the same loader of that part; local.

    All ranks get the same number of examples, as with torch's DistributedSampler: the first ones are repeated where the
    number of ranks does not divide them, or with drop_last the last ones are left out. A part of a data set has every
    n-th example, in order. A loader gets a DistributedSampler, which shuffles if the loader did: call
    loader.sampler.set_epoch(epoch) before each epoch. seed: of the shuffling, the same on all ranks. An iterable data set is
    read whole by every rank, which keeps every n-th example; it must give all ranks the same ones in the same order.
    comm: an MPI communicator or a process group, if not all ranks take part.
    """
    here = standing() if comm is None else _standing_in(comm)
    if isinstance(data, DataLoader):
        return _shard_loader(data, here, drop_last=drop_last, seed=seed)
    if isinstance(data, IterableDataset):
        return StreamShard(data, here, drop_last=drop_last)
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise ConfigurationError(
            f"shard expects a torch Dataset or DataLoader, got {type(data).__name__}; give each rank every "
            f"n-th part yourself, by mpisparse.rank() and mpisparse.size()"
        )
    _check_enough(data, here, drop_last=drop_last)
    return Subset(data, list(_sampler(data, here, shuffle=False, drop_last=drop_last, seed=seed)))


def _standing_in(comm: Any) -> Standing:
    if isinstance(comm, dist.ProcessGroup):
        return Standing(dist.get_rank(comm), dist.get_world_size(comm))
    return Standing(comm.Get_rank(), comm.Get_size())


def _check_enough(data: Any, here: Standing, *, drop_last: bool) -> None:
    """Raise ConfigurationError if a rank would have no example."""
    if len(data) == 0 or (drop_last and len(data) < here.size):
        hint = "; pass drop_last=False to repeat some" if len(data) else ""
        raise ConfigurationError(f"the data set has {len(data)} examples for {here.size} ranks{hint}")


def _sampler(data: Any, here: Standing, *, shuffle: bool, drop_last: bool, seed: int) -> DistributedSampler[Any]:
    return DistributedSampler(data, here.size, here.rank, shuffle=shuffle, seed=seed, drop_last=drop_last)


def _shard_loader(loader: DataLoader[T], here: Standing, *, drop_last: bool, seed: int) -> DataLoader[T]:
    """The same loader of this rank's part."""
    if type(loader) is not DataLoader:
        raise ConfigurationError(f"shard cannot rebuild a {type(loader).__name__}; {INSTEAD}")
    options = {name: getattr(loader, name) for name in KEPT if hasattr(loader, name)}
    if loader.num_workers == 0:
        options["prefetch_factor"] = None
    if isinstance(loader.dataset, IterableDataset):
        stream: Any = StreamShard(loader.dataset, here, drop_last=drop_last)
        return DataLoader(stream, **options)
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        raise ConfigurationError(
            f"the loader has a batch sampler of its own ({type(loader.batch_sampler).__name__}), whose batches shard cannot "
            f"share out; {INSTEAD}"
        )
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):
        if (sampler.num_replicas, sampler.rank) == (here.size, here.rank):
            return loader
        raise ConfigurationError(
            f"the loader has a DistributedSampler for rank {sampler.rank} of {sampler.num_replicas}, and this is rank "
            f"{here.rank} of {here.size}; pass num_replicas=mpisparse.size(), rank=mpisparse.rank() to it"
        )
    _check_enough(loader.dataset, here, drop_last=drop_last)
    shuffle = _shuffles(sampler, len(loader.dataset))  # type: ignore[arg-type]
    ours = _sampler(loader.dataset, here, shuffle=shuffle, drop_last=drop_last, seed=seed)
    return DataLoader(loader.dataset, sampler=ours, **options)


def _shuffles(sampler: Sampler[Any] | Any, count: int) -> bool:
    """Tell whether a loader shuffles; raise ConfigurationError if its order is neither random nor that of the data set."""
    if type(sampler) is SequentialSampler:
        return False
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == count:
        return True
    raise ConfigurationError(
        f"the loader draws by a {type(sampler).__name__} of its own, which shard cannot share out; {INSTEAD} with a sampler "
        "for that part"
    )


class StreamShard(IterableDataset[T]):
    """Every n-th example of an iterable data set, the same number on every rank."""

    def __init__(self, data: IterableDataset[T], here: Standing, *, drop_last: bool) -> None:
        self.data, self.here, self.drop_last = data, here, drop_last

    def __getattr__(self, name: str) -> Any:
        """What the data set has besides, such as set_epoch."""
        if name in ("data", "here", "drop_last") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.data, name)

    def __len__(self) -> int:
        count = len(self.data)  # type: ignore[arg-type]
        return count // self.here.size if self.drop_last else -(-count // self.here.size)

    def __iter__(self) -> Iterator[T]:
        """Yield an example of each whole round; unless drop_last, repeat one of the first if the last round is not whole."""
        rank, size = self.here
        first: list[T] = []  # to repeat
        mine: T
        count = 0
        for example in self.data:
            if not self.drop_last and len(first) < size - 1:
                first.append(example)
            if count % size == rank:
                mine = example
            count += 1
            if count % size == 0:
                yield mine
        rest = count % size
        if rest and not self.drop_last:
            at = (rank - rest) % count  # as the sampler pads: from the beginning, again and again
            yield mine if rank < rest else first[at]
