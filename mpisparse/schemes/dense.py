"""Everything in every step: the baseline of the other schemes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mpisparse.arrays import State
from mpisparse.backends.flat import Held, Pieces, Slot, add_sparse_
from mpisparse.backends.protocol import Backend
from mpisparse.comm.regions import even_regions
from mpisparse.core.aggregator import Aggregator
from mpisparse.core.records import Parts
from mpisparse.core.stages import Sent, Stage
from mpisparse.errors import ConfigurationError
from mpisparse.schemes.companion import Scheme, Site
from mpisparse.schemes.overlap import Overlapping
from mpisparse.select.candidates import NONE, Candidates
from mpisparse.select.everything import Everything
from mpisparse.select.scorers import Magnitude, Scorer
from mpisparse.select.view import VectorKeys
from mpisparse.wire.codecs import CODECS, codec_names
from mpisparse.wire.codecs.protocol import Codec
from mpisparse.wire.encoded import Encoded, Rooms, chunk_kernels, encode_sum
from mpisparse.wire.feedback import WholeAtOwners
from mpisparse.wire.reduction import Divided, Reduced, Reducer, Whole


class Straight(Magnitude):
    """Writes gradients, divided by the number of ranks, to where their mean goes, unless the accumulator holds something."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts.residual, parts.backend)
        self.parts = parts
        self.waits = False
        self.usual = self.keys

    def accumulate(self, pieces: Pieces | None, lo: int, hi: int, floor: float) -> Candidates:
        frozen = bool(self.parts.held.stretches)
        if pieces is None or pieces.sparse or self.waits or frozen:
            self.keys, self.waits = self.usual, frozen
            return super().accumulate(pieces, lo, hi, floor)
        backend: Any = self.backend
        target = backend.array_of(self.parts.sink.whole())
        bad = backend.divide_into(target, *pieces.dense, self.parts.exchange.size)
        self.keys = VectorKeys(backend, Divided(target))  # type: ignore[arg-type]  # nothing is selected in it
        return NONE._replace(bad=bad)

    def add(self, i: int, slot: Slot, grad: torch.Tensor) -> int:
        self.waits = True
        return super().add(i, slot, grad)

    def load(self, state: State) -> None:
        self.waits = True


class Packing(Magnitude):
    """Gradients are added and encoded in one pass; only what the codec does not send stays in the accumulator."""

    def __init__(self, parts: Parts, codec: Codec, kernels: Any, rooms: Rooms) -> None:
        super().__init__(parts.residual, parts.backend)
        self.codec = codec
        self.kernels = kernels
        self.rooms = rooms
        self.spans = [(region.lo, region.hi) for region in even_regions(len(parts.residual), parts.exchange.size)]
        n = len(parts.residual)
        self.added = np.zeros(1, dtype=np.uint64), np.array([n]), np.zeros(1, dtype=np.uint8)  # path "backward"

    def accumulate(self, pieces: Pieces | None, lo: int, hi: int, floor: float) -> Candidates:
        bads = [] if pieces is None else [add_sparse_(self.residual, slot, grad) for slot, grad in pieces.sparse]
        dense = self.added if pieces is None else pieces.dense
        own, bad = encode_sum(self.codec, self.kernels, self.acc, dense, self.spans, self.rooms)
        self.keys = VectorKeys(self.backend, own)  # type: ignore[arg-type]  # nothing is selected in it
        return NONE._replace(bad=next((b for b in (*bads, bad) if b >= 0), -1))


class AllSent(Stage):
    """Everything is sent; only the codec's error stays."""

    def __init__(self, held: Held) -> None:
        self.held = held

    def settle(self, backend: Backend, acc: Any, union: Any, sent: Sent, reduced: Reduced) -> Stage:
        if isinstance(sent.values, Divided):
            return self
        if reduced.own is None:
            backend.fill(acc, 0.0)
            return self
        if not isinstance(sent.values, Encoded):
            reduced.own.subtract_from(backend, acc)
        for start, stop in self.held.stretches:  # a codec may decode zeros to other values, the same on all ranks
            rest = acc[start:stop]
            rest += reduced.mean[start:stop]
            backend.fill(reduced.mean[start:stop], 0.0)  # neither published nor rounded
        return self


@dataclass(frozen=True)
class Dense(Overlapping):
    """All elements in every step: float32 in one Allreduce, other codecs through owners, with error feedback both ways."""

    on_device = True
    density: float = 1.0
    remembering = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.density != 1.0:
            raise ConfigurationError(f'scheme "dense" sends everything: density must be 1, got {self.density!r}')
        if CODECS[self.codec].blended:
            raise ConfigurationError(
                f'scheme "dense" leaves momentum to the optimizer: codec {self.codec!r} would blend what is sent with what '
                "was sent before; choose it without momentum-"
            )

    @property
    def unmirrored(self) -> str:
        return "all of it is delivered in each step"

    def codecs(self) -> Sequence[str]:
        return codec_names(blended=False)

    def build(self, parts: Parts, site: Site | None = None) -> Scheme:
        scorer, reducer = self._parts(parts)
        aggregator = Aggregator(
            parts,
            scorer=scorer,
            selection=Everything(len(parts.residual), late=parts.carrier(late=False) is not parts.backend),
            reducer=reducer,
            stages=[AllSent(parts.held)],
        )
        return Scheme(aggregator)

    def _parts(self, parts: Parts) -> tuple[Scorer, Reducer]:
        """float32 leaves no error; what rounding to a parameter's type leaves stays in the accumulator."""
        plain = Magnitude(parts.residual, parts.backend)
        if self.codec == "fp32":
            exact = all(slot.dtype is torch.float32 for slot in parts.slots) and parts.backend.name != "cuda"
            exact = exact and not parts.survives  # values in the accumulator can be sent again
            return Straight(parts) if exact else plain, Whole(parts.sink.whole)
        codec, exchange = CODECS[self.codec], parts.exchange
        region = even_regions(len(parts.residual), exchange.size)[exchange.rank]
        error, spare = (parts.zeros(region.hi - region.lo) for _ in range(2))
        kernels = None if parts.survives else chunk_kernels(codec, parts.backend)
        rooms = None if kernels is None else Rooms()
        reducer = WholeAtOwners(codec, error, len(parts.residual), rooms=rooms, spare=spare, target=parts.sink.whole)
        return plain if rooms is None else Packing(parts, codec, kernels, rooms), reducer
