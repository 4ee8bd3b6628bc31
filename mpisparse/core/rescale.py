"""Scale up the selected values to compensate for the dropped ones, instead of keeping a residual."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from mpisparse.arrays import Floats, Ints
from mpisparse.core.stages import Sent, Stage

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.select.view import Live, View


class Rescale(Stage):
    """Scales what is sent of each layer by all magnitudes in it over those that are sent, at most by `cap`."""

    def __init__(self, ends: Ints, cap: float) -> None:
        self.ends = ends
        self.cap = cap

    def send(self, backend: Backend, view: View, sent: Sent) -> Sent:
        live: Live = view  # type: ignore[assignment]  # refused in flight: the whole accumulator is read
        return sent._replace(values=sent.values * self.factors(live.acc, sent.index))

    def factors(self, acc: Floats, union: Ints) -> Floats:
        """The factor for every element of the union."""
        sent = np.abs(acc[union]).astype(np.float64)
        edges = np.append(0, self.ends)
        cuts = np.searchsorted(union, edges)
        kept = np.diff(np.append(0.0, np.cumsum(sent))[cuts])
        whole = np.array([np.abs(acc[a:b]).sum(dtype=np.float64) for a, b in pairwise(edges)])
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(kept > 0, np.minimum(whole / kept, self.cap), 1.0)
        factors: Floats = np.repeat(ratio, np.diff(cuts)).astype(np.float32)
        return factors
