"""A causal language model in the shape of GPT-2 (Radford et al. 2019), without dropout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mpisparse.runtime.workloads.models.transformer import Block, initialise


class Gpt(nn.Module):
    """Embeddings of tokens and positions, blocks, and a last layer that shares the token embedding.

    rows: the least number of rows of the token embedding, for a model as large as a published one on any data.
    """

    def __init__(self, sizes: Mapping[str, int], layers: int, heads: int, width: int, rows: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(max(rows, sizes["vocabulary"]), width)
        self.places = nn.Parameter(torch.empty(sizes["length"], width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        initialise(self, layers)

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Matrices decay; biases and the scales of normalizations do not."""
        parts: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
        for p in self.parameters():
            parts[p.dim() < 2].append(p)
        return [{"params": params, "weight_decay": decay} for params, decay in zip(parts, (weight_decay, 0.0), strict=True)]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the score of each possible next token at each position."""
        x = self.embed(tokens) + self.places[: tokens.shape[1]]
        return nn.functional.linear(self.norm(self.blocks(x)), self.embed.weight)
