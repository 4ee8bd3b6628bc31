"""A density that falls in the first exchanges."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpisparse.errors import ConfigurationError
from mpisparse.schemes.options import Options, check_density, check_whole


def density_at(step: int, density: float, start: float, warmup: int) -> float:
    """Return the density at a step: it falls geometrically from `start` to `density` over `warmup` steps."""
    if step >= warmup or start <= density:
        return density
    return float(start * (density / start) ** (step / warmup))


@dataclass(frozen=True)
class Falling(Options):
    """Early steps count most, so they may send more.

    density_from: density of the first exchange, from which it falls geometrically to `density`.
    density_warmup: exchanges over which it falls; 0 has the same density in all.
    """

    density_from: float = 1.0
    density_warmup: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("density_warmup", self.density_warmup, 0)
        try:
            check_density(self.density_from)
        except ConfigurationError as error:
            raise ConfigurationError(str(error).replace("density", "density_from", 1)) from None
        if self.density_from < self.density:
            raise ConfigurationError(
                f"density_from must be at least the density that it falls to, got {self.density_from:g} and {self.density:g}"
            )

    def changed_density(self, density: float) -> float:
        higher = replace(self, density_from=max(density, self.density_from))  # a later density may be above the first one
        return super(Falling, higher).changed_density(density)

    def without_effect(self) -> dict[str, str]:
        idle = super().without_effect()
        if self.density == 1.0:
            idle |= dict.fromkeys(("density_from", "density_warmup"), "density 1 leaves nothing to fall to")
        elif not self.density_warmup:
            idle["density_from"] = "the density falls over density_warmup exchanges; set that"
        return idle

    def density_of(self, step: int, density: float) -> float:
        return density_at(step, density, self.density_from, self.density_warmup)
