"""The parts of a scheme: an aggregator, and a companion for schemes that also handle weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from mpisparse.arrays import State

if TYPE_CHECKING:
    from mpisparse.arrays import Bools, Floats, Ints
    from mpisparse.backends.flat import Pieces, Slot
    from mpisparse.comm.agreement import Notice
    from mpisparse.core.aggregator import Aggregator
    from mpisparse.core.records import Delivered, Stats


class Places(Protocol):
    """Parameters and their places in the flat vector."""

    @property
    def params(self) -> Sequence[torch.nn.Parameter]: ...
    @property
    def slots(self) -> Sequence[Slot]: ...
    @property
    def ends(self) -> Ints: ...
    @property
    def size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    def misfit(self, grads: Iterable[torch.Tensor | None]) -> str | None: ...


class Site(NamedTuple):
    """The model and its trainable parameters, for schemes that need more than the vector.

    attached: the attachments of optimizers, which may come and go.
    """

    model: torch.nn.Module
    places: Places
    attached: Sequence[Any] = ()


class Subject(Protocol):
    """The part of a model that is exchanged: read before an exchange, written back after it."""

    frozen: Any
    watch: Any

    @property
    def holds(self) -> bool: ...
    def look(self) -> None: ...
    def take(self, k: int, trouble: str) -> tuple[Pieces | None, Notice]: ...
    def publish(self, used: Bools | None) -> None: ...
    def refused(self) -> None: ...
    def drop(self) -> None: ...
    def restart(self) -> None: ...
    def hold_late(self) -> None: ...
    def out_of_sight(self, memories: Callable[[], dict[str, Any]]) -> AbstractContextManager[None]: ...


class Companion:
    """Hooks around the steps of an aggregator; by default they do nothing.

    draining: the companion itself is calling optimizer.step(), without an exchange. subject: what is exchanged instead of
    gradients, after the optimizer's step. starting: for now, average() averages gradients before the optimizer's step.
    turning: after the step that ends now, something else is exchanged.
    """

    idle = True  # the hooks do nothing
    draining = False
    starting = False
    turning = False
    subject: Subject | None = None

    def check_by_hand(self) -> None:
        """Raise unless step() may be called without an optimizer attached."""

    def adopt(self, optimizer: torch.optim.Optimizer, *, scales: bool = False) -> None:
        """Called when an optimizer is attached. scales: with a GradScaler, which decides on its steps."""

    def release(self, optimizer: torch.optim.Optimizer) -> None:
        """Called when the optimizer is detached."""

    def turned(self) -> Companion:
        """The companion of the coming steps, if something else is exchanged in them; collective."""
        return self

    def note_loss(self, loss: float) -> None:
        """Store this rank's loss of the coming step."""

    def begin(self) -> None:
        """Called when a step begins. Raises if the weights are not where they belong."""

    def average(self, trouble: str | None, call: Any = None) -> None:
        """Replace each rank's gradients by their mean; collective. trouble: why this rank cannot go on, if so.

        call: the roll call of the step, if this rank has no more batches and takes part with zeros.
        """

    def published(self, delivered: Delivered | None, stats: Stats, *, sound: bool) -> Stats:
        """Called when a delivery's mean is published (None: there is none), before the optimizer uses it.

        sound: False if this rank cannot go on, and waits for the step in which all ranks raise why.
        """
        return stats

    def finish(self, stats: Stats) -> Stats:
        """Called when the optimizer has used the published mean."""
        return stats

    def drain(self) -> Iterator[Bools | None]:
        """Apply the deliveries in flight, let the optimizer use each, and make the replicas equal; collective.

        For each delivery to publish, yields which parameters had a gradient on some rank; None: all.
        """
        yield from ()

    def global_weights(self) -> AbstractContextManager[None]:
        """Put the weights that are the same on all ranks into the model inside the block; local."""
        return nullcontext()

    def hold(self, frozen: Sequence[bool]) -> None:
        """Called when the set of frozen parameters has changed."""

    def counted(self, number: int) -> int:
        """The number of the step that an exchange belongs to, for messages; number: that of the exchange."""
        return number

    def is_due(self) -> bool:
        """Count one step of the optimizer; return whether an exchange follows it."""
        return True

    def rested(self, stats: Stats) -> Stats:
        """The statistics of an optimizer's step without an exchange."""
        return stats

    def replicated(self) -> Sequence[torch.Tensor] | None:
        """The weights that are the same on all ranks, one tensor per parameter, if they are not the model's."""
        return None

    def drift(self) -> torch.Tensor | None:
        """The difference of this rank from the others, if that is not the residual."""
        return None

    def sample(self) -> torch.Tensor | None:
        """A vector that differs between ranks with different batches, if that is drift(); None: there is none."""
        return self.drift()

    def kept(self) -> torch.Tensor | None:
        """The vector of this rank that a state stores, if that is not the residual."""
        return None

    def restore(self, kept: torch.Tensor) -> None:
        """Load what kept() returned; the model holds the weights that all ranks share."""

    def whole(self, kept: Floats, state: State) -> Floats:
        """A rank's own weights, from what kept() and state() returned."""
        return kept

    def state(self) -> State:
        """What the next step depends on."""
        return {}

    def check(self, state: State) -> None:
        """Raise ConfigurationError unless load() could take the state."""

    def of(self, state: State) -> Companion:
        """The companion of the steps that follow a state, which may exchange something else than now."""
        return self

    def load(self, state: State) -> None:
        """Load what state() returned; the model and the optimizer hold the global weights. Collective."""

    def upgraded(self, state: State) -> State:
        """Translate what an earlier version saved."""
        return state

    def resize(self, states: Mapping[int, State], old: int, new: int, rank: int) -> State:
        """The state of a rank among `new` ones, from those of the `old` ranks that it takes over from."""
        first = next(iter(states.values()))
        return {key: first[key] for key in self.state()}


class Scheme(NamedTuple):
    """An aggregator and its companion."""

    aggregator: Aggregator
    companion: Companion = Companion()
