"""Losses and metrics of the built-in tasks. torch is imported when they are used."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mpisparse.runtime.workloads.records import Task

if TYPE_CHECKING:
    import torch

IGNORED = -100  # a target that counts neither in loss nor metric, as in torch
HITS = 10


def _class_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import cross_entropy

    return cross_entropy(outputs.float(), targets)


def _count_correct(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
    return float((outputs.argmax(1) == targets).sum()), float(targets.numel())


def _token_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import cross_entropy

    return cross_entropy(outputs.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


def _token_surprise(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
    from torch.nn.functional import cross_entropy

    logits = outputs.float().flatten(0, -2)
    total = cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return float(total), float((targets != IGNORED).sum())


def _perplexity(mean: float) -> float:
    return math.inf if mean > 700 else math.exp(mean)


def _rating_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import binary_cross_entropy_with_logits

    return binary_cross_entropy_with_logits(outputs.float(), targets)


def _count_hits(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
    """Count the examples whose first item, the true one, is among the best; a tie or NaN counts as a miss."""
    not_worse = ~(outputs[:, 1:] < outputs[:, :1])
    return float((not_worse.sum(1) < HITS).sum()), float(len(targets))


TASKS: dict[str, Task] = {
    "classes": Task("accuracy", True, _class_loss, _count_correct),
    "tokens": Task("perplexity", False, _token_loss, _token_surprise, _perplexity),
    "masked-tokens": Task("perplexity", False, _token_loss, _token_surprise, _perplexity),
    "ratings": Task(f"hit rate@{HITS}", True, _rating_loss, _count_hits),
}
