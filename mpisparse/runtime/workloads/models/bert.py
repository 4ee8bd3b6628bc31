"""A masked language model (Devlin et al. 2019) with pre-normalization, which is stable without warm-up."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from mpisparse.runtime.workloads.models.transformer import Block, initialise

_HEAD = 64  # elements per head, in all published sizes
_DROPOUT = 0.1


class Bert(nn.Module):
    """Embeddings of tokens and positions, blocks, and a last layer that shares the token embedding."""

    def __init__(self, sizes: Mapping[str, int], layers: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes["vocabulary"], width)
        self.places = nn.Parameter(torch.empty(sizes["length"], width))
        self.drop = nn.Dropout(_DROPOUT)
        self.blocks = nn.Sequential(*(Block(width, width // _HEAD, dropout=_DROPOUT) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.decode = nn.Linear(width, sizes["vocabulary"])
        self.decode.weight = self.embed.weight
        initialise(self, layers)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the score of each token of the vocabulary at each position."""
        x = self.drop(self.embed(tokens) + self.places[: tokens.shape[1]])
        scores: torch.Tensor = self.decode(self.norm(self.blocks(x)))
        return scores
