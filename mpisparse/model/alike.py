"""Check that all ranks have the same model and the same options."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from mpisparse.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from mpisparse.comm.exchange import Exchange
    from mpisparse.model.layout import Layout
    from mpisparse.schemes.options import Options


def described(model: torch.nn.Module, layout: Layout, scheme: str, options: Options, timeout: float) -> list[str]:
    """Describe what must be the same on all ranks, one thing per line."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        f"scheme {scheme} {json.dumps(options.values(), sort_keys=True)}",
        f"timeout {timeout:g}",
        f"device {layout.device.type}",
        *(f"parameter {line}" for line in layout.describe()),
        *(f"tensor {name} {list(t.shape)} {t.dtype}" for name, t in tensors),
    ]


def check_alike(exchange: Exchange, lines: list[str]) -> None:
    """Raise ConfigurationError on all ranks, with the first line that differs, unless all have the same; collective."""
    text = "\n".join(lines)
    if len(set(exchange.gather_texts(hashlib.sha256(text.encode()).hexdigest()))) == 1:
        return
    texts = [t.split("\n") for t in exchange.gather_texts(text)]
    other = next(rank for rank, t in enumerate(texts) if t != texts[0])
    first, second = texts[0], texts[other]
    at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    here, there = (t[at] if at < len(t) else "nothing more" for t in (first, second))
    raise ConfigurationError(
        f"r{exchange.rank} | the ranks differ: rank 0 has {here!r}, rank {other} has {there!r}; "
        "build the same model with the same options on every rank"
    )
