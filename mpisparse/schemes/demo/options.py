"""DeMo: decoupled momentum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mpisparse.core.aggregator import Aggregator
from mpisparse.core.records import Parts
from mpisparse.errors import ConfigurationError
from mpisparse.schemes.companion import Scheme, Site
from mpisparse.schemes.demo.cosines import Cosines
from mpisparse.schemes.demo.parts import Leaving, SignOfMean, Waves
from mpisparse.schemes.options import Options, check_share, check_whole
from mpisparse.select.chunks import ChunkSelection
from mpisparse.wire.codecs import CODECS, codec_names
from mpisparse.wire.gathered import Gathered


@dataclass(frozen=True)
class Demo(Options):
    """Every rank adds its gradient to its own momentum, sends the momentum's largest cosine coefficients and removes them.

    The sign of the mean is published as the gradient, for plain SGD.

    density: share of each tile's coefficients that is sent, at least one.
    decay: factor on the momentum in every step.
    chunk: height and width of the tiles whose cosine transforms are sent.
    """

    on_device: ClassVar[bool] = True
    publishes_mean: ClassVar[bool] = False
    remembering: ClassVar[str] = ""
    flat_only: ClassVar[str] = "it sends tiles of parameters, which a shard of the vector cuts through"

    density: float = 1 / 128
    decay: float = 0.999
    chunk: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("decay", self.decay)
        check_whole("chunk", self.chunk, 1)
        if CODECS[self.codec].blended:
            raise ConfigurationError(
                f'scheme "demo" has its own momentum: codec {self.codec!r} would blend what is sent with what was sent '
                "before; choose it without momentum-"
            )

    @property
    def needs_whole_gradient(self) -> bool:
        return True

    @property
    def unmirrored(self) -> str:
        return "a rank does not hear which of its waves another rank has sent"

    def codecs(self) -> Sequence[str]:
        return codec_names(blended=False)

    def build(self, parts: Parts, site: Site | None = None) -> Scheme:
        n, cosines = len(parts.residual), Cosines(parts.slots, self.chunk)
        aggregator = Aggregator(
            parts,
            scorer=Waves(parts.residual, parts.backend, parts.slots, cosines, self.decay),
            selection=ChunkSelection(n, cosines.stretches),
            reducer=SignOfMean(Gathered(CODECS[self.codec], n), parts.carrier(late=True), cosines, parts.sink.whole),
            stages=[Leaving(cosines, parts.residual.device)],
        )
        return Scheme(aggregator)
