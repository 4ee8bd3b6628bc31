"""Tell which gradients are new, by hooks on the parameters, and whether the published one was zeroed before backward.

After a step p.grad is a view of the published buffer. A backward that adds into it without zero_grad would feed the
mean back as if it were a gradient. torch counts writes (`_version`) but does not say whose they were, so a few
published elements serve as witnesses: if someone wrote and all of them are zero, the buffer was zeroed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from mpisparse.model.layout import Layout
from mpisparse.model.published import Published


class Watch(Protocol):
    """What GradientSync attaches to a model's parameters until it is closed, or until another is made for one of them."""

    removed: bool

    def remove(self) -> None: ...


_watches: weakref.WeakKeyDictionary[Watch, Sequence[torch.nn.Parameter]] = weakref.WeakKeyDictionary()


def take_over(watch: Watch, params: Sequence[torch.nn.Parameter]) -> None:
    """Remove the watches of others that have any of these parameters."""
    mine = {id(p) for p in params}
    for other, theirs in list(_watches.items()):
        if other is not watch and not mine.isdisjoint(map(id, theirs)):
            other.remove()
            del _watches[other]
    _watches[watch] = params


class GradientWatch:
    """Records every gradient that backward accumulates; `on_gradient(i)` is called for each, if given.

    takes: on_gradient was given at construction, and takes gradients away during backward. One that is set later only looks
    at them: step() finds out if they were changed afterwards.
    """

    def __init__(self, layout: Layout, published: Published, on_gradient: Callable[[int], None] | None) -> None:
        self.layout = layout
        self.published = published
        self.on_gradient, self.takes = on_gradient, on_gradient is not None
        self.removed = False
        self.fresh = np.zeros(len(layout.slots), dtype=bool)
        self.unzeroed: set[int] = set()
        self.seen = published.written()
        self.zeroed = True
        take_over(self, layout.params)
        self.handles = [
            p.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                functools.partial(_notify, weakref.ref(self), i)
            )
            for i, p in enumerate(layout.params)
        ]

    def stale(self) -> list[int]:
        """The parameters whose gradient since the last step includes the published mean.

        A gradient that is read in step() may have been zeroed or dropped since; one taken during backward may not.
        """
        if self.takes:
            return sorted(self.unzeroed)
        if self.unzeroed and self.published.written() != self.seen and not any(map(self._is_set, self.published.witnesses)):
            self.unzeroed.clear()
        views, params = self.published.views, self.layout.members
        return sorted(i for i in self.unzeroed if params[i].grad is views[i])

    def reattach(self) -> None:
        """Recreate the views of the buffer that a conversion of the module, there and back, has cut off."""
        for i in self.published.cut_off():
            before, p = self.published.views[i], self.layout.members[i]
            view = self.published.renew(i)
            if p.grad is before and not self.fresh[i]:
                p.grad = view

    def restart(self) -> None:
        """Called when a step is done; the views hold the published mean now."""
        self.fresh[:] = False
        self.unzeroed.clear()
        self.zeroed = False
        self.seen = self.published.stamp

    def remove(self) -> None:
        """Remove the hooks from the parameters; also done when another watch takes one of them over."""
        self.removed = True
        for handle in self.handles:
            handle.remove()

    def note(self, i: int) -> None:
        """Called when a gradient of parameter i was accumulated into p.grad."""
        self.fresh[i] = True
        if self.layout.members[i].grad is self.published.views[i]:
            self._check_zeroed(i)
        if self.on_gradient is not None:
            self.on_gradient(i)

    def _check_zeroed(self, i: int) -> None:
        version = self.published.written()
        slot = self.layout.slots[i]
        if version != self.seen + 1:  # others wrote besides this accumulation: did they zero?
            self.zeroed = not any(
                self._is_set(index) for index in self.published.witnesses if not slot.begin <= index < slot.end
            )
        self.seen = version
        if self.zeroed and not self.takes:
            self.unzeroed.clear()
        elif not self.zeroed:
            self.unzeroed.add(i)

    def _is_set(self, index: int) -> bool:
        i = int(np.searchsorted(self.layout.ends, index, side="right"))
        if self.published.is_cut_off(i):  # what the module has, and may have zeroed, is the copy
            return bool(self.published.views[i].any())
        run = next(r for r in self.published.runs if r.begin <= index < r.end)
        return bool(run.buffer[index - run.begin] != 0)


def _notify(watch: weakref.ref[GradientWatch], i: int, _: torch.Tensor) -> None:
    alive = watch()
    if alive is not None:
        alive.note(i)
