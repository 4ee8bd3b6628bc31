"""Virtual workers: n ranks as threads of one process, of which only one runs at a time.

A worker runs until it waits for others in a collective call, then passes the baton to the next one that can go on. The
last to arrive does the work of the call for all. So a run is deterministic, and threads do not compete for the
interpreter's lock.

Sums are made in rank order; MPI is free to choose another one. The default generators of torch and of Python's `random` are
each worker's own. NumPy's global one is shared: to save and restore it at every turn would take 0.1 ms.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from mpisparse.arrays import Bytes
from mpisparse.comm.baton import Ended, World, generators, set_generators
from mpisparse.errors import ConfigurationError

Result = TypeVar("Result")
REDUCTIONS: dict[str, Callable[..., Any]] = {"sum": np.add, "max": np.maximum, "or": np.bitwise_or}


def run_virtual(n: int, work: Callable[[VirtualComm], Result]) -> list[Result]:
    """Call work(comm) in n threads, one for each rank of a virtual communicator; return their results in rank order.

    An error in one worker ends all, and is raised here. So is an error where MPI would wait for ever: if workers are in
    different calls, or one has returned while others wait for it.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ConfigurationError(f"expected a whole number of virtual workers >= 1, got {n!r}")
    before = generators()
    world = World(n)
    results: list[Any] = [None] * n
    threads = torch.get_num_threads()

    def live(rank: int) -> None:
        try:
            world.wait_for_turn(rank)
            torch.set_num_threads(threads)  # a thread has its own number
            set_generators(before)
            results[rank] = work(VirtualComm(world, (), tuple(range(n)), rank))
            world.leave(rank)
        except Ended:
            pass
        except BaseException as error:
            world.fail(error)

    workers = [
        threading.Thread(target=live, args=(r,), name=f"mpisparse-virtual-{r}", daemon=True) for r in range(n)
    ]  # fmt: skip
    try:
        for worker in workers:
            worker.start()
        world.gates[0].release()
        for worker in workers:
            worker.join()
    except BaseException as error:  # such as KeyboardInterrupt, which only the main thread gets
        world.fail(error)
        raise
    finally:
        set_generators(before)
    if world.error is not None:
        raise world.error
    return results


class Request:
    """A nonblocking call that is complete."""

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        return True

    def Wait(self) -> bool:  # noqa: N802 - mpi4py's name
        return True


def _at_once(call: Callable[..., None]) -> Callable[..., Request]:
    """The nonblocking form of a call: it returns when the call is complete."""

    def complete(*args: Any, **options: Any) -> Request:
        call(*args, **options)
        return Request()

    return complete


