"""What a scheme consists of: an aggregator, and a companion for schemes that also look after the weights."""

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
    def misfit(self, grads: Iterable[torch.Tensor | None]) -> str | None: ...


class Site(NamedTuple):
    """Where a scheme works, for those that look beyond the vector: the model, and its trainable parameters."""

    model: torch.nn.Module
    places: Places


class Subject(Protocol):
    """What of a model is exchanged: read before an exchange, given back after it."""

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
    """Hooks around the steps of an aggregator; the defaults are of a scheme that needs none.

    draining: the companion itself calls optimizer.step(), and no exchange belongs to it. subject: what is exchanged
    instead of gradients, after the optimizer's step. starting: gradients are averaged before it for now, by average().
    turning: something else is to be exchanged after the step that ends.
    """

    idle = True  # the hooks do nothing
    draining = False
    starting = False
    turning = False
    subject: Subject | None = None

    def check_by_hand(self) -> None:
        """Raise unless step() may be called without an optimizer attached."""

    def adopt(self, optimizer: torch.optim.Optimizer, *, scales: bool = False) -> None:
        """An optimizer was attached. scales: with a GradScaler, which decides over its steps."""

    def release(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is attached no more."""

    def turned(self) -> Companion:
        """The companion of the coming steps, if something else is exchanged in them; collective."""
        return self

    def note_loss(self, loss: float) -> None:
        """Note this rank's loss of the coming step."""

    def begin(self) -> None:
        """A step begins. Raise if the weights are not where they belong."""

    def average(self, trouble: str | None, call: Any = None) -> None:
        """Replace each rank's gradients by their mean; collective. trouble: why this rank cannot go on, if so.

        call: the roll call of the step, if this rank has no more batches and takes part with zeros.
        """

    def published(self, delivered: Delivered | None, stats: Stats, *, sound: bool) -> Stats:
        """The mean of a delivery is published (None: of none), and the optimizer will use it.

        sound: False if this rank cannot go on, and waits for the step in which all ranks raise why.
        """
        return stats

    def finish(self, stats: Stats) -> Stats:
        """The optimizer has used the published mean."""
        return stats

    def drain(self) -> Iterator[Bools | None]:
        """Apply what is in flight, let the optimizer use each, and make the replicas equal; collective.

        Yields which parameters had a gradient on some rank, for each delivery that is to be published; None: all.
        """
        yield from ()

    def global_weights(self) -> AbstractContextManager[None]:
        """Have the weights that are the same on all ranks in the model; local."""
        return nullcontext()

    def hold(self, frozen: Sequence[bool]) -> None:
        """Other parameters than before are frozen."""

    def counted(self, number: int) -> int:
        """The number of the step that an exchange belongs to, for messages; number: that of the exchange."""
        return number

    def is_due(self) -> bool:
        """Count one step of the optimizer; tell whether an exchange follows it."""
        return True

    def rested(self, stats: Stats) -> Stats:
        """The statistics of a step of the optimizer that no exchange followed."""
        return stats

    def replicated(self) -> Sequence[torch.Tensor] | None:
        """The weights that are the same on all ranks, one tensor for each parameter, where they are not the model's."""
        return None

    def drift(self) -> torch.Tensor | None:
        """What this rank has and the others do not, where that is not the residual."""
        return None

    def sample(self) -> torch.Tensor | None:
        """What tells ranks from each other that train on different batches, where that is drift(); None: nothing does."""
        return self.drift()

    def kept(self) -> torch.Tensor | None:
        """What a state stores of this rank as one vector, where that is not the residual."""
        return None

    def restore(self, kept: torch.Tensor) -> None:
        """Take what kept() gave; the model holds the weights that all ranks share."""

    def whole(self, kept: Floats, state: State) -> Floats:
        """A rank's own weights, from what kept() and state() gave."""
        return kept

    def state(self) -> State:
        """What the next step depends on."""
        return {}

    def check(self, state: State) -> None:
        """Raise ConfigurationError unless load() could take the state."""

    def of(self, state: State) -> Companion:
        """The companion of the steps that follow a state, in which something else may be exchanged than now."""
        return self

    def load(self, state: State) -> None:
        """Take what state() gave; the model and the optimizer hold the global weights. Collective."""

    def upgraded(self, state: State) -> State:
        """Translate what an earlier version saved."""
        return state

    def resize(self, states: Mapping[int, State], old: int, new: int, rank: int) -> State:
        """The state of a rank among `new` ones, from those of the `old` ranks that it takes over from."""
        first = next(iter(states.values()))
        return {key: first[key] for key in self.state()}


class Scheme(NamedTuple):
    """A scheme at work."""

    aggregator: Aggregator
    companion: Companion = Companion()
