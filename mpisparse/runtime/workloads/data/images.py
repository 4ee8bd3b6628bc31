"""Labelled images: batches, scikit-learn's digits, and synthetic ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpisparse.arrays import Ints
from mpisparse.errors import ConfigurationError
from mpisparse.runtime.workloads.data.draws import below, draw, shuffle
from mpisparse.runtime.workloads.records import Data

AUGMENTED = (32, 32)  # size of images that are flipped and shifted in training
PAD = 4
SAMPLE = 10_000_000  # values, approximately, for mean and deviation

Labelled = tuple[NDArray[Any], Ints]


class ImageExamples:
    """Images (examples, channels, height, width) of bytes or floats, normalized when a batch is made."""

    def __init__(self, images: NDArray[Any], labels: Ints, mean: torch.Tensor, deviation: torch.Tensor) -> None:
        self._images = images
        self._labels = labels
        self._mean = mean
        self._scale = 1 / deviation
        self._augmented = images.shape[2:] == AUGMENTED

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, indices: NDArray[Any], *, seed: int, epoch: int, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images and labels; in training, 32 x 32 images are shifted by up to 4 pixels and half are flipped."""
        images = self._images[indices]
        if train and self._augmented:
            images = _augment(images, draw(indices, 3, seed=seed, epoch=epoch))
        normal = torch.from_numpy(images.astype(np.float32)).sub_(self._mean).mul_(self._scale)
        return normal, torch.from_numpy(self._labels[indices])


def _augment(images: NDArray[Any], words: NDArray[np.uint64]) -> NDArray[Any]:
    """Pad each image with black, cut a window out of it, and mirror half of them."""
    count, channels, height, width = images.shape
    framed = np.zeros((count, channels, height + 2 * PAD, width + 2 * PAD), images.dtype)
    framed[:, :, PAD:-PAD, PAD:-PAD] = images
    windows = np.lib.stride_tricks.sliding_window_view(framed, (height, width), axis=(2, 3))
    down, right = below(words[:, :2], 2 * PAD + 1).T
    cut: NDArray[Any] = windows[np.arange(count), :, down, right]
    mirrored = below(words[:, 2], 2) == 1
    cut[mirrored] = cut[mirrored][..., ::-1]
    return cut


def image_data(train: Labelled, test: Labelled, classes: int, validation: Labelled | None = None) -> Data:
    """Make data from images (examples, channels, height, width), normalized by the training images."""
    sample = train[0][:: -(-train[0].size // SAMPLE)].astype(np.float64)
    mean, deviation = sample.mean((0, 2, 3)), sample.std((0, 2, 3))
    deviation[deviation == 0] = 1
    scaling = [torch.tensor(values, dtype=torch.float32)[:, None, None] for values in (mean, deviation)]
    training, testing = (ImageExamples(*part, *scaling) for part in (train, test))
    held_out = None if validation is None else ImageExamples(*validation, *scaling)
    channels, height, width = train[0].shape[1:]
    sizes = {"classes": classes, "channels": channels, "height": height, "width": width}
    return Data(training, testing, "classes", sizes, held_out)


def split_images(images: NDArray[Any], labels: Ints, testing: int) -> tuple[Labelled, Labelled]:
    """Hold out this many images, always the same ones."""
    order = shuffle(len(labels), seed=0)
    train, test = order[testing:], order[:testing]
    return (images[train], labels[train]), (images[test], labels[test])


def digits() -> Data:
    """Load scikit-learn's digits: 1,500 images to train on, 297 to test."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            "data 'digits' needs scikit-learn, which is not installed; run `pip install scikit-learn` or choose other --data"
        ) from error
    loaded = load_digits()
    images = loaded.images.astype(np.uint8)[:, None]
    return image_data(*split_images(images, loaded.target.astype(np.int64), testing=297), classes=10)


def synthetic_images(training: int = 5000, testing: int = 1000, classes: int = 10) -> Data:
    """Generate noisy images: a class is a coarse pattern of 4 x 4 colors, drawn faintly over noise."""
    count = training + testing
    labels = below(draw(np.arange(count), 1, seed=1, epoch=0)[:, 0], classes)
    patterns = below(draw(np.arange(classes), 3 * 4 * 4, seed=2, epoch=0), 81).reshape(classes, 3, 4, 4)
    pictures = patterns.astype(np.uint8).repeat(8, axis=2).repeat(8, axis=3)
    noise = draw(np.arange(count), 3 * 32 * 32 // 8, seed=3, epoch=0).view(np.uint8).reshape(count, 3, 32, 32)
    # At most 80 from the pattern and 175 from noise, so the sum fits in a byte.
    images = pictures[labels] + (noise.astype(np.uint16) * 175 // 255).astype(np.uint8)
    return image_data((images[:training], labels[:training]), (images[training:], labels[training:]), classes)
