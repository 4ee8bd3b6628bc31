"""Options common to all schemes, and checks of values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from mpisparse.core.aggregator import Aggregator
from mpisparse.core.records import Parts
from mpisparse.errors import ConfigurationError, check_choice
from mpisparse.names import BLENDED, FLAT, HIERARCHIES
from mpisparse.schemes.companion import Scheme, Site
from mpisparse.select.plans import Selection
from mpisparse.wire.codecs import CODECS, codec_names
from mpisparse.wire.reduction import Reducer

if TYPE_CHECKING:
    from mpisparse.comm.hierarchy import Nodes

SEGMENT_NBYTES = 1 << 30
BUFFERS = ("rank0", "average", "own")


def check_density(density: object) -> float:
    """Return the density as a float; raise unless it is in (0, 1]."""
    if isinstance(density, bool) or not isinstance(density, int | float):
        raise ConfigurationError(f"density must be a number in (0, 1], got {density!r}")
    if not 0.0 < density <= 1.0:
        hint = f"; for {density:g} % pass {density / 100:g}" if 1.0 < density <= 100.0 else ""
        raise ConfigurationError(f"density must be in (0, 1], got {density!r}{hint}")
    return float(density)


def check_whole(name: str, value: object, least: int) -> None:
    """Raise unless value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name} must be a whole number >= {least}, got {value!r}")


def check_flag(name: str, value: object, words: Mapping[str, bool] | None = None) -> None:
    """Raise unless value is True or False; `words` maps what other schemes call these, for a hint."""
    if isinstance(value, bool):
        return
    hint = f"; pass {words[value]}" if words is not None and isinstance(value, str) and value in words else ""
    if isinstance(value, str) and value in ("True", "False"):
        hint = f"; write {value.lower()} on the command line and in files"
    raise ConfigurationError(f"{name} must be True or False, got {value!r}{hint}")


def check_positive(name: str, value: object, *, optional: bool = True) -> None:
    """Raise unless value is a finite number above 0, or None where that is allowed."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigurationError(f"{name} must be a number above 0, got {value!r}")


def check_share(name: str, value: object) -> None:
    """Raise unless value is a number in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value <= 1.0:
        raise ConfigurationError(f"{name} must be a number in (0, 1], got {value!r}")


KEPT = {"residual": True, "none": False}  # what scheme "predictive" called compensate=True and False


