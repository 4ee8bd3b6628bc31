"""Buckets of gradients that are sent while backward still computes the others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mpisparse.arrays import Bools
from mpisparse.backends.flat import Pieces, collect
from mpisparse.comm.inflight import ONE_THREAD
from mpisparse.core.buckets import Bucketed
from mpisparse.model.grad_hooks import GradientWatch
from mpisparse.model.layout import Layout

if TYPE_CHECKING:
    from mpisparse.model.published import Published


class Loop(Protocol):
    """Settings of the training loop. k: elements to select; syncing: step() follows the current backward.

    scaler: the GradScaler whose scale gradients still have when they are sent, if there is one.
    """

    @property
    def k(self) -> int: ...
    @property
    def syncing(self) -> bool: ...
    @property
    def scaler(self) -> Any: ...


class Early:
    """Sends a bucket when backward has computed its last gradient and all earlier buckets are sent.

    look: checks what is frozen now, on which k depends.
    """

    def __init__(
        self, layout: Layout, published: Published, watch: GradientWatch, buckets: Bucketed, loop: Loop,
        look: Callable[[], None],
    ) -> None:  # fmt: skip
        self.layout = layout
        self.published = published
        self.watch = watch
        self.buckets = buckets
        self.loop = loop
        self.look = look
        if buckets.parts.exchange.rank == 0:
            _warn(buckets)
        self._bucket_of = [b for b, bucket in enumerate(buckets.buckets) for _ in range(bucket.first, bucket.last)]
        self._begin()

    def _begin(self) -> None:
        """Reset at the beginning of a step."""
        self._round = self.buckets.rounds
        self._came: dict[int, None] = {}  # parameters in the order in which backward computed their gradients
        self._twice: int | None = None  # a parameter whose gradient was computed twice
        self._missing = [bucket.last - bucket.first for bucket in self.buckets.buckets]
        self._sent: dict[int, tuple[torch.Tensor, int]] = {}  # gradients as they were sent, with torch's count of writes
        self._k = 0  # of all buckets, when they were sent
        self._unscaled = False

    def note(self, i: int) -> None:
        """Called when backward has computed the gradient of parameter i."""
        if self._round != self.buckets.rounds:
            self._begin()
        if not self.loop.syncing:
            return
        if i in self._came:
            self._twice = i
            return
        self._came[i] = None
        self._missing[self._bucket_of[i]] -= 1
        while self.buckets.overlaps and (number := self.buckets.next_out()) is not None and self._send(number):
            pass

    def _send(self, number: int) -> bool:
        """Send a bucket if it is complete and there is no objection; step() reports objections."""
        bucket = self.buckets.buckets[number]
        if self._missing[number] or bucket.held.stretches:
            return False
        a, b = bucket.first, bucket.last
        grads = [p.grad for p in self.layout.members[a:b]]
        for slot, grad in zip(bucket.slots, grads, strict=True):
            if grad is None or not slot.takes(grad) or grad.device != self.layout.device:
                return False
        if not self._sent:
            self.look()
            self._k = self.loop.k
        for i, grad in enumerate(grads, a):
            self._sent[i] = grad, grad._version
        self.buckets.total = self._k
        self.buckets.send(number, self._pieces(number, grads))
        return True

    def _pieces(self, number: int, grads: Sequence[torch.Tensor]) -> Pieces:
        """The gradients of a bucket, unscaled as the scaler will unscale them."""
        bucket = self.buckets.buckets[number]
        if (scaler := self.loop.scaler) is not None:
            inverse = torch.tensor(scaler.get_scale(), dtype=torch.float32).double().reciprocal().float()
            grads = [grad * inverse.to(grad.dtype if grad.dtype is torch.float64 else torch.float32) for grad in grads]
        ends = self.layout.ends[bucket.first : bucket.last] - bucket.lo
        return collect(bucket.slots, ends, self.layout.kinds[bucket.first : bucket.last], grads)

    def unscaled(self) -> None:
        """Called when the scaler has written to the gradients, which is expected."""
        self._unscaled = True
        self._sent = {i: (grad, grad._version) for i, (grad, _) in self._sent.items()}
        self.watch.seen = self.published.written()

    def trouble(self, grads: Sequence[torch.Tensor | None], frozen: Bools) -> str:
        """Why the buckets in flight do not hold this step's gradients, or an empty text. Begins the step."""
        if self._round != self.buckets.rounds:
            return ""
        last = {self._bucket_of[i]: at for at, i in enumerate(self._came)}
        known = range(len(self.buckets.buckets))
        self.buckets.proposed = sorted(known, key=lambda b: (self._missing[b] > 0, last.get(b, -1), -b))
        if self._twice is not None:
            return (
                f"backward made the gradient of {self._name(self._twice)} twice before step(): with overlap=True it sets "
                "out the first time. Put every backward but the last before a step into `with sync.no_sync():`; if "
                "activation checkpointing computes a layer twice, pass use_reentrant=False to it"
            )
        late = next((i for i in self._sent if frozen[i]), None)
        if late is not None:
            return f"{self._name(late)} was frozen after its gradient had set out; freeze parameters before backward"
        if self._sent and self.loop.k != self._k:
            return (
                f"{self.loop.k} elements are to be selected, and it was {self._k} when gradients set out in backward "
                "(overlap=True): change the density, or freeze parameters, before backward"
            )
        if self._sent and self.loop.scaler is not None and not self._unscaled:
            return (
                "gradients set out unscaled during backward (overlap=True), those in p.grad are still scaled: call "
                "scaler.unscale_(optimizer) before sync.step(), or leave both to scaler.step(optimizer)"
            )
        for i, (grad, version) in self._sent.items():
            writes, before = grad._version, version
            if grad is self.published.views[i]:
                writes, before = self.published.written(), self.watch.seen
            if grads[i] is not grad or writes != before:
                return (
                    f"the gradient of {self._name(i)} was changed after it had been sent during backward (overlap=True): to "
                    "clip, call sync.step() after backward and then clip what it published; or leave overlap out"
                )
        return ""

    def _name(self, i: int) -> str:
        return self.layout.slots[i].name


def _warn(buckets: Bucketed) -> None:
    """Warn if nothing will overlap, and say why."""
    if buckets.parts.exchange.size == 1:
        return
    if not buckets.overlaps:
        warnings.warn(
            f"overlap=True: {ONE_THREAD}, so buckets are exchanged in step(); results are the same",
            stacklevel=4,
        )
    elif len(buckets.buckets) == 1:
        warnings.warn(
            "overlap=True: bucket_mb holds the whole model, so nothing is sent before backward ends; make it smaller",
            stacklevel=4,
        )
