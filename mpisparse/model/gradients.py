"""A model's gradients around a step: which are new, whether they fit, and their mean as p.grad afterwards."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from operator import attrgetter, methodcaller
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from mpisparse.arrays import Bools
from mpisparse.backends.digest import digest
from mpisparse.backends.flat import Pieces, Slot
from mpisparse.backends.protocol import Backend
from mpisparse.comm.agreement import BROKEN, NO_BACKWARD, NONFINITE, STALE, Notice
from mpisparse.model import registry
from mpisparse.model.digests import rates_of
from mpisparse.model.early import Early
from mpisparse.model.frozen import Frozen
from mpisparse.model.grad_hooks import GradientWatch
from mpisparse.model.layout import Layout, collect_gradients
from mpisparse.model.published import Published

Add = Callable[[int, Slot, torch.Tensor], int]  # adds a parameter's gradient during backward

# A step looks at every parameter: these getters go over all of them without a frame of Python for each.
GRAD, LAYOUT, REQUIRES_GRAD = attrgetter("grad"), attrgetter("layout"), attrgetter("requires_grad")
LOOKS, STRIDE = attrgetter("dtype", "shape", "device"), methodcaller("stride")  # of shards, too


class ModelGradients:
    """Layout, hooks and published views of one model.

    in_backward: `add` adds gradients to the residual when backward has computed them, and they are dropped. looks: check
    all gradients for non-finite values before anything is added.
    """

    def __init__(
        self, model: torch.nn.Module, layout: Layout, published: Published, backend: Backend, residual: torch.Tensor, *,
        in_backward: bool, looks: bool,
    ) -> None:  # fmt: skip
        self.model = model
        self.layout = layout
        self.published = published
        self.backend = backend
        self.residual = residual
        self.in_backward = in_backward
        self.looks = looks
        self.frozen = Frozen(layout, backend)
        self.watch = GradientWatch(layout, published, self._made if in_backward else None)
        self.add: Add | None = None
        self.early: Early | None = None
        self._moving = [True] * len(layout.params)
        self._registered = registry.parameters_registered()
        self._looks = [(s.dtype, s.shape, layout.device) for s in layout.slots]
        self._strides = [s.stride for s in layout.slots]
        self._plain = [None if s.dtype is torch.float64 else s.stride for s in layout.slots]  # strides read without a copy
        self._late: list[tuple[int, torch.Tensor]] = []  # gradients computed before their parameters were frozen
        self.holds = False  # whether the step has anything to hold back, of these or of parameters frozen since
        self._left: set[int] = set()  # accumulate="backward": gradients that could not be read when they were computed
        self._flush: Callable[[Any], None] | None = getattr(backend, "flush", None)
        self._flushes = False  # whether a flush is queued for the end of this backward
        self._bad = -1
        self._published_once = False

    def send_early(self, early: Early) -> None:
        """Send buckets while backward is running."""
        self.early, self.watch.on_gradient = early, early.note

    # Before a step

    def take(self, k: int, trouble: str) -> tuple[Pieces | None, Notice]:
        """The gradients since the last step, None if they are in the residual already, and the notice for other ranks."""
        views, fresh = self.published.views, self.watch.fresh
        pairs = zip(map(GRAD, self.layout.members), views, strict=True)
        grads = [None if grad is view and not fresh[i] else grad for i, (grad, view) in enumerate(pairs)]
        mask, digest = self.frozen.mask, self.frozen.digest
        trouble = trouble or self._changed(grads) or ("" if self.early is None else self.early.trouble(grads, mask))
        if trouble:  # gradients of another type or shape must not be read
            return None, Notice(k, np.ones(len(grads), dtype=bool), BROKEN, frozen=digest, trouble=trouble)
        self._late = self.frozen.take_out(grads) if self.layout.held.stretches else []
        self.holds = self.frozen.changed or bool(self._late)
        pieces, bad = None, -1
        if self.in_backward:
            self._flushes = False
            self._take_left()
            unused = ~self.watch.fresh | mask
            late_bad = self.backend.late_nonfinite(self.backend.array_of(self.residual))
            bad = self._bad if self._bad >= 0 else late_bad
        else:
            unused = np.array([g is None for g in grads], dtype=bool)
            pieces = self._collect(grads)
            bad = pieces.first_nonfinite(self.backend) if self.looks else -1
        notice = Notice(k, unused, frozen=digest)
        notice = notice if bad < 0 else notice.nonfinite(bad)
        for i, grad in self._late:
            sound = bool(torch.isfinite(grad.to_dense()).all())
            notice = notice.nonfinite(-1 if sound else self.layout.slots[i].begin)
        return pieces, self._fresh(notice)

    def _collect(self, grads: list[torch.Tensor | None]) -> Pieces:
        """The gradients as pieces of the flat vector; without a copy if all have the memory layout of their parameters."""
        alive = [g for g in grads if g is not None]
        plain = self._plain if len(alive) == len(grads) else _at(self._plain, grads)
        if list(map(LAYOUT, alive)).count(torch.strided) < len(alive) or list(map(STRIDE, alive)) != plain:
            return collect_gradients(self.layout, grads)
        addresses = list(map(torch.Tensor.data_ptr, alive))
        if len(alive) == len(grads):
            pointers = np.array(addresses, dtype=np.uint64)
        else:
            pointers = np.zeros(len(grads), dtype=np.uint64)
            pointers[[i for i, grad in enumerate(grads) if grad is not None]] = addresses
        return Pieces(pointers, self.layout.ends, self.layout.kinds, [], alive)

    def _fresh(self, notice: Notice) -> Notice:
        """Record which parameters have no new gradient, and whether one still includes the last mean."""
        if notice.status == NONFINITE:
            return notice
        if notice.unused.all():
            notice = notice._replace(status=NO_BACKWARD)
        elif self.watch.unzeroed and (stale := self.watch.stale()):
            notice = notice._replace(status=STALE, detail=self.layout.slots[stale[0]].begin)
        if list(map(torch.Tensor.data_ptr, self.published.views)) != self.published.addresses:
            self.watch.reattach()
        return notice

    def _changed(self, grads: list[torch.Tensor | None]) -> str | None:
        """A text that says what has changed in the model since construction; None if nothing that matters."""
        new = None
        nothing_came = not self.watch.fresh.any() and all(grad is None for grad in grads)
        if nothing_came or self._registered != registry.count:
            known = {id(p) for p in self.layout.params}
            if any(id(p) not in known for p in self.model.parameters() if p.requires_grad):
                new = "the model has parameters that it did not have"
            self._registered = registry.count if new is None else -1
        if any(p.requires_grad for p in self.layout.frozen):
            new = "a frozen parameter requires a gradient now, which it did not"
        if new is None:
            if self.layout.held.remaining == 0:
                return "all parameters are frozen: nothing is left to train"
            return None if self._as_before(grads) else self.layout.misfit(grads)
        return (
            f"{new} when GradientSync was constructed: its gradient would not be exchanged and the ranks would drift apart; "
            "construct GradientSync (and the optimizer) after the change"
        )

    def _as_before(self, grads: list[torch.Tensor | None]) -> bool:
        """Whether parameters and gradients have their former types, shapes and devices; if False, a closer check follows."""
        params, looks = self.layout.members, self._looks
        if list(map(LOOKS, params)) != looks or list(map(STRIDE, params)) != self._strides:
            return False
        alive = [grad for grad in grads if grad is not None]
        return list(map(LOOKS, alive)) == (looks if len(alive) == len(grads) else _at(looks, grads))

    def sample(self, pieces: Pieces | None) -> int:
        """A digest of the gradients of a step, to find ranks that have the same ones; 0 if there is none, or if it is 0."""
        if pieces is not None:
            return digest([*pieces.alive, *(grad for _, grad in pieces.sparse)])
        first = not self._published_once  # later the residual holds more than the gradient
        return digest([self.residual]) if first else 0

    # During backward

    def _made(self, i: int) -> None:
        """With accumulate="backward": parameter i's gradient is ready. A device adds small ones together later."""
        self._accumulate(i)
        if self._flush is not None and not self._flushes:
            self._flushes = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        """Called at the end of backward."""
        self._flushes = False
        assert self._flush is not None
        self._flush(self.backend.array_of(self.residual))

    def _accumulate(self, i: int) -> None:
        """With accumulate="backward": add parameter i's gradient to the residual and drop it."""
        slot, p = self.layout.slots[i], self.layout.members[i]
        assert p.grad is not None
        assert self.add is not None
        if not slot.takes(p.grad) or p.grad.device != self.layout.device:
            self._left.add(i)  # not to be read; step() says why
            return
        bad = self.add(i, slot, p.grad)
        if bad >= 0 and self._bad < 0:
            self._bad = bad
        p.grad = None

    def _take_left(self) -> None:
        """With accumulate="backward": add gradients that could not be read when they were computed, if they can be now."""
        for i in sorted(self._left):
            if self.layout.members[i].grad is not None and not self.frozen.mask[i]:
                self._accumulate(i)
        self._left.clear()

    # In a step

    def anything_new(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether there is a gradient since the last step: of backward, or put there by hand for this optimizer.

        Another optimizer's own step may put tensors there; so may clipping, where what was sent early is published before.
        """
        if self.watch.fresh.any():
            return True
        held = set() if self.early is not None else {id(p) for group in optimizer.param_groups for p in group["params"]}
        each = zip(self.layout.params, map(GRAD, self.layout.members), self.published.views, strict=True)
        return any(id(p) in held and grad is not None and grad is not view for p, grad, view in each)

    def any_new(self, params: Iterable[torch.nn.Parameter]) -> bool:
        """Whether any of these parameters has a gradient that was made since the last step."""
        fresh = {id(self.layout.params[i]) for i in np.flatnonzero(self.watch.fresh).tolist()}
        return any(id(p) in fresh and p.grad is not None for p in params)

    def hold_late(self) -> None:
        """Add gradients computed before their parameters were frozen to the residual."""
        for i, grad in self._late:
            self.layout.slots[i].view(self.residual).add_(grad.to_dense().float())
        self._late = []

    def refused(self) -> None:
        """Called when the step is refused; these gradients are still p.grad."""
        self._late = []

    def out_of_sight(self, memories: Callable[[], dict[str, Any]]) -> contextlib.AbstractContextManager[None]:
        """Inside the block, zero frozen parameters in the residual and in other vectors that elements are selected by."""
        return self.frozen.out_of_sight(lambda: {"residual": self.backend.array_of(self.residual), **memories()})

    def publish(self, used: Bools | None) -> None:
        """Make the published views p.grad; a parameter with no gradient on any rank and nothing published keeps None."""
        mask, pairs = self.frozen.mask, zip(self.layout.members, self.published.views, strict=True)
        absent = mask if used is None else mask | ~used
        if absent.any():
            for i, (p, view) in enumerate(pairs):
                p.grad = None if absent[i] and (mask[i] or not bool(view.any())) else view
        else:
            for p, view in pairs:
                if p.grad is not view:
                    p.grad = view
        self._published_once = True
        watch, published = self.watch, self.published
        watch.fresh[:] = False
        watch.unzeroed.clear()
        watch.zeroed, watch.seen = False, published.stamp

    def look(self) -> None:
        """Check which parameters are frozen now."""
        moving = list(map(REQUIRES_GRAD, self.layout.params))
        if moving != self._moving:
            self.frozen.look()
            self._moving = moving

    def drop(self) -> None:
        """Drop all gradients."""
        for p in self.layout.params:
            p.grad = None
        self.watch.restart()

    def restart(self) -> None:
        """Forget earlier gradients, because a state was loaded."""
        self._bad = -1
        self._left.clear()
        self.frozen.changed = True
        self.published.clear()
        self.watch.restart()


T = TypeVar("T")


def _at(items: list[T], grads: list[torch.Tensor | None]) -> list[T]:
    """The items of the parameters that have a gradient."""
    return [item for item, grad in zip(items, grads, strict=True) if grad is not None]


class GradientsBefore:
    """What a GradientSync that exchanges gradients does, before the optimizer's step; see WeightsAfter.

    words: what errors call the values, and their advice. waiting: the attached optimizers that have not used the last mean
    yet; unless a gradient is new, no exchange is needed before their steps. turn: which of several attached ones steps.
    """

    words: ClassVar[Mapping[str, str]] = {}

    def __init__(self, sync: Any) -> None:
        self.sync: Any = weakref.proxy(sync)
        self.waiting: list[torch.optim.Optimizer] = []
        self.turn = 0

    def step(self) -> None:
        """What GradientSync.step() does; collective."""
        sync = self.sync
        if not sync._companion.idle:
            sync._companion.check_by_hand()
        self.waiting = []
        self.begin(None)
        if sync._early is None:
            self.waiting = []

    def begin(self, trouble: str | None, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Exchange, unless this optimizer waits for the last mean and no gradient is new; collective otherwise."""
        sync = self.sync
        if sync._companion.draining:
            return
        attached = [one.optimizer for one in sync._attached]
        others = [each for each in attached if each is not optimizer]
        left = [each for each in self.waiting if each is not optimizer]
        if optimizer is not None and len(left) < len(self.waiting) and not sync._gradients.anything_new(optimizer):
            self.waiting = left
            return
        self.waiting = []
        self.turn = next((i for i, each in enumerate(attached) if each is optimizer), 0)
        sync._exchange_now(trouble)
        self.waiting = others

    def finish(self) -> None:
        """Called when the optimizer has used the mean; local."""
        sync, companion = self.sync, self.sync._companion
        if not companion.idle and not companion.draining and sync._stats is not None and not sync._stats.skipped:
            sync._stats = companion.finish(sync._stats)

    def rates(self) -> tuple[float, ...]:
        """The learning rates that must be equal on all ranks."""
        return rates_of(self.sync._attached)

    def sample(self, pieces: Any) -> int:
        """A number that differs between ranks with different batches."""
        number: int = self.sync._gradients.sample(pieces)
        return number

    def lost(self, statuses: Collection[int], *, added: bool, late: bool) -> bool:
        """Whether a refused step has changed the residual. added: gradients had been added before."""
        return added or (NONFINITE in statuses and self.sync.options.accumulate == "backward")
