"""The living ranks of an exchange go on when another has died: over Open MPI with ULFM (mpirun --with-ft ulfm).

Ranks notice a death in different calls. So every joint operation ends with an agreement on whether all living ranks have
done it. If not, all make a communicator without the dead ranks and repeat it. Before the agreement, an operation must
therefore change nothing that its repetition depends on.
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
TOGETHER = (Refusal, CheckpointError, CollectiveError, ConfigurationError, GradientError)  # raised on all ranks together


class Shrunk(NamedTuple):
    """The record that a rank gets after others have died.

    died: their former ranks. rank, size: this rank and the number of ranks now. norm: the norm of the residuals of the dead,
    as they last reported it, which are lost unless there is a copy. step: the number of steps done. seconds: from noticing
    the death to going on. kept: the norm of the copies that others go on with.
    """

    died: tuple[int, ...]
    rank: int
    size: int
    norm: float
    step: int
    seconds: float
    kept: float = 0.0


def together(exchange: Exchange, attempt: Callable[[], T]) -> T:
    """Run a joint operation of all ranks; repeat it among the living if one dies meanwhile and the others are to go on."""
    survival: Survival | None = exchange.survival
    return attempt() if survival is None else survival.surely(attempt)


def lacking(exchange: Exchange) -> str:
    """Why the ranks of an exchange cannot go on without one that has died, and what to do; empty if they can. Local."""
    return exchange.comm.mortal


class Survival:
    """Recovers an exchange when a rank has died.

    rebuild: gets the former ranks that live, and prepares to go on with the exchange's new rank and size; collective. It
    changes nothing yet, and is called again if a rank dies meanwhile. It returns a local function that makes the change and
    returns the norm of what was kept of the dead ranks. listeners: called afterwards.
    carriers: the exchanges of threads, which are given up and recovered with this one. quiet: waits until no thread is in a
    call of theirs.
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
        self._died: list[Shrunk] = []  # not passed to the listeners yet
        for one in (exchange, *carriers):
            one.survival = self
        self.comm.end_alone()

    @property
    def comm(self) -> Any:
        """The communicator of comm/mpi.py, which can do more than other transports."""
        return self.exchange.comm

    def surely(self, attempt: Callable[[], T]) -> T:
        """Run a joint operation; repeat it if a rank dies before all living ones have done it. Collective.

        Inside another such call it only runs the attempt, and the outer call repeats.
        """
        if self.inside:
            return attempt()
        while True:
            result, error, fine = self._try(attempt)
            if self._ended(fine) or self._agreed(fine):
                break
            self._recover()
        self._tell()
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def until_met(self, attempt: Callable[[bool], T]) -> T:
        """Run the first part of a joint operation; surely() runs the rest, and agrees. Collective.

        The argument of `attempt` says whether it is a repetition. If this part is refused, it ends here, with an agreement.
        """
        again = False
        while True:
            result, error, fine = self._try(lambda: attempt(again))  # noqa: B023 - called at once
            if fine and error is None:
                return result  # type: ignore[return-value]
            if self._ended(fine) or self._agreed(fine):
                assert error is not None
                raise error
            self._recover()
            again = True

    def leave(self, attempt: Callable[[], object]) -> None:
        """Run a rank's last operation. If ranks that go on have noticed a death and wait for this one, it dies, too."""
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
        """Wrap the delivery in a thread: if it notices a death, all ranks give up what they wait for."""

        def carried(outgoing: Carried) -> T:
            try:
                return carry(outgoing)
            except Exception as error:
                if not isinstance(error, TOGETHER) and self.comm.tells_of_death(error):
                    self.give_up()
                raise

        return carried

    def give_up(self) -> None:
        """Make all running calls fail, in all threads of all ranks; local, from any thread."""
        for exchange in (self.exchange, *self.carriers):
            exchange.comm.revoke()  # type: ignore[attr-defined]  # comm/mpi.py's

    def _try(self, attempt: Callable[[], T]) -> tuple[T | None, Exception | None, bool]:
        """Return an attempt's result, the error that all ranks raised in it, and whether no rank was missing; collective."""
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

    def _ended(self, fine: bool) -> bool:
        """Whether a rank has left the program, as all know, and so takes part in no agreement; local."""
        return fine and bool(self.exchange.gone)

    def _agreed(self, fine: bool) -> bool:
        """Agree whether all living ranks have done it and none has died; collective. If this one has not, others stop.

        All ask twice before they believe in a death. On a busy machine, while a thread was in other calls, Open MPI's
        agreement has failed on all ranks although none had died. After a death it fails until the dead are left out.
        """
        exchange = self.exchange
        if not fine:
            self.give_up()
        exchange.spot.wait = "Agree", time.monotonic(), get_ident()
        try:
            return bool(self.comm.agreed(fine)) or bool(self.comm.agreed(fine and not self.comm.knows_of_dead()))
        finally:
            exchange.spot.wait = None

    def _recover(self) -> None:
        """Go on among the living; collective."""
        began, exchange = time.monotonic(), self.exchange
        old, norms = exchange.size, exchange.norms
        living = list(range(old))
        fine = False
        while not fine:
            self.give_up()
            self.quiet()
            comm, rest = self.comm.shrunk()
            living = [living[rank] for rank in rest]
            exchange.adopt(comm)
            exchange.norms = norms[living] if len(norms) == old else norms
            finish, error, fine = self._try(lambda: self._rebuilt(living))  # noqa: B023 - called at once
            if error is not None:
                raise error
            fine = self._agreed(fine)
        assert finish is not None
        kept = finish()
        died = tuple(rank for rank in range(old) if rank not in living)
        norm = 0.0
        if len(norms) == old:
            norm = float(np.linalg.norm(np.ascontiguousarray(norms[list(died)]).view(np.float64)))
        if died:
            self.bereaved = True
            done = Shrunk(died, exchange.rank, exchange.size, norm, exchange.place.steps, time.monotonic() - began, kept)
            self._died.append(done)

    def _rebuilt(self, living: list[int]) -> Callable[[], float]:
        """Prepare to go on over communicators of the living; collective."""
        for carrier in self.carriers:
            carrier.adopt(self.comm.twin())
        return self.rebuild(living)

    def _tell(self) -> None:
        """Call the listeners; local."""
        news, self._died = self._died, []
        for shrunk in news:
            if shrunk.rank == 0:
                warnings.warn(in_words(shrunk), stacklevel=2)
            for listener in self.listeners:
                listener(shrunk)


def in_words(shrunk: Shrunk) -> str:
    """Describe what happened, for the log."""
    many = len(shrunk.died) > 1
    names = ", ".join(map(str, shrunk.died))
    ranks = f"{shrunk.size} ranks go on" if shrunk.size > 1 else "one rank goes on"
    lost = f"unsent values of norm {shrunk.norm:.3g} are lost"
    if shrunk.kept:
        lost += f", except for copies of norm {shrunk.kept:.3g}"
    return f"rank{'s' if many else ''} {names} died after {shrunk.step} steps: {ranks}; {lost}"