@dataclass(frozen=True)
class Options:
    """Options common to all schemes.

    density: share of all elements that a step selects, in (0, 1].
    codec: how finely values are sent.
    accumulate: "step" reads p.grad in step(); "backward" takes each gradient as backward makes it, which is faster and
        needs less memory, but clipping then has no effect.
    nonfinite: on NaN or Inf on any rank, "raise" the same error on all ranks, or "skip" the step on all ranks (only with
        accumulate="step").
    beta: with a momentum codec, the weight of the newly selected values in what is sent.
    segment_nbytes: largest single message, in bytes; longer ones are sent in several rounds.
    buffers: inside global_weights() and in exported models, those of "rank0", their "average", or the rank's "own"; with
        the first two global_weights() is collective if the model has buffers.
    hierarchy: "flat" exchanges between all ranks; "node" sums gradients inside each node first, and only the nodes' sums
        are exchanged; "auto" is "node" on several nodes with the same number of ranks above 1, else "flat". With drift a
        node is one worker.
    """

    density: float = 0.001
    codec: str = "fp32"
    accumulate: str = "step"
    nonfinite: str = "raise"
    beta: float = 0.7
    segment_nbytes: int = SEGMENT_NBYTES
    buffers: str = "rank0"
    hierarchy: str = FLAT
    on_device: ClassVar[bool] = False  # whether all parts of the scheme work in device memory
    renamed: ClassVar[Mapping[str, str]] = {}  # options by their names in earlier versions
    refused: ClassVar[Mapping[str, str]] = {  # options of other schemes that this one lacks, and why
        "every": "gradients are exchanged in every step of the optimizer; to add several batches up use sync.no_sync(), to "
        'have ranks train apart for some steps choose scheme "drift"'
    }
    publishes_mean: ClassVar[bool] = True  # whether adding what was published to the residual undoes a step
    flat_only: ClassVar[str] = ""  # why nodes cannot sum gradients first, if they cannot
    remembering: ClassVar[str] = (  # what ranks remember and the others cannot do without if one dies
        "what its ranks remember between exchanges cannot be put together without the rank that died; choose exdyna, "
        "momentum, dense or a baseline such as topk, or leave on_failure out and requeue the job"
    )
    suits_optimizer: ClassVar[bool] = False  # whether it adapts to the attached optimizer by itself
    of_weights: ClassVar[bool] = False  # whether ranks have their own weights and optimizers, and exchange after its step

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.codec not in CODECS:
            check_choice("codec", self.codec, self.codecs())
        check_choice("accumulate", self.accumulate, ("step", "backward"))
        check_choice("nonfinite", self.nonfinite, ("raise", "skip"))
        if self.nonfinite == "skip" and self.accumulate == "backward":
            raise ConfigurationError(
                'nonfinite="skip" needs accumulate="step": during backward a non-finite value is found only after '
                "it was added, and cannot be taken back"
            )
        check_share("beta", self.beta)
        check_whole("segment_nbytes", self.segment_nbytes, 1)
        check_choice("buffers", self.buffers, BUFFERS)
        check_choice("hierarchy", self.hierarchy, HIERARCHIES)
        if self.hierarchy != FLAT:
            self._check_hierarchy()

    def _check_hierarchy(self) -> None:
        """Raise ConfigurationError unless the ranks of a node can sum first."""
        if self.flat_only:
            raise ConfigurationError(f"hierarchy={self.hierarchy!r} is not for this scheme: {self.flat_only}; leave it out")
        if self.accumulate == "backward":
            raise ConfigurationError(
                f'hierarchy={self.hierarchy!r} needs accumulate="step": a rank keeps only a shard of the residual, to which '
                "whole gradients cannot be added during backward"
            )

    @property
    def needs_whole_gradient(self) -> bool:
        """Whether the scheme needs the whole gradient of a step at once."""
        return False

    @property
    def fixed_hierarchy(self) -> str:
        """The hierarchy of all steps: what is set, unless the scheme changes it by itself."""
        return self.hierarchy

    @property
    def mortal(self) -> str:
        """Why the other ranks cannot go on with these options when one dies; empty if they can."""
        if not self.remembering and self.hierarchy != FLAT:
            return (
                f"with hierarchy={self.hierarchy!r} each rank alone exchanges a shard of what its node sums, and holds what "
                "the node has not sent of it: without that rank, nobody of the node would; leave it out"
            )
        return self.remembering

    @property
    def in_flight(self) -> str:
        """The option that has a thread carry deliveries while others are computed, if one is set."""
        staleness = getattr(self, "staleness", 0)
        return f"staleness={staleness}" if staleness else ""

    @property
    def unmirrored(self) -> str:
        """Why no rank can keep a copy of another's residual; empty if one can."""
        if getattr(self, "compensate", True) is False:
            return "with compensate=False nothing waits to be sent"
        if self.in_flight:
            return f"with {self.in_flight} a copy would lack what is in flight when a rank dies"
        if getattr(self, "masks", "") == "own":
            return 'with masks="own" a rank does not hear which of its elements another rank has sent; choose others'
        return ""

    @property
    def with_backward(self) -> str:
        """An option that needs a model's backward, if one is set."""
        return ""

    def codecs(self) -> Sequence[str]:
        """List the codecs that go with the other options."""
        return codec_names()

    def without_effect(self) -> dict[str, str]:
        """Map each option that has no effect, given the others, to the reason and what to choose instead."""
        if CODECS[self.codec].blended:
            return {}
        blends = any(name.startswith(BLENDED) for name in self.codecs())
        wanted = 'a momentum codec, such as "momentum-int8"' if blends else "a scheme with a momentum codec"
        return {"beta": f'codec "{self.codec}" does not blend what is sent with what was sent before; choose {wanted}'}

    def changed_density(self, density: float) -> float:
        """Return a density that an exchange with these options may be set to between steps; raise for others."""
        return float(replace(self, density=density).density)

    def density_of(self, step: int, density: float) -> float:
        """Return the density of a step, from the set one."""
        return density

    def check_saved(self, saved: Mapping[str, Any]) -> None:
        """Raise ConfigurationError if an exchange with these options cannot load the state of one with others.

        Another check makes sure that all options but FREE_OPTIONS are the same.
        """

    def build(self, parts: Parts, site: Site | None = None) -> Scheme:
        """Build the scheme. `site` is None if a plain vector is averaged, without a model."""
        raise NotImplementedError

    def regrouped(self, parts: Parts) -> tuple[Selection, Reducer]:
        """The selection and the reducer for the present number of ranks, after some have died."""
        works = self.build(parts).aggregator.works
        return works.selection, works.reducer

    def build_for_model(self, parts: Parts, site: Site) -> Scheme:
        """Build the scheme for a model whose backward may still be running while parts of its gradient are exchanged."""
        return self.build(parts, site)

    def build_by_node(self, parts: Parts, site: Site | None, nodes: Nodes) -> Scheme:
        """Build the scheme for workers that are nodes; `parts` are those of all ranks."""
        from mpisparse.core.by_node import ByNode

        return Scheme(ByNode(parts, nodes, lambda shard: self.build(shard).aggregator))

    def build_in_flight(self, parts: Parts, staleness: int) -> Aggregator:
        """Build an aggregator of a plain vector with deliveries in flight; refused unless a scheme supports it."""
        raise ConfigurationError('this scheme delivers at once: a staleness above 0 needs scheme "exdyna"')

    @classmethod
    def upgraded(cls, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Saved values by the present names of options; options that did not exist then have their defaults."""
        defaults = {field.name: field.default for field in fields(cls)}
        return defaults | {cls.renamed.get(name, name): value for name, value in saved.items()}

    def values(self) -> dict[str, Any]:
        """Return the options as plain values, to compare ranks and saved states; a callable counts as True."""
        return {key: True if callable(value) else value for key, value in vars(self).items()}


@dataclass(frozen=True)
class Keeping(Options):
    """Options of a scheme that may keep what is not sent.

    compensate: True keeps what is not sent in the residual for later steps; False drops it.
    """

    compensate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("compensate", self.compensate, KEPT)


def check_of_weights(scheme: str, options: Options) -> None:
    """Raise ConfigurationError for options that an exchange of weights cannot have."""
    if options.accumulate != "step":
        raise ConfigurationError(f'scheme "{scheme}" exchanges weights, not gradients: leave accumulate out')
    if options.nonfinite != "raise":
        raise ConfigurationError(
            f'scheme "{scheme}" cannot skip a step that the optimizer has done: leave nonfinite out, and keep the weights '
            "finite (clip, or a GradScaler)"
        )
    if CODECS[options.codec].blended:
        raise ConfigurationError(
            f'scheme "{scheme}" sends differences of weights, which codec {options.codec!r} cannot blend with earlier ones; '
            "choose it without momentum-"
        )
