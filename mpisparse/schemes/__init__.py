"""Schemes by name: each is a record of options, checked when made, and a few lines that put the step's parts together."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from mpisparse.errors import ConfigurationError, check_choice, suggest
from mpisparse.schemes.baselines import (
    CyclicLocalTopK,
    DeepGradientCompression,
    FixedThreshold,
    LocalTopK,
    SharedRandomK,
    StatisticalThreshold,
)
from mpisparse.schemes.dense import Dense
from mpisparse.schemes.options import Options
from mpisparse.schemes.partitioned import Exdyna, Momentum
from mpisparse.schemes.predictive.options import Predictive
from mpisparse.schemes.speculative.options import Speculative

SCHEMES: dict[str, type[Options]] = {
    "dense": Dense,
    "exdyna": Exdyna,
    "momentum": Momentum,
    "predictive": Predictive,
    "speculative": Speculative,
    "topk": LocalTopK,
    "cltk": CyclicLocalTopK,
    "randomk": SharedRandomK,
    "threshold": FixedThreshold,
    "sidco": StatisticalThreshold,
    "dgc": DeepGradientCompression,
}


def configure(scheme: str, **options: Any) -> Options:
    """Make a scheme's options from names and values; None means the scheme's default for density and codec."""
    check_choice("scheme", scheme, SCHEMES)
    kind = SCHEMES[scheme]
    known = [f.name for f in dataclasses.fields(kind)]
    for name, value in options.items():
        if name not in known:
            fitting = [each for each in known if _fits(kind, each, value, options)]
            raise ConfigurationError(f'unknown option {name!r} for scheme "{scheme}"; {suggest(name, known, fitting)}')
    defaults = {"density", "codec"}
    made = kind(**{name: value for name, value in options.items() if value is not None or name not in defaults})
    for name, why in made.without_effect().items():
        if options.get(name) is not None:
            raise ConfigurationError(f"{name} has no effect: {why}, or leave it out")
    return made


def _fits(kind: type[Options], name: str, value: Any, others: dict[str, Any]) -> bool:
    """Tell whether an option can have a value, to some effect, together with the others that are known or by itself."""
    known = {field.name for field in dataclasses.fields(kind)} - {name}
    for given in ({other: each for other, each in others.items() if other in known and each is not None}, {}):
        with contextlib.suppress(ValueError, TypeError):
            made = kind(**{**given, name: value})
            return name not in made.without_effect()
    return False


def takes(scheme: str, option: str) -> bool:
    """Tell whether a scheme has an option."""
    return any(field.name == option for field in dataclasses.fields(SCHEMES[scheme]))
