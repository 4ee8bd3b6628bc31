"""Windows over a long text: to predict the next token, or tokens that are masked."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpisparse.runtime.workloads.data.draws import below, draw
from mpisparse.runtime.workloads.tasks import IGNORED

LENGTH = 64  # tokens a window
_MASKED = round(0.15 * LENGTH)  # exactly as many in every window, so the mean over ranks is the mean over examples


class NextTokens:
    """Windows side by side, each with what comes next; in training their starts move on by up to one window."""

    def __init__(self, tokens: NDArray[Any]) -> None:
        self._tokens = tokens
        self._offsets = np.arange(LENGTH + 1)

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // LENGTH

    def _windows(self, indices: NDArray[Any], shifts: NDArray[Any] | int) -> NDArray[np.int64]:
        """Cut out windows of LENGTH + 1 tokens."""
        starts = np.minimum(indices * LENGTH + shifts, len(self._tokens) - LENGTH - 1)
        windows: NDArray[np.int64] = self._tokens[starts[:, None] + self._offsets].astype(np.int64)
        return windows

    def batch(self, indices: NDArray[Any], *, seed: int, epoch: int, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Give windows, and the same one token later."""
        shifts = below(draw(indices, 1, seed=seed, epoch=epoch)[:, 0], LENGTH) if train else 0
        windows = torch.from_numpy(self._windows(indices, shifts))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


class MaskedTokens(NextTokens):
    """Windows with 15 % of their tokens to guess: of these 80 % are masked, 10 % replaced, 10 % left (BERT, 3.1).

    The mask is the token `vocabulary - 1`, which no text has.
    """

    def __init__(self, tokens: NDArray[Any], vocabulary: int) -> None:
        super().__init__(tokens)
        self._mask = vocabulary - 1

    def batch(self, indices: NDArray[Any], *, seed: int, epoch: int, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Give windows with masks, and the tokens to guess, IGNORED elsewhere."""
        if not train:
            seed = epoch = 0
        words = draw(indices, LENGTH + 2 * _MASKED + 1, seed=seed, epoch=epoch)
        shifts = below(words[:, -1], LENGTH) if train else 0
        tokens = self._windows(indices, shifts)[:, :-1]
        rows = np.arange(len(indices))[:, None]
        places = np.argpartition(words[:, :LENGTH], _MASKED, axis=1)[:, :_MASKED]
        hidden = tokens[rows, places]
        targets = np.full_like(tokens, IGNORED)
        targets[rows, places] = hidden
        fate = below(words[:, LENGTH : LENGTH + _MASKED], 10)
        other = below(words[:, LENGTH + _MASKED : -1], self._mask)
        inputs = tokens.copy()
        inputs[rows, places] = np.where(fate < 8, self._mask, np.where(fate < 9, other, hidden))
        return torch.from_numpy(inputs), torch.from_numpy(targets)
