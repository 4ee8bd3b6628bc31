"""Validation data: part of the training data, held out of training; the same on every rank and after every restart."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpisparse.arrays import Ints
from mpisparse.errors import ConfigurationError
from mpisparse.runtime.workloads.data.draws import shuffle
from mpisparse.runtime.workloads.records import Data, Examples

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

SEED_OFFSET = 2**41  # added to the seed; above all seeds of runs, so that no other draws are the same


def hold_out(data: Data, share: float, seed: int) -> Data:
    """Move this share of the training data to the validation data; data with validation data stays as it is.

    Only the seed decides which. Examples with a `hold_out` method split themselves: windows of a text overlap, so they
    must not be drawn one by one.
    """
    if data.validation is not None and len(data.validation) == 0:
        raise ConfigurationError("the validation data is empty; add examples, or leave it out to hold out training data")
    if data.validation is not None or share == 0.0:
        return data
    count = held_out_of(len(data.train), share)
    own = getattr(data.train, "hold_out", None)
    train, validation = own(count, seed) if own is not None else split_examples(data.train, count, seed)
    return replace(data, train=train, validation=validation, held_out=share)


def split_of(data: Data, seed: int) -> dict[str, Any]:
    """Describe how validation data was held out, for a checkpoint: it must not be trained on later."""
    return {"share": data.held_out, **({"seed": seed, "left": len(data.train)} if data.held_out else {})}


def difference(saved: Any, now: dict[str, Any]) -> str | None:
    """Describe how this split differs from the one in a checkpoint; None if it does not.

    A checkpoint without a split is from a version that trained on all training data.
    """
    saved = {"share": 0.0} if saved is None else saved
    if saved == now:
        return None
    if saved == {"share": 0.0}:
        return (
            "was trained on all training data, so none can be held out now; continue with --validation 0, "
            "and with --evaluate-on test if a target or the scheme needs evaluations"
        )
    return (
        f"was trained with different validation data ({_describe(saved)}; now {_describe(now)}), and what was validation "
        "data once must not be trained on; continue with the same --validation, --seed and data"
    )


def _describe(split: Any) -> str:
    if not isinstance(split, dict) or not split.get("share"):
        return "none held out"
    return f"--validation {split['share']} by --seed {split.get('seed')}, {split.get('left')} examples left to train on"


def held_out_of(total: int, share: float) -> int:
    """Return how many of `total` examples to hold out: at least one, but not all."""
    count = max(1, round(share * total))
    if count >= total:
        raise ConfigurationError(
            f"--validation {share:g} of {total} training examples leaves none to train on; lower it, or pass --validation 0"
        )
    return count


def split_indices(total: int, count: int, seed: int) -> tuple[Ints, Ints]:
    """Split range(total) at random by the seed into two ascending parts; the second has `count` indices."""
    order = shuffle(total, seed=seed + SEED_OFFSET)
    return np.sort(order[count:]), np.sort(order[:count])


def split_examples(examples: Examples, count: int, seed: int) -> tuple[Examples, Examples]:
    """Split examples at random by the seed; the second part has `count` of them."""
    rest, held = split_indices(len(examples), count, seed)
    return Subset(examples, rest), Subset(examples, held)


class Subset:
    """Some of the examples, renumbered from 0; their randomness depends on their original indices."""

    def __init__(self, examples: Examples, indices: Ints) -> None:
        self._examples = examples
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def batch(self, indices: NDArray[Any], *, seed: int, epoch: int, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets of these examples."""
        return self._examples.batch(self._indices[indices], seed=seed, epoch=epoch, train=train)
