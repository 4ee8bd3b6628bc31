"""What the transformers share: a block with pre-normalization, and how weights begin."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention


class Block(nn.Module):
    """Attention, then a perceptron, each with a normalization before it and a residual connection around it.

    causal: a position sees none after it.
    """

    def __init__(self, width: int, heads: int, *, causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mix_heads = nn.Linear(width, width)
        self.before_perceptron = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (examples, positions, width) to the same shape."""
        x = x + self.drop(self.mix_heads(self._attend(self.before_attention(x))))
        added: torch.Tensor = self.drop(self.narrow(gelu(self.widen(self.before_perceptron(x)))))
        return x + added

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        examples, positions, width = x.shape
        split = self.queries_keys_values(x).view(examples, positions, 3, self.heads, width // self.heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=self.causal)
        return mixed.transpose(1, 2).reshape(examples, positions, width)


def initialise(model: nn.Module, layers: int) -> None:
    """Draw weights from N(0, 0.02), those that write to the residual stream scaled down by its depth; biases are 0."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            ends = name.endswith(("mix_heads.weight", "narrow.weight"))
            nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if ends else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
