"""What the parts of a step hand to each other: records, and no code that knows any part."""

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
    """What an aggregator works on: one flat vector's accumulator, the pieces in it, the other ranks, and the kernels.

    held: stretches that are not exchanged for now. sink: where the mean is published. survives: a step may be delivered
    again, to fewer ranks, so that gradients lie in the accumulator until then. early: deliveries set out before the step.
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
        """The kernels that a delivery uses: in a thread those of the host, because it shares no stream of a device."""
        carrier: Backend = load_backend() if (late or self.early) and self.backend.name == "cuda" else self.backend
        return carrier

    def zeros(self, count: int, *, late: bool = False) -> Any:
        """A vector of zeros for what a reducer remembers: an array of its kernels."""
        carrier = self.carrier(late=late)
        return carrier.array_of(zeros(count, torch.float32, self.residual.device if carrier is self.backend else None))


@dataclass
class Works:
    """The moving parts of an aggregator, as the functions of mpisparse.core.step use them.

    carrier: the kernels that a delivery uses, with arrays of its own. acc: the accumulator; seen: the same memory,
    read-only; take: copies its values at an index. flight: deliveries in flight, None if all are done at once.
    waiting: in flight, what the ranks have agreed on and not sent yet. k_scale: the factor on k that metrics led to.
    differ: the replicas did, in a delivery that was applied since the owner has looked. opened: what the roll call told
    of the step that begins. carry: delivers instead of mpisparse.core.step.deliver, if set.
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
    """A step whose first counts came with the roll call: its plan with these counts in it, and this rank's candidates."""

    plan: Plan
    found: Candidates


class Ahead(NamedTuple):
    """Values of what an earlier delivery agreed on: in flight, indices travel one step ahead of their values."""

    agreed: Agreed
    sent: Sent


class Outgoing(NamedTuple):
    """What prepare hands to deliver, and all that deliver may read.

    late: it is delivered while other steps run. opened: the roll call told the first counts, before the gradient was added.
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
    """What came of a delivery.

    agreed: what the ranks agreed on now; due: the agreement whose values were sent, the same one unless in flight. used:
    parameters with a gradient on some rank, None for all. figures: means over ranks. nbytes_control: of those received,
    all that are neither indices nor values. index_form: see mpisparse.wire.indices.
    differ: the replicas did, in flight.
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
    """What became of a delivery in flight that the ranks refused; apply raises it, on all ranks in the same step."""

    refusal: Refusal


Arrived = Delivered | Refused


@dataclass(frozen=True)
class Stats:
    """What a step did. Bytes count what this rank sent to and received from other ranks; seconds are by phase.

    control_bytes: of those received, all that are neither indices nor values; index_bytes: those of indices. index_form:
    "coded", "padded" or "columns" (mpisparse.wire.indices), empty where no indices travel. collectives: calls that moved
    these bytes, one for each round of a large message. node_bytes: received from ranks of the same node, where nodes sum
    first; the other bytes are then those between nodes.
    reselected and refined count the searches for a threshold beyond the first ladder. workloads are what each rank
    selected and borders the bounds of the regions in which they did, both in the order of the regions.
    sent_density counts also what was selected in earlier steps and still has momentum. details are the scheme's own.
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
        """Actual over set density: above 1 where ranks select different elements that all must then send."""
        return self.density / self.set_density

    @property
    def bytes_per_element(self) -> float:
        """Bytes received per element that all ranks together selected."""
        return self.bytes_received / self.selected if self.selected else 0.0
