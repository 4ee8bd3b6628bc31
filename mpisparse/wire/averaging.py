"""Flat vectors averaged over ranks at fixed owners, with the codec's errors of both ways kept here."""

from __future__ import annotations

from typing import Any

import torch

from mpisparse.backends.device import load_backend
from mpisparse.backends.flat import zeros
from mpisparse.backends.protocol import Backend
from mpisparse.comm.exchange import Exchange
from mpisparse.comm.regions import even_regions
from mpisparse.wire.codecs import CODECS
from mpisparse.wire.feedback import WholeAtOwners


class Averaging:
    """Replaces the vector in `work` by its mean over ranks.

    residual: what this rank added and has not sent. error: what it remembers as the owner of its stretch [lo, hi).
    """

    def __init__(
        self, n: int, exchange: Exchange, backend: Backend | None = None, device: torch.device | None = None
    ) -> None:
        self.n = n
        self.exchange = exchange
        self.backend: Backend = load_backend() if backend is None else backend
        region = even_regions(n, exchange.size)[exchange.rank]
        self.lo, self.hi = region.lo, region.hi
        self.work, self.residual = zeros(n, torch.float32, device), zeros(n, torch.float32, device)
        self.error, self._spare = (zeros(self.hi - self.lo, torch.float32, device) for _ in range(2))

    def average_(self, codec: str) -> None:
        """Average work plus the kept errors; keep the codec's new errors for the next call. Collective."""
        residual: Any = self.backend.array_of(self.residual)
        self.backend.add(residual, self.backend.array_of(self.work))
        reducer = self._reducer(codec, self.error, self._spare)
        everything: Any = range(self.n)
        reduced = reducer.reduce(self.exchange, self.backend, everything, residual, [])
        reduced.own.subtract_from(self.backend, residual)
        self.error, self._spare = self._spare, self.error

    def average_once_(self, codec: str, share: torch.Tensor) -> None:
        """Average work alone, without the kept errors; then keep `share` of the codec's new errors. Collective.

        share: a factor for each element.
        """
        error, left = (zeros(self.hi - self.lo, torch.float32, self.work.device) for _ in range(2))
        self.residual.addcmul_(self.work, share)
        everything, work = range(self.n), self.backend.array_of(self.work)
        reduced = self._reducer(codec, error, left).reduce(self.exchange, self.backend, everything, work, [])
        sent = torch.empty_like(self.work)
        reduced.own.write(self.backend, self.backend.array_of(sent))
        self.residual.addcmul_(sent, share, value=-1)
        self.error.addcmul_(left, share[self.lo : self.hi])

    def _reducer(self, codec: str, error: torch.Tensor, left: torch.Tensor) -> WholeAtOwners:
        """A reducer that writes the mean to work, and what it remembers to `left`."""
        self.backend.use_threads(torch.get_num_threads())
        target: Any = lambda: self.work  # noqa: E731
        remembered, spare = (self.backend.array_of(each) for each in (error, left))
        return WholeAtOwners(CODECS[codec], remembered, self.n, spare=spare, target=target)

    def scale_(self, factors: torch.Tensor) -> None:
        """Scale the kept errors to new units."""
        self.residual.mul_(factors)
        self.error.mul_(factors[self.lo : self.hi])

    def give_back_(self, lo: int, hi: int, share: torch.Tensor | None) -> None:
        """Keep the mean of [lo, hi), or `share` of it, on all ranks, because it is not used."""
        mean = self.work[lo:hi] if share is None else self.work[lo:hi] * share[lo:hi]
        self.residual[lo:hi] += mean

    def forget_(self) -> None:
        """Drop the kept errors."""
        self.residual.zero_()
        self.error.zero_()
