"""A recurrent language model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


class LanguageModel(nn.Module):
    """Two LSTM layers between an embedding and a decoder that share weights; every window starts from a zero state."""

    def __init__(self, sizes: Mapping[str, int], width: int = 512, dropout: float = 0.2) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes["vocabulary"], width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=dropout)
        self.drop = nn.Dropout(dropout)
        self.decode = nn.Linear(width, sizes["vocabulary"])
        nn.init.uniform_(self.embed.weight, -0.1, 0.1)
        nn.init.zeros_(self.decode.bias)
        self.decode.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the score of each possible next token at each position."""
        hidden, _ = self.lstm(self.drop(self.embed(tokens)))
        scores: torch.Tensor = self.decode(self.drop(hidden))
        return scores
