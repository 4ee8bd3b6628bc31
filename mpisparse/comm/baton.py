"""The baton of virtual workers: threads of one process of which only one runs at a time, until it waits for others."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Generators = tuple[torch.Tensor, tuple[Any, ...]]


def generators() -> Generators:
    """Return the states of the default generators of torch and of Python's `random`."""
    return torch.get_rng_state(), random.getstate()


def set_generators(states: Generators) -> None:
    """Restore the states of the default generators."""
    torch.set_rng_state(states[0])
    random.setstate(states[1])


class Ended(BaseException):
    """Another worker failed. Not an Exception, so that no worker catches it by accident."""


@dataclass
class Meeting:
    """A collective call that only some members of a communicator have reached."""

    call: str
    given: dict[int, Any] = field(default_factory=dict)
    taken: Any = None


class World:
    """The baton, and the calls that workers wait in. Only the worker with the baton touches it."""

    def __init__(self, size: int) -> None:
        self.gates = [threading.Semaphore(0) for _ in range(size)]
        self.waits: list[str | None] = [None] * size
        self.left: set[int] = set()
        self.meetings: dict[tuple[Any, ...], Meeting] = {}
        self.error: BaseException | None = None

    def meet(
        self,
        where: tuple[Any, ...],
        members: Sequence[int],
        me: int,
        call: str,
        given: Any,
        work: Callable[[list[Any]], Any],
    ) -> Any:
        """Make a collective call; return what work(given by each member, in rank order) returned."""
        self._check()
        meeting = self.meetings.setdefault(where, Meeting(call))
        if meeting.call != call:
            raise RuntimeError(
                f"r{members.index(me)} | this worker calls {call} where rank {members.index(min(meeting.given))} called "
                f"{meeting.call}: all ranks must make the same calls in the same order"
            )
        meeting.given[me] = given
        if len(meeting.given) == len(members):
            del self.meetings[where]
            meeting.taken = work([meeting.given[member] for member in members])
            for member in members:
                self.waits[member] = None
            return meeting.taken
        self.waits[me] = call
        own = generators()
        self._hand_over(me)
        self.wait_for_turn(me)
        set_generators(own)
        return meeting.taken

    def wait_for_turn(self, me: int) -> None:
        """Wait for the baton."""
        self.gates[me].acquire()
        self._check()

    def leave(self, me: int) -> None:
        """This worker is done."""
        self.left.add(me)
        if len(self.left) < len(self.gates):
            self._hand_over(me)

    def fail(self, error: BaseException) -> None:
        """Keep the first error and wake all workers, which then end."""
        self.error = self.error or error
        for gate in self.gates:
            gate.release()

    def _check(self) -> None:
        if self.error is not None:
            raise Ended

    def _hand_over(self, me: int) -> None:
        """Pass the baton to the next worker that can go on."""
        size = len(self.gates)
        for rank in ((me + step) % size for step in range(1, size)):
            if rank not in self.left and self.waits[rank] is None:
                self.gates[rank].release()
                return
        doing = ["has returned" if r in self.left else f"waits in {call}" for r, call in enumerate(self.waits)]
        raise RuntimeError(
            "virtual workers wait for each other for ever: " + "; ".join(f"rank {r} {what}" for r, what in enumerate(doing))
        )
