"""Sparse, error-compensated gradient exchange over MPI for torch models.

Importing this package starts no MPI and touches no GPU. Names are imported on first use; the first use of GradientSync,
checkpoint or exchange starts MPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mpisparse import checkpoint, codecs, device, errors, exchange, schemes
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

_MODULES = ("checkpoint", "codecs", "device", "errors", "exchange", "schemes")

__all__ = [
    "ConfigurationError",
    "GradientError",
    "GradientSync",
    "NonFiniteGradientError",
    "Stats",
    "__version__",
    "attach",
    "checkpoint",
    "codecs",
    "device",
    "errors",
    "exchange",
    "schemes",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES and name not in _MODULES:
        raise AttributeError(f"module 'mpisparse' has no attribute {name!r}")
    import importlib

    if name in _MODULES:
        return importlib.import_module(f"mpisparse.{name}")
    return getattr(importlib.import_module(f"mpisparse.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
