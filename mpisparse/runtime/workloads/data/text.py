"""Windows over a long text: to predict the next token, or tokens that are masked."""

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

LENGTH = 64  # tokens a window, unless another is asked for
LEAST = 4  # tokens a window, so that one of them can be masked


class NextTokens:
    """Windows side by side, each with what comes next; in training their starts move on by up to one window."""

    def __init__(self, tokens: NDArray[Any], length: int) -> None:
        self._tokens = tokens
        self._length = length
        self._offsets = np.arange(length + 1)

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def _windows(self, indices: NDArray[Any], shifts: NDArray[Any] | int) -> Ints:
        """Cut out windows of the length and one token more."""
        starts = np.minimum(indices * self._length + shifts, len(self._tokens) - self._length - 1)
        windows: Ints = self._tokens[starts[:, None] + self._offsets].astype(np.int64)
        return windows

    def hold_out(self, count: int, seed: int) -> tuple[NextTokens, NextTokens]:
        """The text without its last `count` windows, and these: no token is in both, wherever windows start in training."""
        cut = len(self._tokens) - count * self._length - 1
        if cut <= self._length:
            raise ConfigurationError(
                f"a text of {len(self._tokens)} tokens is too short to hold out {count} windows of {self._length} for "
                "validation; give a longer text, or lower --validation"
            )
        return self._of(self._tokens[:cut]), self._of(self._tokens[cut:])

    def _of(self, tokens: NDArray[Any]) -> NextTokens:
        part = copy(self)
        part._tokens = tokens
        return part

    def batch(self, indices: NDArray[Any], *, seed: int, epoch: int, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Give windows, and the same one token later."""
        shifts = below(draw(indices, 1, seed=seed, epoch=epoch)[:, 0], self._length) if train else 0
        windows = torch.from_numpy(self._windows(indices, shifts))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


class MaskedTokens(NextTokens):
    """Windows with 15 % of their tokens to guess: of these 80 % are masked, 10 % replaced, 10 % left (BERT, 3.1).

    The mask is the token `vocabulary - 1`, which no text has. Exactly as many are to guess in every window: so the mean over
    ranks is the mean over examples.
    """

    def __init__(self, tokens: NDArray[Any], length: int, vocabulary: int) -> None:
        super().__init__(tokens, length)
        self._mask = vocabulary - 1
        self._masked = round(0.15 * length)

    def batch(self, indices: NDArray[Any], *, seed: int, epoch: int, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Give windows with masks, and the tokens to guess, IGNORED elsewhere."""
        if not train:
            seed = epoch = 0
        words = draw(indices, self._length + 2 * self._masked + 1, seed=seed, epoch=epoch)
        shifts = below(words[:, -1], self._length) if train else 0
        tokens = self._windows(indices, shifts)[:, :-1]
        rows = np.arange(len(indices))[:, None]
        places = np.argpartition(words[:, : self._length], self._masked, axis=1)[:, : self._masked]
        hidden = tokens[rows, places]
        targets = np.full_like(tokens, IGNORED)
        targets[rows, places] = hidden
        fate = below(words[:, self._length : self._length + self._masked], 10)
        other = below(words[:, self._length + self._masked : -1], self._mask)
        inputs = tokens.copy()
        inputs[rows, places] = np.where(fate < 8, self._mask, np.where(fate < 9, other, hidden))
        return torch.from_numpy(inputs), torch.from_numpy(targets)
