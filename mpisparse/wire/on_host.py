"""A reduction in host memory of values on a device; for selected elements only, which are few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpisparse.arrays import Floats, State
from mpisparse.backends.device import load_backend
from mpisparse.wire.encoded import Encoded
from mpisparse.wire.reduction import Reduced, Reducer

if TYPE_CHECKING:
    from mpisparse.backends.protocol import Backend
    from mpisparse.comm.exchange import Exchange
    from mpisparse.comm.regions import Region


@dataclass(frozen=True)
class OnHost(Reducer):
    """Runs another reducer with the host's kernels; that reducer's memory is on the host."""

    inner: Reducer
    host: Backend

    def reduce(self, exchange: Exchange, backend: Backend, index: Any, values: Any, regions: Sequence[Region]) -> Reduced:
        here = backend.to_host(index), backend.to_host(values)
        reduced = self.inner.reduce(exchange, self.host, *here, regions)
        return landed(backend, reduced)

    def after(self, backend: Backend, reduced: Reduced) -> Reducer:
        return replace(self, inner=self.inner.after(self.host, reduced))

    def state(self) -> State:
        return self.inner.state()

    def check(self, state: State) -> None:
        self.inner.check(state)

    def loaded(self, state: State) -> Reducer:
        return replace(self, inner=self.inner.loaded(state))

    def at_rest(self, state: State, residual: Floats, rank: int, size: int) -> State:
        return self.inner.at_rest(state, residual, rank, size)

    def resize(self, states: Sequence[State]) -> State:
        return self.inner.resize(states)


def on_host(backend: Backend, reducer: Reducer) -> Reducer:
    """A reducer of arrays on the host, for arrays of any backend."""
    return OnHost(reducer, load_backend()) if backend.name == "cuda" else reducer


def landed(backend: Backend, reduced: Reduced) -> Reduced:
    """Return the result in a backend's memory, except for what the reducer remembers."""
    moved: dict[str, Any] = {}
    for name in ("index", "mean", "left", "own", "kept_index", "kept"):
        value = getattr(reduced, name)
        if isinstance(value, Encoded):
            moved[name] = value._replace(payload=backend.from_host(value.payload))
        elif isinstance(value, np.ndarray):
            moved[name] = backend.from_host(value)
    return reduced._replace(**moved)
