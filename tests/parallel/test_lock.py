"""A run's lock on any number of ranks: all are refused together, and a signal to any rank ends the waiting of all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from mpi4py import MPI
from ranks import everywhere, raised

from mpisparse.comm.exchange import Exchange
from mpisparse.errors import ConfigurationError, LockError
from mpisparse.runtime.lock import RunLock, StoppedWaitingError, take

pytestmark = pytest.mark.mpi


class Asked:
    """A stand-in for StopRequest."""

    def __init__(self, asked: bool = False) -> None:
        self.asked = asked


@pytest.fixture
def exchange() -> Iterator[Exchange]:
    made = Exchange()
    yield made
    made.close()


def test_all_are_refused_together_and_rank_0_holds_it_for_all(
    comm: MPI.Intracomm, directory: Path, exchange: Exchange
) -> None:
    lock = take(directory, exchange, Asked(), wait=False)
    assert everywhere(comm, (lock is not None) == (comm.rank == 0))
    told = raised(comm, LockError, lambda: take(directory, exchange, Asked(), wait=False))
    assert "is in use by process" in told
    asked = Asked(comm.rank == comm.size - 1)
    told = raised(comm, StoppedWaitingError, lambda: take(directory, exchange, asked, wait=True))
    assert "asked to stop" in told
    if lock is not None:
        lock.release()
    comm.Barrier()
    again = take(directory, exchange, Asked(), wait=False)
    if again is not None:
        again.release()


def test_a_place_that_cannot_be_written_is_an_error_on_all(comm: MPI.Intracomm, directory: Path, exchange: Exchange) -> None:
    if comm.rank == 0:
        (directory / "file").touch()
    told = raised(comm, ConfigurationError, lambda: take(directory / "file", exchange, Asked(), wait=False))
    assert "cannot write to" in told


def test_a_dead_owner_is_followed(comm: MPI.Intracomm, directory: Path, exchange: Exchange) -> None:
    if comm.rank == 0:
        dead = RunLock(directory)
        dead.path.write_bytes(dead._text().replace(f'"start": {dead.me.start}'.encode(), b'"start": 1'))
    lock = take(directory, exchange, Asked(), wait=False)
    assert everywhere(comm, lock is None or "process" in lock.taken_from)
    if lock is not None:
        lock.release()
