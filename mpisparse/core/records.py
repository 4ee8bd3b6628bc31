"""Records that the parts of a step pass to each other; no code here knows any part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from mpisparse.arrays import Bools, Floats, Ints
from mpisparse.backends.device import load_backend
from mpisparse.backends.flat import zeros

if TYPE_CHECKING:
    from mpisparse.backends.flat import Held, Slot
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.agreement import Notice, Refusal
    from mpisparse.comm.exchange import Exchange
    from mpisparse.comm.inflight import InFlight
    from mpisparse.core.stages import Sent, Stage
    from mpisparse.select.candidates import Candidates
    from mpisparse.select.plans import Agreed, Plan, Selection
    from mpisparse.select.scorers import Scorer
    from mpisparse.select.view import View
    from mpisparse.wire.reduction import Reduced, Reducer


class Sink(Protocol):
    """Where the mean is published. The aggregator writes it; everyone else reads."""

    def clear(self) -> None:
        """Make every element zero."""
        ...

    def write(self, index: Any, mean: Any, acc: Any) -> None:
        """Publish the mean at an index, zeros elsewhere; the accumulator gets back what the sink's type cannot hold.

        The index is ascending, or the range of all elements.
        """
        ...

    def whole(self) -> torch.Tensor:
        """A float32 vector to sum the whole mean into: the sink's own memory where possible."""
        ...

    def published(self) -> torch.Tensor:
        """The mean as one flat float32 vector: the sink's own memory where possible."""
        ...


@dataclass(frozen=True)
class Parts:
    """What an aggregator works on: the accumulator of one flat vector, its slots, the communicator and the kernels.

    held: stretches that are not exchanged for now. sink: where the mean is published. early: deliveries start before
    step(). survives: a step may be delivered again to fewer ranks, so gradients stay in the accumulator until then.
    """

    residual: torch.Tensor
    slots: Sequence[Slot]
    held: Held
    sink: Sink
    exchange: Exchange
    backend: Backend
    survives: bool = False
    early: bool = False

    @property
    def acc(self) -> Floats:
        """The accumulator as the backend's array on the same memory."""
        values: Floats = self.backend.array_of(self.residual)
        return values

    def carrier(self, *, late: bool) -> Backend:
        """The kernels that a delivery uses: the host's if it runs in a thread, which must not share a device's stream."""
        carrier: Backend = load_backend() if (late or self.early) and self.backend.name == "cuda" else self.backend
        return carrier

    def zeros(self, count: int, *, late: bool = False) -> Any:
        """A vector of zeros for a reducer's memory, as an array of the reducer's kernels."""
        carrier = self.carrier(late=late)
        return carrier.array_of(zeros(count, torch.float32, self.residual.device if carrier is self.backend else None))


@dataclass
class Works:
    """The mutable state of an aggregator, as the functions of mpisparse.core.step use it.

    carrier: the kernels that a delivery uses, with their own kind of arrays. acc: the accumulator; seen: the same memory,
    read-only; take: copies its values at an index. flight: deliveries in flight, None at staleness 0.
    waiting: in flight, the agreement whose values are not sent yet. k_scale: the factor on k that follows from the metrics.
    differ: in a delivery applied since the owner last checked, replicas differed. opened: the first counts of the current
    step, exchanged with the roll call. carry: replaces mpisparse.core.step.deliver, if set.
    """

    exchange: Exchange
    backend: Backend
    carrier: Backend
    acc: Any
    seen: Any
    take: Callable[[Ints], Floats]
    scorer: Scorer
    selection: Selection
    reducer: Reducer
    stages: tuple[Stage, ...]
    sink: Sink
    held: Held
    flight: InFlight[Outgoing, Delivered | Refused] | None = None
    waiting: Agreed | None = None
    k_scale: float = 1.0
    differ: bool = False
    opened: Opened | None = None
    carry: Callable[..., Delivered] | None = None


class Opened(NamedTuple):
    """A step whose first counts came with the roll call: its plan, which holds these counts, and this rank's candidates."""

    plan: Plan
    found: Candidates


class Ahead(NamedTuple):
    """Values at the indices of an earlier agreement: in flight, indices travel one step ahead of their values."""

    agreed: Agreed
    sent: Sent


class Outgoing(NamedTuple):
    """What prepare passes to deliver; deliver may read nothing else.

    late: it is delivered while later steps run. opened: the first counts came with the roll call, before the gradient
    was added.
    """

    notice: Notice
    plan: Plan
    view: View
    stages: tuple[Stage, ...]
    reducer: Reducer
    figures: tuple[float, ...] = ()
    ahead: Ahead | None = None
    late: bool = False
    opened: bool = False


class Delivered(NamedTuple):
    """The result of a delivery.

    agreed: the agreement that this delivery made; due: the agreement whose values it sent, which differs only in flight.
    used: the parameters with a gradient on some rank, None for all. figures: means over ranks. nbytes_control: bytes
    received that are neither indices nor values. index_form: see mpisparse.wire.indices. differ: in flight, replicas
    differed.
    """

    agreed: Agreed
    due: Agreed
    sent: Sent
    reduced: Reduced
    tags: Any
    used: Bools | None
    figures: tuple[float, ...]
    nbytes_sent: int
    nbytes_received: int
    nbytes_control: int = 0
    index_nbytes: int = 0
    collectives: int = 0
    index_form: str = ""
    differ: bool = False

    @property
    def selected(self) -> int:
        """How many elements were selected."""
        return len(self.reduced.index if self.due.own else self.due.union)


class Refused(NamedTuple):
    """The result of a delivery in flight that the ranks refused; apply raises the refusal on all ranks in the same step."""

    refusal: Refusal


Arrived = Delivered | Refused


@dataclass(frozen=True)
class Stats:
    """What a step did. Bytes count what this rank sent to and received from other ranks; seconds are by phase.

    control_bytes: bytes received that are neither indices nor values; index_bytes: those of indices. index_form:
    "coded", "padded" or "columns" (mpisparse.wire.indices), empty where no indices travel. collectives: calls that moved
    these bytes, one for each round of a large message. node_bytes: if nodes sum first, bytes received from ranks of the same
    node; the other counts then cover traffic between nodes only.
    reselected and refined count the searches for a threshold beyond the first ladder. workloads: how many elements each rank
    selected; borders: the bounds of the regions in which they did. Both are in the order of the regions.
    sent_density also counts elements that were selected in earlier steps and still have momentum. details: the scheme's
    figures.
    """

    step: int
    density: float
    set_density: float
    selected: int
    threshold: float
    bytes_sent: int
    bytes_received: int
    imbalance: float
    seconds: dict[str, float]
    reselected: int = 0
    refined: int = 0
    skipped: bool = False
    workloads: tuple[int, ...] = ()
    borders: tuple[int, ...] = ()
    sent_density: float = 0.0
    control_bytes: int = 0
    index_bytes: int = 0
    index_form: str = ""
    collectives: int = 0
    node_bytes: int = 0
    details: dict[str, float] = field(default_factory=dict)

    @property
    def build_up(self) -> float:
        """Actual over set density: above 1 if ranks select different elements, all of which must then be sent."""
        return self.density / self.set_density

    @property
    def bytes_per_element(self) -> float:
        """Bytes received per element that all ranks together selected."""
        return self.bytes_received / self.selected if self.selected else 0.0
