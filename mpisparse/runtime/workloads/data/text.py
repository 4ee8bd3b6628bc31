"""Windows over a long text, to predict the next token or masked tokens."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpisparse.arrays import Ints
from mpisparse.errors import ConfigurationError
from mpisparse.runtime.workloads.data.draws import below, draw
from mpisparse.runtime.workloads.tasks import IGNORED

LENGTH = 64  # default number of tokens per window
LEAST = 4  # tokens per window, so that at least one can be masked


class NextTokens:
    """Adjacent windows with their next tokens; in training each start is shifted by up to one window."""

    def __init__(self, tokens: NDArray[Any], length: int) -> None:
        self._tokens = tokens
        self._length = length
        self._offsets = np.arange(length + 1)

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def _windows(self, indices: NDArray[Any], shifts: NDArray[Any] | int) -> Ints:
        """Cut out windows of length + 1 tokens."""
        starts = np.minimum(indices * self._length + shifts, len(self._tokens) - self._length - 1)
        windows: Ints = self._tokens[starts[:, None] + self._offsets].astype(np.int64)
        return windows

    def hold_out(self, count: int, seed: int) -> tuple[NextTokens, NextTokens]:
        """Split off the last `count` windows; no token is in both parts, wherever windows start in training."""
        cut = len(self._tokens) - count * self._length - 1
        if cut <= self._length:
            raise ConfigurationError(
                f"a text of {len(self._tokens)} tokens is too short to hold out {count} windows of {self._length} for "
                "validation; use a longer text, or lower --validation"
            )
        return self._of(self._tokens[:cut]), self._of(self._tokens[cut:])

    def _of(self, tokens: NDArray[Any]) -> NextTokens:
        part = copy(self)
        part._tokens = tokens
        return part

    def batch(self, indices: NDArray[Any], *, seed: int, epoch: int, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return windows, and the same windows one token later."""
        shifts = below(draw(indices, 1, seed=seed, epoch=epoch)[:, 0], self._length) if train else 0
        windows = torch.from_numpy(self._windows(indices, shifts))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


class MaskedTokens(NextTokens):
    """Windows with 15 % of their tokens to predict: of these 80 % are masked, 10 % replaced, 10 % unchanged (BERT, 3.1).

    The mask is the token `vocabulary - 1`, which occurs in no text. Every window has the same number of tokens to
    predict, so that the mean over ranks is the mean over examples.
    """

    def __init__(self, tokens: NDArray[Any], length: int, vocabulary: int) -> None:
        super().__init__(tokens, length)
        self._mask = vocabulary - 1
        self._masked = round(0.15 * length)

    def batch(self, indices: NDArray[Any], *, seed: int, epoch: int, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return windows with masks, and the tokens to predict, IGNORED elsewhere."""
        if not train:
            seed = epoch = 0
        words = draw(indices, self._length + 2 * self._masked + 1, seed=seed, epoch=epoch)
        shifts = below(words[:, -1], self._length) if train else 0
        tokens = self._windows(indices, shifts)[:, :-1]
        example = np.arange(len(indices))[:, None]
        chosen = np.argpartition(words[:, : self._length], self._masked, axis=1)[:, : self._masked]
        hidden = tokens[example, chosen]
        targets = np.full_like(tokens, IGNORED)
        targets[example, chosen] = hidden
        fate = below(words[:, self._length : self._length + self._masked], 10)
        other = below(words[:, self._length + self._masked : -1], self._mask)
        inputs = tokens.copy()
        inputs[example, chosen] = np.where(fate < 8, self._mask, np.where(fate < 9, other, hidden))
        return torch.from_numpy(inputs), torch.from_numpy(targets)
