"""Scale up the selected values to compensate for the dropped ones, instead of keeping a residual."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mpisparse.arrays import Floats, Ints
from mpisparse.core.stages import Sent, Stage
from mpisparse.select.pickers import layer_sums, values_of

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
        factors = self.factors(backend, live.acc, backend.to_host(sent.index))
        return sent._replace(values=sent.values * backend.from_host(factors))

    def factors(self, backend: Backend, acc: Any, union: Ints) -> Floats:
        """The factor for every element of the union, which is on the host."""
        sent = np.abs(values_of(backend, acc, union)).astype(np.float64)
        edges = np.append(0, self.ends)
        cuts = np.searchsorted(union, edges)
        kept = np.diff(np.append(0.0, np.cumsum(sent))[cuts])
        whole = layer_sums(backend, acc, list(pairwise(edges.tolist())))[:, 0]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(kept > 0, np.minimum(whole / kept, self.cap), 1.0)
        factors: Floats = np.repeat(ratio, np.diff(cuts)).astype(np.float32)
        return factors
