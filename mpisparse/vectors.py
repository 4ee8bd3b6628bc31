"""Averaging a plain vector, with no model: an aggregator and what it works on, put together."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from mpisparse.arrays import Ints
from mpisparse.backends.device import load_backend
from mpisparse.backends.flat import Held, Slot, zeros
from mpisparse.backends.kinds import FP32
from mpisparse.backends.protocol import Backend
from mpisparse.comm.exchange import Exchange
from mpisparse.comm.roll_call import answer_at_exit, meet
from mpisparse.comm.transport import end_job_on_uncaught_exception
from mpisparse.core.aggregator import Aggregator
from mpisparse.core.records import Parts
from mpisparse.errors import ConfigurationError
from mpisparse.schemes import configure
from mpisparse.schemes.options import Options, check_whole


class FlatSink:
    """The mean as one float32 vector, zero but at the last index written.

    Only the elements of the last and the new index are written, unless someone else wrote to the vector (torch counts that
    in `_version`): then all of it is cleared.
    """

    def __init__(self, n: int, backend: Backend) -> None:
        self.vector = zeros(n, torch.float32)
        self.backend = backend
        self.version = self.vector._version
        self.index: Ints | None = backend.empty(0, np.int64)  # None: every element was written

    def clear(self) -> None:
        """Make every element zero."""
        if self.index is None or self.vector._version != self.version:
            self.vector.zero_()
            self.version = self.vector._version
        else:
            self.backend.zero_at(self.vector.data_ptr(), FP32, len(self.vector), self.index)
        self.index = self.backend.empty(0, np.int64)

    def write(self, index: Any, mean: Any, acc: Any) -> None:
        """Publish the mean at an index; the whole mean is in the vector already. No float32 is rounded."""
        if isinstance(index, range):
            self.index = None
            return
        self.clear()
        self.backend.publish_at(self.vector.data_ptr(), FP32, len(self.vector), index, mean)
        self.index = index

    def whole(self) -> torch.Tensor:
        """The vector itself."""
        return self.vector

    def published(self) -> torch.Tensor:
        """The vector itself."""
        return self.vector


class NoSink:
    """Publishes nothing: the exchange itself moves what it is of."""

    def clear(self) -> None:
        """Nothing to clear."""

    def write(self, index: Any, mean: Any, acc: Any) -> None:
        """Nothing to write."""

    def whole(self) -> torch.Tensor:
        return torch.empty(0)

    def published(self) -> torch.Tensor:
        return torch.empty(0)


def aggregator(
    n: int,
    *,
    scheme: str = "exdyna",
    density: float | None = None,
    codec: str | None = None,
    comm: Any = None,
    staleness: int = 0,
    **options: Any,
) -> Aggregator:
    """Make an aggregator of float32 vectors of n elements, on the CPU: `mean = aggregator.step(vector)`. Collective.

    Options are those of GradientSync that need no model. staleness: 1 delivers while the caller computes (scheme "exdyna").
    The mean of what was given is then returned two steps later: indices travel one step ahead of their values.
    """
    end_job_on_uncaught_exception(comm)
    exchange = Exchange(comm)
    meet(exchange, "aggregator")
    made: Aggregator | None = None
    error: ConfigurationError | None = None
    chosen = Options()
    try:
        check_whole("n", n, 1)
        check_whole("staleness", staleness, 0)
        chosen = configure(scheme, density=density, codec=codec, **options)
        check_plain(chosen)
        backend: Backend = load_backend()
    except ConfigurationError as caught:
        error = caught
    try:
        exchange.raise_together(error)
        check_alike(exchange, f"n {n}, scheme {scheme}, staleness {staleness}", chosen)
        exchange.segment_nbytes = chosen.segment_nbytes
        slot = Slot("vector", 0, n, (n,), (1,), torch.float32)
        parts = Parts(zeros(n, torch.float32), [slot], Held(n), FlatSink(n, backend), exchange, backend)
        made = chosen.build(parts).aggregator if staleness == 0 else chosen.build_in_flight(parts, staleness)
    finally:
        if made is None:
            exchange.close()
    answer_at_exit(exchange)
    made.density, made.density_of = chosen.density, chosen.density_of
    return made


def check_plain(options: Options) -> None:
    """Raise ConfigurationError for options that say something of a model."""
    for name, value in vars(options).items():
        if callable(value):
            raise ConfigurationError(f"{name} is for a model's loss, and there is only a vector; leave it out")
    if options.fixed_hierarchy != "flat":
        raise ConfigurationError(f"hierarchy={options.hierarchy!r} is for GradientSync; leave it out")
    if options.accumulate != "step":
        raise ConfigurationError(f"accumulate={options.accumulate!r} is for a model's backward; leave it out")
    if options.with_backward:
        raise ConfigurationError(f"{options.with_backward} is for GradientSync, which sees a model's backward; leave it out")
    if options.nonfinite != "raise":
        raise ConfigurationError(f"a vector that is not finite is refused: leave nonfinite={options.nonfinite!r} out")


def check_alike(exchange: Exchange, what: str, options: Options) -> None:
    """Raise ConfigurationError on all ranks unless all were given the same; collective."""
    texts = exchange.gather_texts(f"{what}, options {json.dumps(options.values(), sort_keys=True)}")
    other = next((rank for rank, text in enumerate(texts) if text != texts[0]), 0)
    if other:
        raise ConfigurationError(
            f"r{exchange.rank} | the ranks differ: rank 0 has {texts[0]!r}, rank {other} has {texts[other]!r}; "
            "pass the same on every rank"
        )
