"""A number for the bits of tensors: their sum as 64-bit integers. Fast as memory; blind to changes that cancel exactly."""

from __future__ import annotations

from collections.abc import Iterable

import torch

LARGEST = (1 << 63) - 1


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """A number for the bits of tensors, 0 if all of them are 0; local."""
    total = 0
    for tensor in tensors:
        total = (total * 31 + _bits(tensor)) & LARGEST
    return total


def _bits(tensor: torch.Tensor) -> int:
    """The sum of a tensor's bits as 64-bit integers, in the order in which they lie in memory."""
    flat = tensor.detach()
    if flat.layout is not torch.strided:
        flat = flat.to_dense()
    dense = flat.numel() <= 1 or torch.ops.aten.is_non_overlapping_and_dense(flat)
    flat = flat.as_strided((flat.numel(),), (1,)) if dense else flat.reshape(-1)
    if flat.storage_offset() * flat.itemsize % 8:
        flat = flat.clone()
    whole = flat.numel() // (8 // flat.itemsize) * (8 // flat.itemsize) if flat.itemsize < 8 else flat.numel()
    rest = flat[whole:].cpu().view(torch.uint8).tolist() if whole < flat.numel() else []
    words = int(flat[:whole].view(torch.int64).sum()) if whole else 0
    return (words + int.from_bytes(bytes(rest), "little")) & LARGEST
