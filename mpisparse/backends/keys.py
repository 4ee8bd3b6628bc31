"""Selection keys: how a predicted importance score and a magnitude combine into one number to compare with a threshold."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

PRODUCTS, SCORES = 1, 2


def keys_of(acc: Any, scores: Any, key: int) -> Any:
    """PRODUCTS: magnitude x (score + 1) / 256. SCORES: by score, then by magnitude; the float has the bits of both.

    Of a device's vectors as of the host's.
    """
    if isinstance(acc, torch.Tensor):
        if key == PRODUCTS:
            return acc.abs() * ((scores.float() + 1) * 2**-8)
        return (scores.int() << 23 | acc.abs().view(torch.int32) >> 8).view(torch.float32)
    magnitude = np.abs(acc)
    if key == PRODUCTS:
        share = (scores.astype(np.float32) + np.float32(1)) * np.float32(2**-8)
        with np.errstate(invalid="ignore"):
            return magnitude * share
    return (scores.astype(np.uint32) << 23 | magnitude.view(np.uint32) >> 8).view(np.float32)
