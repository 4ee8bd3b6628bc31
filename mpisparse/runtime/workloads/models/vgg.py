"""VGG (Simonyan & Zisserman 2015) with batch norm and one linear layer, as is usual for small images."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

_STAGES = {16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
_WIDTHS = (64, 128, 256, 512, 512)


def vgg(sizes: Mapping[str, int], layers: int) -> nn.Module:
    """Build VGG with 16 layers (15 million parameters) or 19 (20 million)."""
    return VGG(sizes, _STAGES[layers])


class VGG(nn.Module):
    """Five stages of 3 x 3 convolutions, each halving the image (rounded up), a mean, a linear layer."""

    def __init__(self, sizes: Mapping[str, int], stages: tuple[int, ...]) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        inputs = sizes["channels"]
        for width, convolutions in zip(_WIDTHS, stages, strict=True):
            for _ in range(convolutions):
                convolution = nn.Conv2d(inputs, width, 3, padding=1, bias=False)
                nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
                parts += [convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
                inputs = width
            parts.append(nn.MaxPool2d(2, ceil_mode=True))
        self.features = nn.Sequential(*parts)
        self.classify = nn.Linear(inputs, sizes["classes"])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the score of each class."""
        scores: torch.Tensor = self.classify(self.features(images).mean((2, 3)))
        return scores
