"""Options of schemes whose exchange may overlap with backward: the vector travels in buckets."""

from __future__ import annotations

from dataclasses import dataclass

from mpisparse.core.bucket import cut
from mpisparse.core.buckets import Bucketed
from mpisparse.core.records import Parts
from mpisparse.errors import ConfigurationError
from mpisparse.schemes.companion import Scheme, Site
from mpisparse.schemes.options import Options, check_flag, check_positive

MB = 1e6


@dataclass(frozen=True)
class Overlapping(Options):
    """Exchange in buckets while backward is running.

    overlap: True sends the gradient in buckets, each as soon as backward has computed its last gradient; the bits are the
        same as if these buckets were sent in step().
    bucket_mb: largest size of a bucket of several parameters, in MB (1e6 bytes) of float32; with overlap=True only.
    """

    overlap: bool = False
    bucket_mb: float = 8.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("overlap", self.overlap)
        check_positive("bucket_mb", self.bucket_mb, optional=False)
        if self.overlap and self.accumulate != "step":
            raise ConfigurationError(
                'overlap=True reads gradients while backward makes them by itself: leave accumulate="backward" out'
            )

    def _check_hierarchy(self) -> None:
        super()._check_hierarchy()
        if self.overlap:
            raise ConfigurationError(
                f"hierarchy={self.hierarchy!r} sums whole gradients in the node first, so that nothing can be sent during "
                "backward: leave overlap=True out, or the hierarchy"
            )

    @property
    def in_flight(self) -> str:
        return "overlap=True" if self.overlap else super().in_flight

    @property
    def with_backward(self) -> str:
        return "overlap=True" if self.overlap else ""

    def without_effect(self) -> dict[str, str]:
        alone = {} if self.overlap else {"bucket_mb": "there are buckets with overlap=True only; choose that"}
        return super().without_effect() | alone

    def build_for_model(self, parts: Parts, site: Site) -> Scheme:
        if not self.overlap:
            return self.build(parts, site)
        cuts = cut(parts.slots, MB * self.bucket_mb)
        return Scheme(Bucketed(parts, cuts, lambda part: self.build(part, site).aggregator))
