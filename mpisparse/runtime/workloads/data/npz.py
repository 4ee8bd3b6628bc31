"""Labelled images from an .npz file."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpisparse.errors import ConfigurationError
from mpisparse.runtime.workloads.data.images import Labelled, image_data, split_images
from mpisparse.runtime.workloads.records import Data

TEST_ONE_IN = 6  # every sixth image is for testing if the file has no test images
MAX_CLASSES = 1 << 20  # larger labels are not class numbers
_INPUTS = ("x", "images", "data", "inputs")
_LABELS = ("y", "labels", "label", "targets", "target")
_EXPECTED = "x_train, y_train, x_test, y_test, or train_images, train_labels, test_images, test_labels, or images, labels"


def load_images(path: Path) -> Data:
    """Load training and test images, and validation images if the file has all three.

    Of two sets the second is for testing, whatever its name. A single set is split into training and test images.
    """
    arrays = _read(path)
    train = _find(path, arrays, "train") or _find(path, arrays, "")
    if train is None:
        raise ConfigurationError(f"{path}: expected arrays {_EXPECTED}; got {', '.join(arrays) or 'none'}")
    test, validation = _find(path, arrays, "test"), None
    for name in ("validation", "valid", "val"):
        validation = validation or _find(path, arrays, name)
    if test is None:
        test, validation = validation, None
    if test is None:
        if len(train[1]) < 2:
            raise ConfigurationError(f"{path}: one image cannot be split into training and test images; give more")
        train, test = split_images(*train, testing=max(1, len(train[1]) // TEST_ONE_IN))
    parts = [train, test] if validation is None else [train, test, validation]
    for name, part in zip(("test", "validation"), parts[1:], strict=False):
        if train[0].shape[1:] != part[0].shape[1:]:
            raise ConfigurationError(
                f"{path}: training and {name} images must have the same shape, got (channels, height, width)"
                f" {train[0].shape[1:]} and {part[0].shape[1:]}"
            )
    if len({images.dtype for images, _ in parts}) > 1:
        parts = [(images.astype(np.float32), labels) for images, labels in parts]
    classes = 1 + int(max(labels.max() for _, labels in parts))
    return image_data(parts[0], parts[1], classes, *parts[2:])


def _read(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except (OSError, EOFError, ValueError, LookupError, RuntimeError, MemoryError, zlib.error, zipfile.BadZipFile) as error:
        raise ConfigurationError(
            f"{path}: expected an .npz of plain arrays (np.savez); reading it failed: {error}"
        ) from error


def _find(path: Path, arrays: Mapping[str, NDArray[Any]], part: str) -> Labelled | None:
    """Find one part's images and labels under the usual spellings: x_train, trainX, train_images, images_train, …"""
    plain = {key.lower().replace("_", "").replace("-", ""): key for key in arrays}
    inputs, labels = (
        next((plain[key] for word in words for key in (word + part, part + word) if key in plain), None)
        for words in (_INPUTS, _LABELS)
    )
    if inputs is None or labels is None:
        return None
    return _check(path, inputs, arrays[inputs], labels, arrays[labels])


def _check(path: Path, image_key: str, images: NDArray[Any], label_key: str, labels: NDArray[Any]) -> Labelled:
    labels = labels.reshape(-1) if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if labels.ndim != 1 or len(labels) != len(images) or len(images) == 0:
        raise ConfigurationError(
            f"{path}: expected one label per image; got {image_key} {images.shape} and {label_key} {labels.shape}"
        )
    if labels.dtype.kind not in "iuf" or (labels != np.round(labels)).any() or labels.min() < 0:
        raise ConfigurationError(f"{path}: {label_key} must be class numbers 0, 1, 2, …; got {labels[:5]} …")
    if labels.max() >= MAX_CLASSES:
        raise ConfigurationError(
            f"{path}: {label_key} must be class numbers below {MAX_CLASSES:,}, got {labels.max()}; number them 0, 1, 2, …"
        )
    if images.ndim not in (3, 4) or images.dtype.kind not in "iufb" or 0 in images.shape:
        raise ConfigurationError(
            f"{path}: {image_key} must be numbers (N, H, W), (N, H, W, C) or (N, C, H, W);"
            f" got {images.shape} of {images.dtype}"
        )
    with np.errstate(over="ignore"):  # values too large for float32
        arranged = _arrange(images)
    if arranged.dtype.kind == "f" and not np.isfinite(arranged).all():
        raise ConfigurationError(f"{path}: {image_key} has infinite values or NaN; remove these images")
    return arranged, labels.astype(np.int64)


def _arrange(images: NDArray[Any]) -> NDArray[Any]:
    """Convert images to (examples, channels, height, width), as bytes or float32."""
    if images.ndim == 3:
        images = images[:, None]
    elif images.shape[3] <= 4 and images.shape[3] < images.shape[1]:
        images = images.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(
        images, dtype=np.uint8 if images.dtype.kind == "b" or images.dtype == np.uint8 else np.float32
    )
