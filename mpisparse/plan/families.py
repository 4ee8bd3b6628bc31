"""Companions of scheme auto: one while gradients are exchanged, one while weights are.

A change from one to the other keeps all that was not sent, but it is a discontinuity: what waits of gradients goes through
the optimizer at once, and where ranks had optimizers of their own, the states of these become their mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mpisparse.arrays import State
from mpisparse.backends.flat import checksum
from mpisparse.comm.roll_call import FIRST, meet
from mpisparse.errors import ConfigurationError
from mpisparse.plan.attached import average_states, hindrance, same_settings
from mpisparse.plan.times import Times
from mpisparse.schemes.companion import Companion, Site
from mpisparse.schemes.drift.by_node import DriftingByNode
from mpisparse.schemes.drift.companion import Drifting
from mpisparse.schemes.drift.weights import OwnWeights

WAY_OUT = "pass weights=False to GradientSync, which leaves exchanges of weights out"

if TYPE_CHECKING:
    from mpisparse.core.records import Parts, Stats
    from mpisparse.plan.candidates import Candidate
    from mpisparse.schemes.options import Options


class Chooser(Protocol):
    """What chooses. turned() and of() return the companion of the coming steps: after a change, or of a state.

    told: what statistics say of the choice. times: how long the parts of steps took.
    """

    times: Times
    parts: Parts
    site: Site
    optimizers: list[torch.optim.Optimizer]
    scaled: list[torch.optim.Optimizer]
    pending: Candidate | None

    told: Mapping[str, float]

    @property
    def turning(self) -> bool: ...
    def turned(self) -> Companion: ...
    def of(self, state: State) -> Companion: ...


class Family(Companion):
    """What both have in common: they know the attached optimizers, and hand over to each other."""

    choosing: Chooser

    @property
    def turning(self) -> bool:  # type: ignore[override]  # not after all steps
        return self.choosing.turning

    def turned(self) -> Companion:
        return self.choosing.turned()

    def of(self, state: State) -> Companion:
        return self.choosing.of(state)

    def adopt(self, optimizer: torch.optim.Optimizer, *, scales: bool = False) -> None:
        self.choosing.optimizers.append(optimizer)
        if scales:
            self.choosing.scaled.append(optimizer)

    def release(self, optimizer: torch.optim.Optimizer) -> None:
        for known in (self.choosing.optimizers, self.choosing.scaled):
            known[:] = [each for each in known if each is not optimizer]

    @property
    def hindrance(self) -> str:
        """Why weights cannot be exchanged after the step of what is attached; empty if they can."""
        choosing = self.choosing
        if choosing.scaled:
            return "a GradScaler, which may skip the steps of one rank"
        return hindrance(choosing.optimizers, choosing.site.places.params)

    def check_by_hand(self) -> None:
        """Raise on all ranks: weights are, or are about to be, exchanged after the attached optimizer's step."""
        exchange = self.choosing.parts.exchange
        meet(exchange, FIRST)
        raise ConfigurationError(
            f'r{exchange.rank} | scheme "auto" exchanges weights now, or is to, after the step of the attached optimizer: '
            f"leave sync.step() out, and keep the optimizer attached, or {WAY_OUT}"
        )

    def upgraded(self, state: State) -> State:
        return {"around": {}, **state}

    def state(self) -> State:
        return {"around": {}}


class OfGradients(Family):
    """Gradients are exchanged. Its hooks do nothing, unless weights are to be exchanged next."""

    def __init__(self, choosing: Chooser) -> None:
        self.choosing = choosing

    @property
    def idle(self) -> bool:  # type: ignore[override]  # not in all steps
        return self.choosing.pending is None


