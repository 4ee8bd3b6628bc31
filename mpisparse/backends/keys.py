"""Selection keys: how a predicted importance score and a magnitude combine into one number to compare with a threshold."""

from __future__ import annotations

import numpy as np

from mpisparse.arrays import Bytes, Floats

PRODUCTS, SCORES = 1, 2


def keys_of(acc: Floats, scores: Bytes, key: int) -> Floats:
    """PRODUCTS: magnitude x (score + 1) / 256. SCORES: by score, then by magnitude; the float has the bits of both."""
    magnitude = np.abs(acc)
    if key == PRODUCTS:
        share = (scores.astype(np.float32) + np.float32(1)) * np.float32(2**-8)
        with np.errstate(invalid="ignore"):
            product: Floats = magnitude * share
        return product
    bits: Floats = (scores.astype(np.uint32) << 23 | magnitude.view(np.uint32) >> 8).view(np.float32)
    return bits