class VirtualComm:
    """A worker's communicator: the methods of mpi4py's that Exchange uses, on NumPy arrays."""

    ops: Mapping[str, str] = {name: name for name in REDUCTIONS}
    virtual = is_open = True
    ends_together = False
    one_host = over_tcp = False  # threads that take turns gain nothing by rounds
    threaded = False  # only one worker runs at a time
    cuda_aware = False
    mortal = "virtual workers are threads of one process, which end together"

    def __init__(self, world: World, where: tuple[Any, ...], members: tuple[int, ...], me: int) -> None:
        self._world, self._where, self._members, self._me = world, where, members, me
        self._children = 0
        self.rank = members.index(me)
        self.size = len(members)

    def Get_rank(self) -> int:  # noqa: N802
        return self.rank

    def Get_size(self) -> int:  # noqa: N802
        return self.size

    def Dup(self) -> VirtualComm:  # noqa: N802
        return VirtualComm(self._world, self._child(), self._members, self._me)

    def Split(self, color: int = 0, key: int = 0) -> VirtualComm:  # noqa: N802
        where = self._child()
        rows: list[tuple[int, int, int]] = self._meet("Split", (color, key, self._me), list)
        members = tuple(me for _, me in sorted((key, me) for other, key, me in rows if other == color))
        return VirtualComm(self._world, (*where, color), members, self._me)

    def Split_type(self, split_type: int, key: int = 0) -> VirtualComm:  # noqa: N802
        """All virtual workers share memory."""
        return self.Split(0, key)

    def lowest_here(self) -> int:
        """All virtual workers are on the same host."""
        return 0

    def Free(self) -> None:  # noqa: N802
        """Nothing to free."""

    def end_job(self, code: int) -> NoReturn:
        """End the process, and with it all workers."""
        os._exit(code)

    def Barrier(self) -> None:  # noqa: N802
        self._meet("Barrier", None, lambda given: None)

    def Bcast(self, buffer: Any, root: int = 0) -> None:  # noqa: N802
        self._meet("Bcast", _bytes_of(buffer)[0], lambda rows: _spread(rows, [rows[root]] * len(rows)))

    def Allgather(self, sent: Any, received: Any) -> None:  # noqa: N802
        self._meet("Allgather", (_bytes_of(sent)[0], _bytes_of(received)[0]), _gather)

    def Allgatherv(self, sent: Any, received: Any) -> None:  # noqa: N802
        self._meet("Allgatherv", (_bytes_of(sent)[0], *_bytes_of(received)), _gather_varied)

    def Alltoallv(self, sent: Any, received: Any) -> None:  # noqa: N802
        self._meet("Alltoallv", (_bytes_of(sent), _bytes_of(received)), _exchange)

    def Allreduce(self, sent: Any, received: Any, op: str = "sum") -> None:  # noqa: N802
        source = received if sent is None else sent  # None: in place
        self._meet(f"Allreduce of {op}", (source, received), lambda rows: _reduce(rows, REDUCTIONS[op]))

    Ibarrier, Ibcast = _at_once(Barrier), _at_once(Bcast)
    Iallgather, Iallgatherv = _at_once(Allgather), _at_once(Allgatherv)
    Ialltoallv, Iallreduce = _at_once(Alltoallv), _at_once(Allreduce)

    def _meet(self, call: str, given: Any, work: Callable[[list[Any]], Any]) -> Any:
        return self._world.meet(self._where, self._members, self._me, call, given, work)

    def _child(self) -> tuple[Any, ...]:
        """Name the next communicator made from this one, the same on all workers."""
        self._children += 1
        return (*self._where, self._children)


def _bytes_of(buffer: Any) -> tuple[Bytes, Sequence[int], Sequence[int]]:
    """Return a buffer of mpi4py's as bytes, with counts and starts; those are empty where the buffer has none."""
    array, *rest = buffer if isinstance(buffer, list | tuple) else [buffer]
    counts, starts = rest[0] if len(rest) > 1 else ((), ())
    return array.reshape(-1).view(np.uint8), counts, starts


def _copy(source: Bytes, target: Bytes) -> None:
    if len(source) != len(target):
        raise ValueError(f"a message of {len(source)} bytes where {len(target)} are expected")
    target[:] = source


def _spread(targets: Sequence[Bytes], sources: Sequence[Bytes]) -> None:
    for target, source in zip(targets, sources, strict=True):
        if target is not source:
            _copy(source, target)


def _gather(rows: list[tuple[Bytes, Bytes]]) -> None:
    whole = np.concatenate([sent for sent, _ in rows])
    for _, received in rows:
        _copy(whole, received)


def _gather_varied(rows: list[tuple[Bytes, Bytes, Sequence[int], Sequence[int]]]) -> None:
    for _, received, counts, starts in rows:
        for (sent, *_), count, start in zip(rows, counts, starts, strict=True):
            _copy(sent, received[start : start + count])


def _exchange(rows: list[tuple[Any, Any]]) -> None:
    for to, (_, (received, counts, starts)) in enumerate(rows):
        for ((sent, lengths, begins), _), count, start in zip(rows, counts, starts, strict=True):
            _copy(sent[begins[to] : begins[to] + lengths[to]], received[start : start + count])


def _reduce(rows: list[tuple[NDArray[Any], NDArray[Any]]], reduction: Callable[..., Any]) -> None:
    with np.errstate(over="ignore", invalid="ignore"):  # as in MPI
        total = rows[0][0].copy()
        for source, _ in rows[1:]:
            reduction(total, source, out=total)
    for _, received in rows:
        received[:] = total
