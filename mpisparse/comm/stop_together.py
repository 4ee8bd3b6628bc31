"""Stopping on all ranks at the same step, when a signal or the time limit of the Slurm job asks any of them to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from mpisparse.comm import ranks
from mpisparse.comm.exchange import Exchange
from mpisparse.comm.roll_call import answer_at_exit, meet, newest_of
from mpisparse.errors import ConfigurationError
from mpisparse.stopping import Deadline, StopRequest, end_time

STOP_BEFORE = 60.0  # seconds before the time limit of a Slurm job


class Listener:
    """Records requests to stop. It takes over the signals for the rest of the process."""

    def __init__(self) -> None:
        self.request = StopRequest()
        self.deadline: Deadline | None = None
        self.watches = False  # whether it is this rank that watches the clock
        self.world: Exchange | None = None

    def asked(self, rank: int, stop_before: float) -> bool:
        """Whether this rank was asked to stop, or watches the clock and the time has come; local.

        Call it once per step: the time between calls is taken as the length of a step.
        """
        watches = rank == 0 and stop_before > 0
        if self.deadline is None or watches > self.watches:  # rank 0 has died, and this rank has its number now
            self.watches, self.deadline = watches, Deadline(end_time() if watches else None, stop_before)
        near = self.deadline.near()
        return (near and stop_before > 0) or self.request.asked

    def among_all(self) -> Exchange:
        """An exchange of all MPI ranks: training's own, so that an error names a rank that calls alone; collective."""
        training = newest_of(ranks.size(), other_than=self.world)
        if training is not None:
            return training
        if self.world is None:
            self.world = Exchange()
            answer_at_exit(self.world)
        return self.world

    @property
    def why(self) -> str:
        """The reason why this rank stops."""
        late = self.deadline is not None and self.deadline.reached
        return "the job's time limit is near" if late else "asked to stop"


_listener: Listener | None = None
_joins = 0  # how many blocks of join() this process is in


@contextlib.contextmanager
def only_of_a_sync() -> Iterator[None]:
    """Inside the block, refuse should_stop() of all MPI ranks, which ranks without more batches would not answer; local."""
    global _joins
    _joins += 1
    try:
        yield
    finally:
        _joins -= 1


def listen() -> Listener:
    """Start to listen for signals, once per process; local."""
    global _listener
    if _listener is None:
        _listener = Listener()
    return _listener


def agree(exchange: Exchange, flags: Sequence[bool]) -> list[bool]:
    """For each flag, whether it is set on any rank; collective, one message of 72 bytes. At most 7 flags."""
    rows = meet(exchange, "should_stop", *map(int, flags))
    return [bool(rows[:, i].any()) for i in range(len(flags))]


def should_stop(sync: Any = None, *, stop_before: float = STOP_BEFORE) -> bool:
    """Agree whether any rank was asked to stop: by SIGUSR1, SIGTERM, or the end of its Slurm job. Collective.

    Call it once per step, on every rank; it costs one message of 72 bytes. The first call takes over the signals that
    MPISPARSE_SIGNALS names (USR1,TERM), so make it before long preparations; a second signal ends the process at once.
    sync: the GradientSync whose ranks agree, needed inside sync.join(); None: all ranks of MPI, through the newest
    GradientSync that has them all, whose timeout then applies to this wait, too. stop_before: seconds before the job's time
    limit; 0: do not watch the clock. When it returns True, save a checkpoint and leave with exit code 85, on which scripts
    of `mpisparse slurm` requeue the job.
    """
    listener = listen()
    if sync is not None:
        exchange: Exchange = sync._exchange
    elif _joins:
        raise ConfigurationError(
            "should_stop() inside join() would wait for ranks that have no more batches; pass the GradientSync: "
            "should_stop(sync)"
        )
    else:
        exchange = listener.among_all()
    return agree(exchange, [listener.asked(exchange.rank, stop_before)])[0]
