"""Models that are sparse themselves: pruned weights, embeddings with sparse gradients, and a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.functional import linear

from mpisparse.runtime.workloads.models.ncf import CollaborativeFilter

UNPRUNED = 0.1  # share of a pruned layer's weights that remain
EXPERTS, WIDTH = 32, 64


class PrunedLinear(nn.Linear):
    """A linear layer with nine tenths of its weights pruned at random: they stay zero and get no gradient."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.mask: torch.Tensor
        self.register_buffer("mask", torch.rand(outputs, inputs) < UNPRUNED)
        with torch.no_grad():
            self.weight.mul_(self.mask).div_(UNPRUNED**0.5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return linear(inputs, self.weight * self.mask, self.bias)


def pruned(sizes: Mapping[str, int]) -> nn.Module:
    """Build two pruned layers and a dense one, for images."""
    pixels = sizes["channels"] * sizes["height"] * sizes["width"]
    return nn.Sequential(
        nn.Flatten(), PrunedLinear(pixels, 1024), nn.ReLU(), PrunedLinear(1024, 512), nn.ReLU(),
        nn.Linear(512, sizes["classes"]),
    )  # fmt: skip


def embeddings(sizes: Mapping[str, int]) -> nn.Module:
    """Build a collaborative filter whose embeddings have sparse gradients: the rows that a batch looked up."""
    model = CollaborativeFilter(sizes)
    for part in model.modules():
        if isinstance(part, nn.Embedding):
            part.sparse = True
    return model


class Experts(nn.Module):
    """Routes each example to the expert that a gate prefers; an expert without examples has no gradient."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.gate = nn.Linear(inputs, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(EXPERTS)
        )
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        inputs = images.flatten(1)
        share, choice = self.gate(inputs).softmax(1).max(1)
        hidden = inputs.new_zeros(len(inputs), WIDTH)
        for i in choice.unique().tolist():
            mine = (choice == i).nonzero()[:, 0]
            hidden = hidden.index_add(0, mine, self.experts[i](inputs[mine]))
        scores: torch.Tensor = self.head(torch.relu(hidden * share[:, None] * EXPERTS**0.5))
        return scores


def experts(sizes: Mapping[str, int]) -> nn.Module:
    """Build a mixture of experts, for images."""
    return Experts(sizes["channels"] * sizes["height"] * sizes["width"], sizes["classes"])
