"""The messages of a dense step, and what they take: whole or in buckets, in few bits, by nodes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from mpisparse.backends.flat import Slot
from mpisparse.bench.train import Case
from mpisparse.comm.regions import even_regions
from mpisparse.core.bucket import cut
from mpisparse.errors import ConfigurationError
from mpisparse.names import FLAT
from mpisparse.plan.costs import Log, Machine, Nodes, overlapped
from mpisparse.plan.simulator import READY
from mpisparse.plan.virtual_search import HEADER
from mpisparse.schemes import configure
from mpisparse.schemes.dense import Dense
from mpisparse.schemes.overlap import MB
from mpisparse.wire.codecs import CODECS
from mpisparse.wire.encoded import span_nbytes

ROW = 24  # bytes that each rank tells before a bucket


class DenseModel:
    """A case of scheme dense on layers of some sizes.

    backward: seconds of the backward that buckets overlap with.
    """

    def __init__(self, text: str, sizes: Sequence[int], backward: float = 0.0) -> None:
        options = configure("dense", **Case.parse(text).values)
        assert isinstance(options, Dense)
        self.options, self.backward = options, backward
        self.codec = CODECS[options.codec]
        if self.codec.variable:
            raise ConfigurationError(f"bench scaling knows the bytes of codecs of fixed size, not of {options.codec!r}")
        ends = list(accumulate(sizes))
        slots = [Slot("", end - size, end, (size,), (1,), torch.float32) for size, end in zip(sizes, ends, strict=True)]
        cuts = cut(slots, MB * options.bucket_mb) if options.overlap else [0, len(slots)]
        self.buckets = [(slots[a].begin, slots[b - 1].end) for a, b in pairwise(cuts)][::-1]  # as backward makes them
        self.n = ends[-1]

    @property
    def by_node(self) -> bool:
        """Whether nodes sum first."""
        return self.options.hierarchy != FLAT

    def logs(self, size: int, elements: int | None = None) -> list[Log]:
        """The messages of each bucket among so many ranks; elements: of a vector in one bucket, if it is not the model's."""
        buckets = self.buckets if elements is None else [(0, elements)]
        logs = []
        for lo, hi in buckets:
            log = Log(size)
            if self.options.overlap:
                log.add("allgather", ROW)
            log.add("allgather", HEADER)
            if self.options.codec == "fp32":
                log.add("allreduce", 4 * (hi - lo))
            else:
                spans = [(region.lo, region.hi) for region in even_regions(hi - lo, size)]
                log.add_reduction([span_nbytes(self.codec, span) for span in spans])
            logs.append(log)
        return logs

    def log(self, size: int) -> Log:
        """All messages of a step among so many ranks that exchange flat."""
        whole = Log(size)
        whole.add("allgather", READY)
        for log in self.logs(size):
            whole.messages += log.messages
        return whole

    def seconds(self, machine: Machine, size: int, computing: float, nodes: Nodes | None = None) -> float:
        """Predict the duration of a step of so many ranks, backward included; computing: of one rank, without messages."""
        roll_call = Log(size)
        roll_call.add("allgather", READY)
        called = machine.seconds(roll_call, 0.0)
        if nodes is not None and self.by_node:
            logs = self.logs(size // nodes.ranks, self.n // nodes.ranks)
            return self.backward + called + nodes.seconds(logs[0], self.n, computing / nodes.ranks)
        logs = self.logs(size)
        if not self.options.overlap:
            return self.backward + called + machine.seconds(logs[0], computing)
        ready = [self.backward * (self.n - lo) / self.n for lo, _ in self.buckets]
        wires = [
            machine.seconds(log, computing * (hi - lo) / self.n) for log, (lo, hi) in zip(logs, self.buckets, strict=True)
        ]
        return called + overlapped(ready, wires, self.backward)
