"""The network of examples/digits.py, for any small image."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


def convnet(sizes: Mapping[str, int]) -> nn.Module:
    """Build two convolutions and two linear layers: about 300,000 parameters for 8 x 8 pixels."""
    pooled = (sizes["height"] // 2) * (sizes["width"] // 2)
    return nn.Sequential(
        nn.Conv2d(sizes["channels"], 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * pooled, 256), nn.ReLU(), nn.Linear(256, sizes["classes"]),
    )  # fmt: skip