class OfWeights(Family, Drifting):
    """Weights are exchanged, as by scheme drift. drifting: what that scheme has put together."""

    def __init__(self, choosing: Chooser, drifting: Drifting) -> None:
        self._as(drifting)
        self.pace = drifting.pace
        self.choosing = choosing
        self.weights.scheme = "auto"
        self.optimizer = choosing.optimizers[0] if choosing.optimizers else None

    def _as(self, drifting: Drifting) -> None:
        """Begin as what that scheme has put together."""
        Drifting.__init__(self, drifting.aggregator, drifting.site, drifting.weights, every=1)

    def adopt(self, optimizer: torch.optim.Optimizer, *, scales: bool = False) -> None:
        Family.adopt(self, optimizer, scales=scales)
        if why := self.hindrance:
            Family.release(self, optimizer)
            raise ConfigurationError(
                f'r{self.exchange.rank} | scheme "auto" exchanges weights now, which does not go with {why}; {WAY_OUT}'
            )
        self.optimizer = optimizer

    def release(self, optimizer: torch.optim.Optimizer) -> None:
        Family.release(self, optimizer)
        self.optimizer = self.choosing.optimizers[0] if self.choosing.optimizers else None

    def rested(self, stats: Stats) -> Stats:
        """A step without an exchange still tells what was chosen."""
        return replace(super().rested(stats), details=dict(self.choosing.told))

    def begin_with(self, shared: torch.Tensor) -> None:
        """Go on with the same shared weights, and with the weights that the ranks have; local."""
        self.shared.copy_(shared)

    def begin_together(self) -> None:
        """Begin with weights that are the same on all ranks; collective.

        They are, but for the rounding of other processors: then rank 0's are the shared ones.
        """
        if len(set(self.exchange.gather_texts(str(checksum([self.shared]))))) > 1:
            self.exchange.broadcast_(self.shared.view(torch.uint8).numpy())

    def end_together(self) -> None:
        """Have the same weights, and the same state of the optimizer, on all ranks; collective."""
        for _ in self.drain():
            pass
        if self.optimizer is not None:
            average_states(self.optimizer, self.exchange)
            same_settings(self.optimizer, self.exchange)

    def upgraded(self, state: State) -> State:
        return Family.upgraded(self, state)

    def state(self) -> State:
        return {"around": Drifting.state(self)}

    def check(self, state: State) -> None:
        """The choice says what it is of: see Choosing.check."""

    def load(self, state: State) -> None:
        Drifting.load(self, state["around"])


class OfWeightsByNode(OfWeights, DriftingByNode):
    """Weights are exchanged between nodes, each of which is one worker."""

    def __init__(self, choosing: Chooser, drifting: Drifting) -> None:
        super().__init__(choosing, drifting)
        times = choosing.times  # the mean of a node's gradients is a part of the exchange
        self.means.waiting, self.means.exchanging = times.waiting, times.exchanging

    def _as(self, drifting: Drifting) -> None:
        assert isinstance(drifting, DriftingByNode)
        DriftingByNode.__init__(self, drifting.aggregator, drifting.site, drifting.weights, every=1, start=None)

    def begin_with(self, shared: torch.Tensor) -> None:
        """As on all ranks; collective inside the node, which has them in memory that its ranks may share."""
        self.aggregator.nodes.meet()  # all have read the weights before
        super().begin_with(shared)
        self.aggregator.nodes.meet()

    def begin_together(self) -> None:
        """Begin with weights, and an optimizer, that are the same on all ranks; collective."""
        self.aggregator.nodes.meet()  # all ranks have written the shared weights
        super().begin_together()
        self.weights.set_flat(self.shared)
        self.aggregator.nodes.meet()
        if self.optimizer is not None:
            same_settings(self.optimizer, self.exchange)


def check_around(around: Any) -> None:
    """Raise ConfigurationError unless this can be of an exchange of weights."""
    if not isinstance(around, dict) or any(type(around.get(name)) is not int for name in ("done", "digest")):
        raise ConfigurationError("the state is of an exchange of weights, and does not say of which")


def unfit(options: Options, site: Site, *, weights: bool) -> str:
    """Why weights cannot be exchanged, whatever the optimizer; empty if they can. weights: whether the user lets them."""
    if not weights:
        return "weights=False leaves them out"
    if options.accumulate != "step":
        return 'accumulate="backward" takes gradients during backward'
    if options.nonfinite != "raise":
        return 'a step that was done cannot be skipped, as nonfinite="skip" asks for'
    if not all(isinstance(p, torch.nn.Parameter) for p in site.places.params):
        return "parameters are sharded"
    try:
        OwnWeights(site.places, remainder=False)
    except ConfigurationError as error:
        return str(error)
    return ""
