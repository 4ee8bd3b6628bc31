"""Neural collaborative filtering (He et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import nn

_FACTORS = 32
_LAYERS = (128, 64, 32)


class CollaborativeFilter(nn.Module):
    """Matrix factorization and a perceptron in parallel, combined by a linear layer."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.user_factors = nn.Embedding(sizes["users"], _FACTORS)
        self.item_factors = nn.Embedding(sizes["items"], _FACTORS)
        self.user_features = nn.Embedding(sizes["users"], _LAYERS[0] // 2)
        self.item_features = nn.Embedding(sizes["items"], _LAYERS[0] // 2)
        parts: list[nn.Module] = []
        for inputs, outputs in pairwise(_LAYERS):
            parts += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.perceptron = nn.Sequential(*parts)
        self.score = nn.Linear(_FACTORS + _LAYERS[-1], 1)
        for part in (self.user_factors, self.item_factors, self.user_features, self.item_features):
            nn.init.normal_(part.weight, std=0.05)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        """Map pairs (…, 2) of a user and an item to scores (…)."""
        users, items = pairs.unbind(-1)
        factors = self.user_factors(users) * self.item_factors(items)
        features = self.perceptron(torch.cat((self.user_features(users), self.item_features(items)), -1))
        scores: torch.Tensor = self.score(torch.cat((factors, features), -1)).squeeze(-1)
        return scores
