"""The living ranks of an exchange go on when another has died: over Open MPI with ULFM (mpirun --with-ft ulfm).

A death is noticed in different calls on different ranks. So what ranks do together ends with an agreement on whether all
living ones have done it. If not, all make a communicator without the dead ranks and do it again. What is done together must
therefore change nothing before the agreement that a second attempt would find changed.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from mpisparse.comm.agreement import Refusal
from mpisparse.errors import CheckpointError, CollectiveError, ConfigurationError, GradientError

if TYPE_CHECKING:
    from mpisparse.comm.exchange import Exchange

T = TypeVar("T")
Carried = TypeVar("Carried")
Rebuild = Callable[[list[int]], Callable[[], float]]
LEAVING = 0.5  # seconds in which other ranks notice a death that this one has noticed
TOGETHER = (Refusal, CheckpointError, CollectiveError, ConfigurationError, GradientError)  # raised on all ranks alike


class Shrunk(NamedTuple):
    """What a rank is told after others have died.

    died: their numbers among the ranks of before. rank, size: of this rank, now. norm: of what they had not sent, as they
    told it last, which is lost unless there is a copy. step: the number of steps done. seconds: from noticing the death to
    going on. kept: the norm of the copies of it that others go on with.
    """

    died: tuple[int, ...]
    rank: int
    size: int
    norm: float
    step: int
    seconds: float
    kept: float = 0.0


def together(exchange: Exchange, attempt: Callable[[], T]) -> T:
    """Do what all ranks do together; again, among the living, if one dies meanwhile and the others are to go on."""
    survival: Survival | None = exchange.survival
    return attempt() if survival is None else survival.surely(attempt)


def lacking(exchange: Exchange) -> str:
    """Why the ranks of an exchange cannot go on without one that has died, and what to do; empty if they can. Local."""
    return exchange.comm.mortal


class Survival:
    """Recovers an exchange when a rank has died.

    rebuild: is told which ranks of before live, and makes ready to go on with the exchange's new rank and size; collective.
    It changes nothing yet: if a rank dies meanwhile it is called again. It returns what does the change, which is local
    and returns the norm of what was kept of the dead ranks. listeners: are told afterwards.
    carriers: the exchanges of threads, which are given up with this one and go on with it. quiet: waits until no thread is
    in a call of theirs.
    """

    def __init__(
        self, exchange: Exchange, rebuild: Rebuild, carriers: Sequence[Exchange] = (),
        quiet: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self.exchange = exchange
        self.rebuild = rebuild
        self.carriers = carriers
        self.quiet = quiet
        self.listeners: list[Callable[[Shrunk], object]] = []
        self.inside = False
        self.bereaved = False  # whether a rank has died
        self._died: list[Shrunk] = []  # not told yet
        for one in (exchange, *carriers):
            one.survival = self
        self.comm.end_alone()

    @property
    def comm(self) -> Any:
        """The communicator of comm/mpi.py, which can do more than other transports."""
        return self.exchange.comm

    def surely(self, attempt: Callable[[], T]) -> T:
        """Do what all ranks do together; again if one dies before all living ones have done it. Collective.

        Inside of another call it does no more than the attempt, and the outer one starts again.
        """
        if self.inside:
            return attempt()
        while True:
            result, error, fine = self._try(attempt)
            if self._ended(error) or self._agreed(fine):
                break
            self._recover()
        self._tell()
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def until_met(self, attempt: Callable[[bool], T]) -> T:
        """Do the first part of what all ranks do together; surely() does the rest, and agrees. Collective.

        The attempt is told whether it is another one. If that part is refused, it ends here, with an agreement.
        """
        again = False
        while True:
            result, error, fine = self._try(lambda: attempt(again))  # noqa: B023 - called at once
            if fine and error is None:
                return result  # type: ignore[return-value]
            if self._ended(error) or self._agreed(fine):
                assert error is not None
                raise error
            self._recover()
            again = True

    def leave(self, attempt: Callable[[], object]) -> None:
        """Do what a rank does that ends. If ranks that go on have noticed a death they wait for this one: it dies, too."""
        died = self.bereaved
        try:
            attempt()
        except Exception as error:
            if not self.comm.tells_of_death(error):
                raise
            died = True
            time.sleep(LEAVING)
            if self.comm.Is_revoked():
                self.comm.end_this_rank()
        if died:
            self.comm.leave_without_finalize()

    def carrying(self, carry: Callable[[Carried], T]) -> Callable[[Carried], T]:
        """What carries deliveries in a thread: when it notices a death, all ranks give up what they wait for."""

        def carried(outgoing: Carried) -> T:
            try:
                return carry(outgoing)
            except Exception as error:
                if not isinstance(error, TOGETHER) and self.comm.tells_of_death(error):
                    self.give_up()
                raise

        return carried

    def give_up(self) -> None:
        """Have all calls fail that are going on, in all threads of all ranks; local, from any thread."""
        for exchange in (self.exchange, *self.carriers):
            exchange.comm.revoke()  # type: ignore[attr-defined]  # comm/mpi.py's

    def _try(self, attempt: Callable[[], T]) -> tuple[T | None, Exception | None, bool]:
        """What an attempt returns, what all ranks raised in it, and whether nobody was missed; collective."""
        self.inside = True
        try:
            return attempt(), None, True
        except TOGETHER as error:
            return None, error, True
        except Exception as error:
            if not self.comm.tells_of_death(error):
                raise
            return None, None, False
        finally:
            self.inside = False

    def _ended(self, error: Exception | None) -> bool:
        """Whether all ranks raise this because one has left the program, which would not agree on anything; local."""
        return error is not None and bool(self.exchange.gone)

    def _agreed(self, fine: bool) -> bool:
        """Agree on whether all living ranks have done it and none has died; collective. If this one has not, others stop."""
        exchange = self.exchange
        if not fine:
            self.give_up()
        exchange.spot.wait = "Agree", time.monotonic(), get_ident()
        try:
            return bool(self.comm.agreed(fine))
        finally:
            exchange.spot.wait = None

    def _recover(self) -> None:
        """Go on among the living; collective."""
        began, exchange = time.monotonic(), self.exchange
        old, told = exchange.size, exchange.norms
        living = list(range(old))
        fine = False
        while not fine:
            self.give_up()
            self.quiet()
            comm, rest = self.comm.shrunk()
            living = [living[rank] for rank in rest]
            exchange.adopt(comm)
            exchange.norms = told[living] if len(told) == old else told
            finish, error, fine = self._try(lambda: self._rebuilt(living))  # noqa: B023 - called at once
            if error is not None:
                raise error
            fine = self._agreed(fine)
        assert finish is not None
        kept = finish()
        died = tuple(rank for rank in range(old) if rank not in living)
        norm = 0.0
        if len(told) == old:
            norm = float(np.linalg.norm(np.ascontiguousarray(told[list(died)]).view(np.float64)))
        if died:
            self.bereaved = True
            done = Shrunk(died, exchange.rank, exchange.size, norm, exchange.place.steps, time.monotonic() - began, kept)
            self._died.append(done)

    def _rebuilt(self, living: list[int]) -> Callable[[], float]:
        """Make ready to go on, over communicators of the living; collective."""
        for carrier in self.carriers:
            carrier.adopt(self.comm.twin())
        return self.rebuild(living)

    def _tell(self) -> None:
        """Tell what has happened; local."""
        told, self._died = self._died, []
        for shrunk in told:
            if shrunk.rank == 0:
                warnings.warn(in_words(shrunk), stacklevel=2)
            for listener in self.listeners:
                listener(shrunk)


def in_words(shrunk: Shrunk) -> str:
    """Say what happened."""
    many = len(shrunk.died) > 1
    names = ", ".join(map(str, shrunk.died))
    ranks = f"{shrunk.size} ranks go on" if shrunk.size > 1 else "one rank goes on"
    lost = f"what {'they' if many else 'it'} had not sent is lost, of norm {shrunk.norm:.3g}"
    if shrunk.kept:
        lost += f", but for copies of norm {shrunk.kept:.3g}, which go on"
    return f"rank{'s' if many else ''} {names} died after {shrunk.step} steps: {ranks}; {lost}"
