"""A masked language model (Devlin et al. 2019) with pre-normalization, which is stable without warm-up."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

_HEAD = 64  # elements per head, in all published sizes
_DROPOUT = 0.1


class Block(nn.Module):
    """Attention, then a perceptron, each with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mix_heads = nn.Linear(width, width)
        self.before_perceptron = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(_DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (examples, positions, width) to the same shape."""
        x = x + self.drop(self.mix_heads(self._attend(self.before_attention(x))))
        hidden = nn.functional.gelu(self.widen(self.before_perceptron(x)))
        added: torch.Tensor = self.drop(self.narrow(hidden))
        return x + added

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        examples, positions, width = x.shape
        split = self.queries_keys_values(x).view(examples, positions, 3, width // _HEAD, _HEAD)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        dropout = _DROPOUT if self.training else 0.0
        mixed = scaled_dot_product_attention(queries, keys, values, dropout_p=dropout)
        return mixed.transpose(1, 2).reshape(examples, positions, width)


class Bert(nn.Module):
    """Embeddings of tokens and positions, blocks, and a last layer that shares the token embedding."""

    def __init__(self, sizes: Mapping[str, int], layers: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes["vocabulary"], width)
        self.places = nn.Parameter(torch.empty(sizes["length"], width))
        self.drop = nn.Dropout(_DROPOUT)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.decode = nn.Linear(width, sizes["vocabulary"])
        self.decode.weight = self.embed.weight
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        """Draw weights from N(0, 0.02), those that write to the residual stream scaled down by its depth; biases are 0."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                ends = name.endswith(("mix_heads.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if ends else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the score of each token of the vocabulary at each position."""
        x = self.drop(self.embed(tokens) + self.places[: tokens.shape[1]])
        scores: torch.Tensor = self.decode(self.norm(self.blocks(x)))
        return scores
