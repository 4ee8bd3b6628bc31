"""Sparse, error-compensated gradient exchange over MPI for torch models.

Importing this package starts no MPI and touches no GPU; the first use of GradientSync starts MPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mpisparse.errors import ConfigurationError, GradientError, NonFiniteGradientError
    from mpisparse.optimizer import attach
    from mpisparse.step import Stats
    from mpisparse.sync import GradientSync

_HOMES = {
    "ConfigurationError": "errors",
    "GradientError": "errors",
    "GradientSync": "sync",
    "NonFiniteGradientError": "errors",
    "Stats": "step",
    "attach": "optimizer",
}

__all__ = [
    "ConfigurationError",
    "GradientError",
    "GradientSync",
    "NonFiniteGradientError",
    "Stats",
    "__version__",
    "attach",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mpisparse' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"mpisparse.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
