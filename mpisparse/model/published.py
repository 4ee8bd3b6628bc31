"""The mean gradient of a model, as the views that become p.grad."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpisparse.arrays import Ints
from mpisparse.backends.flat import KINDS, zeros
from mpisparse.backends.kinds import BF16, FP16
from mpisparse.model.layout import Layout
from mpisparse.model.shards import Shard

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend

WITNESSES = 8


@dataclass
class TypeRun:
    """A stretch of parameters of one type, whose published gradients share one buffer."""

    begin: int
    end: int
    buffer: torch.Tensor

    @property
    def kind(self) -> int:
        return KINDS[self.buffer.dtype]

    @property
    def origin(self) -> int:
        """The address that the flat vector's first element would have if all of it were of this run's type."""
        return self.buffer.data_ptr() - self.begin * self.buffer.itemsize


class Published:
    """The mean gradient: zero except at the last union. One buffer per run of equal types, with one view per parameter.

    Only the positions of the last and the new union are written. If someone else wrote to the views (torch counts that in
    `_version`), the whole buffer is cleared.
    """

    def __init__(self, layout: Layout, backend: Backend) -> None:
        self.backend = backend
        self.runs: list[TypeRun] = []
        self.run_of: list[TypeRun] = []
        for slot in layout.slots:
            if not self.runs or self.runs[-1].buffer.dtype != slot.dtype:
                self.runs.append(TypeRun(slot.begin, slot.begin, torch.empty(0, dtype=slot.dtype)))
            self.runs[-1].end = slot.end
            self.run_of.append(self.runs[-1])
        for run in self.runs:
            run.buffer = zeros(run.end - run.begin, run.buffer.dtype, layout.device)
        self.slots = layout.slots
        self.views = [slot.view(run.buffer, run.begin) for slot, run in zip(self.slots, self.run_of, strict=True)]
        self.addresses = [view.data_ptr() for view in self.views]  # fixed for the lifetime of this object
        self.union: Any = backend.empty(0, np.int64)  # an ascending index, or the range of all elements
        self.total = zeros(0, torch.float32)
        self.uncounted = any(isinstance(member, Shard) for member in layout.members)  # torch counts no writes to these
        self.rounds = any(run.kind in (FP16, BF16) for run in self.runs)
        self.version = self.written()
        self._done()

    def written(self) -> int:
        """How often anyone but this object wrote into the buffers."""
        return sum(run.buffer._version for run in self.runs)

    def is_cut_off(self, i: int) -> bool:
        """Whether a view has other memory than the buffer, as after converting a module, which reallocates its gradients."""
        return self.views[i].data_ptr() != self.addresses[i]

    def cut_off(self) -> list[int]:
        """The parameters whose views are cut off from the buffer."""
        pairs = zip(self.views, self.addresses, strict=True)
        return [i for i, (view, address) in enumerate(pairs) if view.data_ptr() != address]

    def renew(self, i: int) -> torch.Tensor:
        """Recreate a view of the buffer; the former view lives on as a separate tensor."""
        run = self.run_of[i]
        self.views[i] = self.slots[i].view(run.buffer, run.begin)
        self.addresses[i] = self.views[i].data_ptr()
        return self.views[i]

    def clear(self) -> None:
        """Make every element zero."""
        self._zero()
        self.union = self.backend.empty(0, np.int64)
        self._done()

    def _zero(self) -> None:
        """Write zeros where anything may be published."""
        if self.uncounted or self.written() != self.version:
            for run in self.runs:
                run.buffer.zero_()
            self.version = self.written()
        else:
            for run, index in self._split(self.union):
                self.backend.zero_at(run.origin, run.kind, run.end, index)

    def write(self, index: Any, mean: Any, acc: Any) -> None:
        """Publish the mean at an index, zeros elsewhere; acc gets back what rounding to a parameter's type left."""
        if isinstance(index, range):
            self._fill(acc)
            return
        self._zero()
        self.union = index
        start = 0
        for run, part in self._split(index):
            values = mean[start : start + len(part)]
            self.backend.publish_at(run.origin, run.kind, run.end, part, values)
            start += len(part)
        if self.rounds:
            self.backend.add_at(acc, index, mean)
        self._done()

    def whole(self) -> torch.Tensor:
        """A float32 vector to sum the whole mean into: the buffer itself if it is one float32 buffer."""
        direct = len(self.runs) == 1 and self.runs[0].buffer.dtype == torch.float32
        self.total = self.runs[0].buffer if direct else zeros(self.runs[-1].end, torch.float32, self.runs[0].buffer.device)
        return self.total

    def published(self) -> torch.Tensor:
        """The mean as one flat float32 vector: the buffer itself if it is one float32 buffer."""
        return self.runs[0].buffer.float() if len(self.runs) == 1 else torch.cat([run.buffer.float() for run in self.runs])

    def _fill(self, acc: Any) -> None:
        """Publish the whole mean, which is in what whole() returned."""
        for run in self.runs:
            if run.buffer is self.total:
                continue
            part = self.total[run.begin : run.end]
            limit = min(torch.finfo(run.buffer.dtype).max, torch.finfo(torch.float32).max)
            run.buffer.copy_(part.clamp(-limit, limit))
            left = self.backend.array_of(part - run.buffer.to(torch.float32))
            self.backend.add(acc[run.begin : run.end], left)
        self.version = self.written() - 1  # every element was written, so the next clear must be of the whole buffer
        self.union = range(self.runs[-1].end)
        self._done()

    def _done(self) -> None:
        """Record the count of writes; of a whole mean also the witnesses, which are chosen by its values."""
        self.stamp = self.written()
        self._witnesses = self.sample(WITNESSES) if isinstance(self.union, range) else None

    @property
    def witnesses(self) -> list[int]:
        """A few published elements that show whether anyone zeroed the buffer; chosen on first use."""
        if self._witnesses is None:
            self._witnesses = self.sample(WITNESSES)
        return self._witnesses

    def _split(self, union: Ints) -> list[tuple[TypeRun, Ints]]:
        """The union's share of every run."""
        if len(self.runs) == 1:
            return [(self.runs[0], union)]
        cuts = [0, *self.backend.search(union, np.array([run.begin for run in self.runs[1:]])).tolist(), len(union)]
        return [(run, union[a:b]) for run, (a, b) in zip(self.runs, pairwise(cuts), strict=True) if a < b]

    def sample(self, count: int) -> list[int]:
        """About `count` indices of the union, at least one if there is one; of a whole mean, some that are not zero."""
        if isinstance(self.union, range):
            spread = [run.begin + i for run in self.runs for i in _nonzero(run.buffer, count)]
            return spread[:: max(1, len(spread) // count)][:count]
        places = np.arange(0, len(self.union), max(1, len(self.union) // count))[:count]
        return [int(i) for i in self.backend.pick(self.union, places)]


def _nonzero(values: torch.Tensor, count: int) -> list[int]:
    """At most `count` indices of nonzero values, searched in a few places only."""
    places = torch.arange(0, len(values), max(1, len(values) // (16 * count)), device=values.device)
    found: list[int] = places[values[places] != 0][:count].tolist()
    return found
