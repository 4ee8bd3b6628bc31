"""Residual networks (He et al. 2016) with a stem for small images: one 3 x 3 convolution, no pooling."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

Branch = Callable[[int, int, int], nn.Sequential]  # channels in, width, stride


def resnet20(sizes: Mapping[str, int]) -> nn.Module:
    """Build the paper's narrow network with 20 layers: 270,000 parameters."""
    return ResNet(sizes, _basic_branch, (3, 3, 3), expansion=1, width=16)


def resnet18(sizes: Mapping[str, int]) -> nn.Module:
    """Build the network with 18 layers: 11 million parameters."""
    return ResNet(sizes, _basic_branch, (2, 2, 2, 2), expansion=1)


def resnet152(sizes: Mapping[str, int]) -> nn.Module:
    """Build the network with 152 layers: 58 million parameters."""
    return ResNet(sizes, _bottleneck_branch, (3, 8, 36, 3), expansion=4)


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """Make a convolution and its batch norm."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return [convolution, nn.BatchNorm2d(outputs)]


def _basic_branch(inputs: int, width: int, stride: int) -> nn.Sequential:
    return nn.Sequential(*_convolution(inputs, width, 3, stride), nn.ReLU(inplace=True), *_convolution(width, width, 3))


def _bottleneck_branch(inputs: int, width: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        *_convolution(inputs, width, 1), nn.ReLU(inplace=True),
        *_convolution(width, width, 3, stride), nn.ReLU(inplace=True),
        *_convolution(width, 4 * width, 1),
    )  # fmt: skip


class Residual(nn.Module):
    """relu(branch(x) + x), with x projected where the shape changes. The branch starts at zero."""

    def __init__(self, branch: nn.Sequential, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = branch
        changed = inputs != outputs or stride != 1
        self.shortcut = nn.Sequential(*_convolution(inputs, outputs, 1, stride)) if changed else nn.Identity()
        last = branch[-1]
        assert isinstance(last, nn.BatchNorm2d)
        nn.init.zeros_(last.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the branch to the shortcut."""
        total: torch.Tensor = self.branch(x) + self.shortcut(x)
        return total.relu_()


class ResNet(nn.Module):
    """A stem, stages of residual blocks, of which all but the first halve the image, a mean, a linear layer."""

    def __init__(
        self, sizes: Mapping[str, int], branch: Branch, blocks: tuple[int, ...], expansion: int, width: int = 64
    ) -> None:
        super().__init__()
        inputs = width
        self.stem = nn.Sequential(*_convolution(sizes["channels"], inputs, 3), nn.ReLU(inplace=True))
        stages: list[nn.Module] = []
        for stage, count in enumerate(blocks):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                outputs = expansion * width
                stages.append(Residual(branch(inputs, width, stride), inputs, outputs, stride))
                inputs = outputs
            width *= 2
        self.stages = nn.Sequential(*stages)
        self.classify = nn.Linear(inputs, sizes["classes"])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the score of each class."""
        scores: torch.Tensor = self.classify(self.stages(self.stem(images)).mean((2, 3)))
        return scores
