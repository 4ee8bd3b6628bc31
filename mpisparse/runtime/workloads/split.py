"""Validation data: a part of the training data that is not trained on, the same on every rank and after every restart."""

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

SALT = 2**41  # added to the seed: above all seeds of runs, whose draws are for other ends


def hold_out(data: Data, share: float, seed: int) -> Data:
    """Take this share of the training data out of it, as validation data; data that has some of its own stays as it is.

    By the seed alone. Examples that have a `hold_out` say themselves how they are split: those of a text overlap, and so
    must not be drawn one by one.
    """
    if data.validation is not None and len(data.validation) == 0:
        raise ConfigurationError("the validation data has no example; give some, or none at all to hold out training data")
    if data.validation is not None or share == 0.0:
        return data
    count = held_out_of(len(data.train), share)
    own = getattr(data.train, "hold_out", None)
    train, validation = own(count, seed) if own is not None else draw_out(data.train, count, seed)
    return replace(data, train=train, validation=validation, held_out=share)


def split_of(data: Data, seed: int) -> dict[str, Any]:
    """By what the validation data was held out, for a checkpoint: what was held out once must not be trained on later."""
    return {"share": data.held_out, **({"seed": seed, "left": len(data.train)} if data.held_out else {})}


def difference(saved: Any, now: dict[str, Any]) -> str | None:
    """Say how data that is split like this differs from what a checkpoint saved; None where it does not.

    A checkpoint that says nothing of it is of a version that trained on everything.
    """
    saved = {"share": 0.0} if saved is None else saved
    if saved == now:
        return None
    if saved == {"share": 0.0}:
        return (
            "was trained on all training data, of which nothing can be held out any more: go on with --validation 0, "
            "and with --evaluate-on test if it is to be steered"
        )
    return (
        f"was trained with other validation data ({_told(saved)}; now {_told(now)}), and what was validation data once must "
        "not be trained on: go on with the same --validation, --seed and data"
    )


def _told(split: Any) -> str:
    if not isinstance(split, dict) or not split.get("share"):
        return "none held out"
    return f"--validation {split['share']} by --seed {split.get('seed')}, {split.get('left')} examples left to train on"


def held_out_of(total: int, share: float) -> int:
    """How many of so many examples are held out: one at least, and not all."""
    count = max(1, round(share * total))
    if count >= total:
        raise ConfigurationError(
            f"--validation {share:g} of {total} training examples leaves none to train on; lower it, or pass --validation 0"
        )
    return count


def drawn_out(total: int, count: int, seed: int) -> tuple[Ints, Ints]:
    """The numbers below `total` in two parts, each ascending, of which the second has `count`, drawn by the seed."""
    order = shuffle(total, seed=seed + SALT)
    return np.sort(order[count:]), np.sort(order[:count])


def draw_out(examples: Examples, count: int, seed: int) -> tuple[Examples, Examples]:
    """The examples without `count` of them, and these."""
    rest, held = drawn_out(len(examples), count, seed)
    return Part(examples, rest), Part(examples, held)


class Part:
    """Some of many examples, numbered anew; what is random in them follows from their own numbers."""

    def __init__(self, examples: Examples, indices: Ints) -> None:
        self._examples = examples
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def batch(self, indices: NDArray[Any], *, seed: int, epoch: int, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the inputs and targets of these examples."""
        return self._examples.batch(self._indices[indices], seed=seed, epoch=epoch, train=train)
