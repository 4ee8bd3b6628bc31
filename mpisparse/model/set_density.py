"""The set density of an exchange, which may be changed during training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpisparse.schemes.options import check_density

if TYPE_CHECKING:
    from mpisparse.schemes.options import Options


class SetDensity:
    """Adds a density that follows the rules of the scheme's options."""

    _options: Options
    _density: float

    @property
    def density(self) -> float:
        """The set density; may be changed between steps, on all ranks alike."""
        return self._density

    @density.setter
    def density(self, value: float) -> None:
        self._density = self._options.changed_density(check_density(value))
