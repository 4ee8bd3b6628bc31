"""What a rank reports to the others before anything is sent, and the reasons for which all ranks refuse a step together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from mpisparse.arrays import Bools, Ints
from mpisparse.errors import ConfigurationError

if TYPE_CHECKING:
    from mpisparse.comm.exchange import Exchange

T = TypeVar("T")

FINE, NONFINITE, NO_BACKWARD, STALE, BROKEN = range(5)


class Refusal(Exception):  # noqa: N818 - not an error yet: GradientSync turns it into one with the parameters' names
    """Why a step cannot be done. All ranks raise it in the same step."""


class StepRefused(Refusal):
    """Some rank cannot go on. `statuses`: (status, detail) per rank; `trouble`: this rank's explanation, or empty."""

    def __init__(self, statuses: Sequence[tuple[int, int]], trouble: str = "") -> None:
        super().__init__(statuses, trouble)
        self.statuses = statuses
        self.trouble = trouble


class DensityDiffers(Refusal):
    """The ranks were set to different densities; args[0] is k per rank."""


class FrozenDiffers(Refusal):
    """The ranks have frozen different parameters."""


class ReplicasDiffer(Refusal):
    """The ranks have different weights or learning rates, and agree on all else. `used`: what the agreement returns."""

    def __init__(self, used: Bools | None) -> None:
        super().__init__(used)
        self.used = used


class Overflow(Refusal):
    """The sum over ranks does not fit into float32 at the flat index args[0]."""


class Notice(NamedTuple):
    """What a rank reports to the others before a step: whether it can go on, and what must be equal on all ranks.

    detail: the flat index that a status is about. unused: parameters without a gradient. frozen: a digest of the set of
    frozen parameters. trouble: if the status is BROKEN, why the rank cannot go on. step: its number. call: its roll call
    (mpisparse.comm.roll_call.Call), if that has begun. digest: of whatever else must be equal. norm: the residual's norm as
    the bits of a float64, if other ranks may survive this one's death.
    """

    k: int
    unused: Bools
    status: int = FINE
    detail: int = 0
    frozen: int = 0
    trouble: str = ""
    step: int = 0
    call: Any = None
    digest: int = 0
    norm: int = 0

    def nonfinite(self, index: int) -> Notice:
        """Return this notice with a first non-finite index; -1 is none."""
        if index < 0 or self.status != FINE:
            return self
        return self._replace(status=NONFINITE, detail=index)


def refuse(rows: Ints, notice: Notice) -> NoReturn:
    """Raise StepRefused with every rank's status and detail, the first two of its row."""
    raise StepRefused([(int(status), int(detail)) for status, detail in rows[:, :2]], notice.trouble)


def on_all(exchange: Exchange, attempt: Callable[[], T]) -> T:
    """Do what each rank does by itself and may refuse; if any does, raise ConfigurationError on all. Collective."""
    error: ConfigurationError | None = None
    try:
        result = attempt()
    except ConfigurationError as caught:
        error = caught
    exchange.raise_together(error)
    return result
