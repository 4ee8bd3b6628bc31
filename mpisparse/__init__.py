"""Sparse, error-compensated gradient exchange over MPI for torch models.

Importing this package starts no MPI and touches no GPU. Names are imported on first use. MPI starts with the
first exchange that is not given a process group as `comm`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpisparse.version import __version__

if TYPE_CHECKING:
    from mpisparse import checkpoint, errors, integrations, optim, schemes
    from mpisparse.attachment import attach
    from mpisparse.backends import device
    from mpisparse.comm import exchange
    from mpisparse.comm.ranks import local_rank, rank, size
    from mpisparse.comm.rendezvous import init_torch_distributed
    from mpisparse.comm.stop_together import should_stop
    from mpisparse.core.records import Stats
    from mpisparse.errors import ConfigurationError, GradientError, NonFiniteGradientError
    from mpisparse.schemes import register_scheme
    from mpisparse.sharding import shard
    from mpisparse.sync import GradientSync
    from mpisparse.vectors import aggregator
    from mpisparse.wire import codecs
    from mpisparse.wire.codecs import register_codec

_HOMES = {
    "ConfigurationError": "errors",
    "GradientError": "errors",
    "GradientSync": "sync",
    "NonFiniteGradientError": "errors",
    "Stats": "core.records",
    "aggregator": "vectors",
    "attach": "attachment",
    "init_torch_distributed": "comm.rendezvous",
    "local_rank": "comm.ranks",
    "rank": "comm.ranks",
    "register_codec": "wire.codecs",
    "register_scheme": "schemes",
    "shard": "sharding",
    "should_stop": "comm.stop_together",
    "size": "comm.ranks",
}

_MODULES = {
    "checkpoint": "checkpoint",
    "codecs": "wire.codecs",
    "device": "backends.device",
    "errors": "errors",
    "exchange": "comm.exchange",
    "integrations": "integrations",
    "optim": "optim",
    "schemes": "schemes",
}

__all__ = [
    "ConfigurationError",
    "GradientError",
    "GradientSync",
    "NonFiniteGradientError",
    "Stats",
    "__version__",
    "aggregator",
    "attach",
    "checkpoint",
    "codecs",
    "device",
    "errors",
    "exchange",
    "init_torch_distributed",
    "integrations",
    "local_rank",
    "optim",
    "rank",
    "register_codec",
    "register_scheme",
    "schemes",
    "shard",
    "should_stop",
    "size",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES and name not in _MODULES:
        raise AttributeError(f"module 'mpisparse' has no attribute {name!r}")
    import importlib

    if name in _MODULES:
        return importlib.import_module(f"mpisparse.{_MODULES[name]}")
    return getattr(importlib.import_module(f"mpisparse.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
