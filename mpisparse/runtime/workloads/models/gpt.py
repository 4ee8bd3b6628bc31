"""A causal language model in the shape of GPT-2 (Radford et al. 2019), without dropout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention


class Block(nn.Module):
    """Causal attention, then a perceptron, each with a normalization before it and a residual connection around it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mix_heads = nn.Linear(width, width)
        self.before_perceptron = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (examples, positions, width) to the same shape."""
        x = x + self.mix_heads(self._attend(self.before_attention(x)))
        added: torch.Tensor = self.narrow(gelu(self.widen(self.before_perceptron(x))))
        return x + added

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        examples, positions, width = x.shape
        split = self.queries_keys_values(x).view(examples, positions, 3, self.heads, width // self.heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return mixed.transpose(1, 2).reshape(examples, positions, width)


class Gpt(nn.Module):
    """Embeddings of tokens and positions, blocks, and a last layer that shares the token embedding.

    rows: the least number of rows of the token embedding, for a model as large as a published one on any data.
    """

    def __init__(self, sizes: Mapping[str, int], layers: int, heads: int, width: int, rows: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(max(rows, sizes["vocabulary"]), width)
        self.places = nn.Parameter(torch.empty(sizes["length"], width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        """Draw weights from N(0, 0.02), those that write to the residual stream scaled down by its depth; biases are 0."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                ends = name.endswith(("mix_heads.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if ends else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

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
