"""A warning if optimizer.step() ran on gradients, or weights, that were not exchanged."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_post_hook

from mpisparse.schemes.optimizers import is_inner_step

ALLOWED = 1  # such steps without a warning, because a first one may be a trial

_live: weakref.WeakSet[Unexchanged] = weakref.WeakSet()


class Unexchanged:
    """Counts the optimizer steps without an exchange, for one GradientSync.

    since: if weights are exchanged, the steps of each optimizer since the last exchange.
    """

    def __init__(self, sync: Any) -> None:
        if not _live:
            _listen()
        self._sync = weakref.ref(sync)
        self._places = {id(getattr(p, "param", p)): i for i, p in enumerate(sync._layout.params)}  # of a Shard, the whole
        self._held: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self.since: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.count = 0
        _live.add(self)

    def exchanged(self) -> None:
        """Called when an exchange, or its substitute, was done."""
        if self.since:
            self.since.clear()

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """Called when an optimizer has done a step: count it if it should have waited for an exchange, and warn once."""
        sync = self._sync()
        if sync is None or self.count > ALLOWED or self._excused(sync, optimizer):
            return
        if optimizer not in self._held:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            self._held[optimizer] = [self._places[id(p)] for p in params if id(p) in self._places]
        held = self._held[optimizer]
        if not held or not self._forgotten(sync, optimizer, held):
            return
        self.count += 1
        if self.count > ALLOWED and sync.rank == 0:
            when = "after" if sync.exchanges_weights else "before"
            warnings.warn(
                f"optimizer.step() ran again without an exchange, so that the replicas drift apart: call sync.step() {when} "
                "each optimizer.step(), or mpisparse.attach(optimizer, sync) once",
                stacklevel=2,
            )

    @staticmethod
    def _excused(sync: Any, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a step is none of ours: of an attached optimizer, or one that exchanges by itself; of a scheme itself, in
        no_sync(), or after close()."""
        tied = getattr(optimizer, "exchanges", False) or any(one.optimizer is optimizer for one in sync._attached)
        return tied or sync._hooks.removed or sync._companion.draining or not sync._syncing

    def _forgotten(self, sync: Any, optimizer: torch.optim.Optimizer, held: list[int]) -> bool:
        """Whether there are gradients that no exchange took; if weights are exchanged, whether this is the second step."""
        if sync.exchanges_weights:
            self.since[optimizer] = self.since.get(optimizer, 0) + 1
            return self.since[optimizer] > 1
        fresh, params = sync._gradients.watch.fresh, sync._layout.params
        return any(fresh[i] and params[i].grad is not None for i in held)


def _listen() -> None:
    """Watch the steps of all optimizers from now on; once."""
    global _listening
    if not _listening:
        _listening = True
        register_optimizer_step_post_hook(_after_step)


_listening = False


@_disable_dynamo  # a compiled optimizer.step() calls it, too
def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if is_inner_step(optimizer):
        return
    for one in list(_live):
        one.look(optimizer)
