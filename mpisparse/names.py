"""Schemes and codecs by name, and other names, for code that must check them without importing torch or starting MPI.

A registry lists names without importing anything. What a name stands for is imported when it is looked up.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpisparse.errors import ConfigurationError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


class Registry(Mapping[str, Any]):
    """Schemes or codecs by name: built-in ones, registered ones, and those that installed packages declare.

    `homes`: where the built-in ones are, as "module:attribute". `group`: the entry points of installed packages.
    `check`: a function(name, found), as "module:function", that refuses what does not fit. `wrapper`: a prefix, and the
    class that makes PREFIX-NAME from any NAME.
    """

    def __init__(
        self, what: str, homes: dict[str, str], *, group: str, check: str, wrapper: tuple[str, str] | None = None
    ) -> None:
        self.what = what
        self._homes = homes
        self._group = group
        self._check = check
        self._prefix, self._wrapper = wrapper or ("", "")
        self._added: dict[str, Any] = {}
        self._found: dict[str, Any] = {}

    def add(self, name: object, thing: Any) -> None:
        """Register a thing after checking it; refuse a name that is taken."""
        if not isinstance(name, str) or not NAME.fullmatch(name) or self._is_wrapped(name):
            wrapped = f', and not begin with "{self._prefix}"' if self._prefix else ""
            raise ConfigurationError(
                f"the name of a {self.what} must be lower-case words and digits joined by hyphens{wrapped}, got {name!r}"
            )
        if self._added.get(name) is thing:
            return
        if name in self:
            raise ConfigurationError(
                f"there is a {self.what} {name!r} already, {self._origin(name)}; choose another name for {thing!r}"
            )
        _load(self._check)(name, thing)
        self._added[name] = thing

    def __getitem__(self, name: str) -> Any:
        if name in self._added:
            return self._added[name]
        if name not in self._found:
            if name not in self:
                raise KeyError(name)
            self._found[name] = self._look_up(name)
        return self._found[name]

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        if self._is_wrapped(name):
            return name.removeprefix(self._prefix) in self
        return name in self._homes or name in self._added or name in self._installed

    def __iter__(self) -> Iterator[str]:
        plain = [*self._homes, *self._added, *self._installed]
        yield from plain
        if self._prefix:
            yield from (self._prefix + name for name in plain)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _is_wrapped(self, name: str) -> bool:
        return bool(self._prefix) and name.startswith(self._prefix)

    def _look_up(self, name: str) -> Any:
        if self._is_wrapped(name):
            return _load(self._wrapper)(self[name.removeprefix(self._prefix)])
        if name in self._homes:
            return _load(self._homes[name])
        points = self._installed[name]
        if len({point.value for point in points}) > 1:
            raise ConfigurationError(
                f"several packages declare a {self.what} {name!r}: {self._origin(name)}; uninstall all but one"
            )
        try:
            thing = points[0].load()
        except Exception as error:
            raise ConfigurationError(
                f"the {self.what} {name!r}, {self._origin(name)}, cannot be imported: {error}"
            ) from error
        _load(self._check)(name, thing)
        return thing

    @cached_property
    def _installed(self) -> dict[str, list[EntryPoint]]:
        """The entry points of installed packages by name; nothing of them is imported."""
        from importlib.metadata import entry_points

        found: dict[str, list[EntryPoint]] = {}
        for point in entry_points(group=self._group):
            if point.name in self._homes or self._is_wrapped(point.name) or not NAME.fullmatch(point.name):
                warnings.warn(
                    f"ignoring the {self.what} {point.name!r} that {_package(point)} declares: the name is built in or not "
                    "made of lower-case words and digits joined by hyphens; rename it there",
                    stacklevel=2,
                )
            else:
                found.setdefault(point.name, []).append(point)
        return found

    def _origin(self, name: str) -> str:
        if name in self._homes:
            return "built in"
        if name in self._added:
            return f"registered as {self._added[name]!r}"
        return " and ".join(f"declared by {_package(point)} as {point.value}" for point in self._installed[name])


def _load(home: str) -> Any:
    module, _, attribute = home.partition(":")
    return getattr(import_module(module), attribute)


def _package(point: EntryPoint) -> str:
    return f"package {point.dist.name}" if point.dist is not None else "a package"


SCHEMES = Registry(
    "scheme",
    {
        "dense": "mpisparse.schemes.dense:Dense",
        "exdyna": "mpisparse.schemes.partitioned:Exdyna",
        "momentum": "mpisparse.schemes.partitioned:Momentum",
        "predictive": "mpisparse.schemes.predictive.options:Predictive",
        "speculative": "mpisparse.schemes.speculative.options:Speculative",
        "drift": "mpisparse.schemes.drift.options:Drift",
        "topk": "mpisparse.schemes.baselines:LocalTopK",
        "cltk": "mpisparse.schemes.baselines:CyclicLocalTopK",
        "randomk": "mpisparse.schemes.baselines:SharedRandomK",
        "threshold": "mpisparse.schemes.baselines:FixedThreshold",
        "sidco": "mpisparse.schemes.baselines:StatisticalThreshold",
        "dgc": "mpisparse.schemes.baselines:DeepGradientCompression",
        "diloco": "mpisparse.schemes.local.options:Diloco",
        "sparseloco": "mpisparse.schemes.local.options:Sparseloco",
        "demo": "mpisparse.schemes.demo.options:Demo",
        "auto": "mpisparse.plan.auto:Auto",
    },
    group="mpisparse.schemes",
    check="mpisparse.schemes.check:check_scheme",
)
BLENDED = "momentum-"  # the prefix of codecs that blend values with what was sent before
CODECS = Registry(
    "codec",
    {
        "fp32": "mpisparse.wire.codecs.fp32:CODEC",
        "fp16": "mpisparse.wire.codecs.fp16:CODEC",
        "bf16": "mpisparse.wire.codecs.bf16:CODEC",
        "int8": "mpisparse.wire.codecs.int8:CODEC",
        "int4": "mpisparse.wire.codecs.int4:CODEC",
        "int2": "mpisparse.wire.codecs.int2:CODEC",
        "sign": "mpisparse.wire.codecs.sign:CODEC",
    },
    group="mpisparse.codecs",
    check="mpisparse.wire.codecs.check:check_codec",
    wrapper=(BLENDED, "mpisparse.wire.codecs.momentum:Blended"),
)
FLAT, NODE, AUTO = HIERARCHIES = ("flat", "node", "auto")  # over what a step exchanges
DRIVERS = ("mpio",)  # of checkpoints
FREE_OPTIONS = (
    "density",
    "segment_nbytes",
    "nonfinite",
    "buffers",
    "hierarchy",
    "slowdown",
    "log",
    "deterministic",
)  # of a scheme, that may differ from those of a saved state
